"""Plain values -> schema sections, with each mistake told in our words.

Sections are validated one by one, so a broken `engine` does not hide what is wrong in `model`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from types import UnionType
from typing import TypeVar, Union, get_args, get_origin

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from deepinfer_compile.spec.schema import Document, Section
from deepinfer_compile.spec.tree import Places, Problem, Value

AnySection = TypeVar("AnySection", bound=Section)

_WANTED = {
    "int_parsing_size": "a smaller number",
    "int_type": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "string_type": "text (put it in quotes)",
    "tuple_type": "a list",
    "model_type": "a mapping",
}
_BOUNDS = {
    "greater_than": ("gt", "greater than"),
    "greater_than_equal": ("ge", "at least"),
    "less_than": ("lt", "less than"),
    "less_than_equal": ("le", "at most"),
}


def section_of(annotation: object) -> type[Section] | None:
    """The section class that an annotation names, looking through `X | None`."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return annotation
    if get_origin(annotation) in (Union, UnionType):
        return next(filter(None, map(section_of, get_args(annotation))), None)
    return None


def section_at(path: str) -> type[Section] | None:
    """The section class at a dotted path; the empty path is the whole document."""
    section: type[Section] | None = Document
    for name in path.split(".") if path else []:
        if section is None or name not in section.model_fields:
            return None
        section = section_of(section.model_fields[name].annotation)
    return section


def schema_paths(section: type[Section] = Document, path: str = "") -> Iterator[str]:
    """Every dotted path a spec may hold, sections before their fields."""
    for name, info in section.model_fields.items():
        full = f"{path}.{name}" if path else name
        yield full
        inner = section_of(info.annotation)
        if inner is not None:
            yield from schema_paths(inner, full)


def validate(
    kind: type[AnySection], path: str, values: Mapping[str, Value], places: Places
) -> tuple[AnySection | None, list[Problem]]:
    """The section at top-level `path`, or everything that keeps it from being one."""
    if path not in values:
        what = f"`{places.name(path)}` is missing"
        return None, [Problem("E104", path, what, help=f"add a `{path}:` section")]
    value = values[path]
    try:
        # JSON mode is strict about numbers and text, yet reads lists as tuples.
        return kind.model_validate_json(json.dumps(value), strict=True), []
    except ValidationError as failure:
        details = failure.errors(include_url=False)
    problems = [_problem(detail, path, value, places) for detail in details]
    return None, _missing_together(problems, places)


def unknown_key(key: str, places: Places) -> Problem:
    """E103 with the nearest name: a sibling, else the only section that has this name."""
    parent, _, leaf = key.rpartition(".")
    section = section_at(parent) or Document
    homes = [path.rpartition(".")[0] for path in schema_paths() if path.endswith(f".{leaf}")]
    if len(homes) == 1:
        message = f"unknown key `{places.name(key)}`"
        return Problem("E103", key, message, help=f"`{leaf}` belongs in `{homes[0]}`")
    return unknown_name(key, list(section.model_fields), places)


def unknown_name(key: str, known: Sequence[str], places: Places) -> Problem:
    """E103 for a key that is none of `known`, its possible siblings."""
    near = get_close_matches(key.rpartition(".")[2], known, n=1, cutoff=0.5)
    help = f"did you mean `{near[0]}`?" if near else f"known here: {', '.join(known)}"
    return Problem("E103", key, f"unknown key `{places.name(key)}`", help=help)


def _problem(detail: ErrorDetails, path: str, value: Value, places: Places) -> Problem:
    """One pydantic error as ours; `loc` is relative to the section at `path`."""
    key = path + "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in detail["loc"])
    name, kind = places.name(key), detail["type"]
    context: Mapping[str, object] = detail.get("ctx") or {}
    found = describe(_at(value, detail["loc"]))
    if kind == "extra_forbidden":
        return unknown_key(key, places)
    if kind == "missing" and isinstance(detail["loc"][-1], int):
        return Problem("E111", key, f"`{places.name(_list_of(key))}` has too few entries")
    if kind == "missing":
        return Problem("E104", key, f"`{name}` is missing")
    if kind == "too_long":
        most = context["max_length"]
        message = f"`{name}` has {context['actual_length']} entries, at most {most} are allowed"
        return Problem("E111", key, message)
    if kind in ("literal_error", "enum"):
        return _not_accepted(key, name, str(context["expected"]), found)
    if kind in _BOUNDS:
        bound, words = _BOUNDS[kind]
        limit = f"{context[bound]:g}" if isinstance(context[bound], float) else context[bound]
        return Problem("E107", key, f"`{name}` must be {words} {limit}, found {found}")
    wanted = _WANTED.get(kind, "something else")
    return Problem("E105", key, f"`{name}` must be {wanted}, found {found}")


def _missing_together(problems: Sequence[Problem], places: Places) -> list[Problem]:
    """One problem for all that a section lacks, in place of the first."""
    lacking: dict[str, list[str]] = {}
    for problem in problems:
        if problem.code == "E104":
            section, _, leaf = places.name(problem.key).rpartition(".")
            lacking.setdefault(section, []).append(f"`{leaf}`")
    merged: list[Problem] = []
    for problem in problems:
        section = places.name(problem.key).rpartition(".")[0]
        if problem.code != "E104":
            merged.append(problem)
        elif leaves := lacking.pop(section, None):
            more = f"`{section}` lacks {len(leaves)} keys: {', '.join(leaves)}"
            merged.append(problem if len(leaves) == 1 else replace(problem, message=more))
    return merged


def _not_accepted(key: str, name: str, expected: str, found: str) -> Problem:
    """pydantic lists `'a', 'b' or 'c'`; a spec writes those words bare."""
    words = re.sub(r"'([^']*)'", r"`\1`", expected)
    words = {"True": "`true`", "False": "`false`"}.get(words, words)
    some = " or " in words
    message = f"`{name}` must be {'one of ' if some else ''}{words}, found {found}"
    return Problem("E106", key, message)


def _list_of(key: str) -> str:
    return key[: key.rindex("[")]


def _at(value: Value, location: tuple[int | str, ...]) -> Value:
    """The value at a location, or nothing when it is not there."""
    for part in location:
        if isinstance(value, dict) and isinstance(part, str):
            value = value.get(part)
        elif isinstance(value, list) and isinstance(part, int) and part < len(value):
            value = value[part]
        else:
            return None
    return value


def describe(value: Value) -> str:
    """A value as a message names it."""
    match value:
        case None:
            return "nothing"
        case bool():
            return f"`{str(value).lower()}`"
        case str():
            return f'the text "{value[:40]}{"..." if len(value) > 40 else ""}"'
        case list():
            return "a list"
        case dict():
            return "a mapping"
        case _:
            return f"`{value}`"
