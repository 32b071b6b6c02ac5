"""JSON schemas as the matcher takes them.

Objects and tuples are closed unless they say otherwise, as DeepInfer's are: `properties` without
`additionalProperties` takes no other keys, `prefixItems` without `items` no more items. Schemas
that are merged with others (`allOf`; `$ref`, `anyOf` or `oneOf` beside properties) stay open: what
one closes, the others could not add to.
"""

from __future__ import annotations

import json
import urllib.parse
from collections.abc import Callable, Iterator

from deepinfer_compile.runtime.grammar.errors import GrammarError

Json = dict[str, "Json"] | list["Json"] | str | int | float | bool | None

_NAMED = ("properties", "patternProperties", "$defs", "definitions")
_LISTED = ("anyOf", "oneOf", "allOf", "prefixItems", "items")
_SINGLE = ("additionalProperties", "items", "not")
_PARTS = ("anyOf", "oneOf", "allOf")
_PLAIN = "#/$~%:?@!&'()*+,;="  # of a URI; letters beyond ASCII are not


def read_schema(text: str) -> Json:
    """The schema as JSON. GrammarError: it is none, with line and column."""
    try:
        schema: Json = json.loads(text, object_pairs_hook=_once, parse_constant=_no_number)
    except json.JSONDecodeError as bad:
        where = f"line {bad.lineno}, column {bad.colno}"
        raise GrammarError(f"the schema is no JSON: {where}: {bad.msg}") from None
    except RecursionError:
        raise GrammarError("the schema is nested too deeply to be read") from None
    if not isinstance(schema, dict | bool):
        raise GrammarError(f"a schema is an object, true or false, found {text.strip()[:40]}")
    return schema


def closed(schema: Json) -> Json:
    """`schema` with its objects and tuples closed, and references that are URIs."""
    merged = set(_merged(schema, "#"))

    def close(at: str, part: Json) -> Json:
        part = rebuilt(part, lambda path, child: close(at + path, child))
        if isinstance(part, dict) and isinstance(target := part.get("$ref"), str):
            part["$ref"] = quoted(target)
        if isinstance(part, dict) and at not in merged:
            if "properties" in part:
                part.setdefault("additionalProperties", False)
            if "prefixItems" in part:
                part.setdefault("items", False)
        return part

    return close("#", schema)


def rebuilt(schema: Json, change: Callable[[str, Json], Json]) -> Json:
    """A copy of `schema` with `change(path, child)` in the place of each schema right inside it;
    `path` is the JSON pointer from here."""
    if not isinstance(schema, dict):
        return schema
    copy: dict[str, Json] = {}
    for key, value in schema.items():
        path = f"/{_escaped(key)}"
        if key in _NAMED and isinstance(value, dict):
            copy[key] = {n: change(f"{path}/{_escaped(n)}", child) for n, child in value.items()}
        elif key in _LISTED and isinstance(value, list):
            copy[key] = [change(f"{path}/{i}", child) for i, child in enumerate(value)]
        elif key in _SINGLE:
            copy[key] = change(path, value)
        else:
            copy[key] = value
    return copy


def children(schema: Json) -> dict[str, Json]:
    """The schemas right inside `schema`, by their pointer from here."""
    found: dict[str, Json] = {}

    def note(path: str, child: Json) -> Json:
        found[path] = child
        return child

    rebuilt(schema, note)
    return found


def quoted(reference: str) -> str:
    """A reference as the URI that the library wants."""
    return urllib.parse.quote(reference, safe=_PLAIN)


def reference(schema: Json) -> str | None:
    """The place in the same document that `schema` refers to."""
    target = schema.get("$ref") if isinstance(schema, dict) else None
    local = isinstance(target, str) and target.startswith("#")
    return urllib.parse.unquote(str(target)) if local else None


def _merged(schema: Json, at: str) -> Iterator[str]:
    """Places of schemas that are one with another: those with parts, and the parts."""
    inside = children(schema)
    if isinstance(schema, dict):
        beside = "properties" in schema and not schema.keys().isdisjoint(("$ref", *_PARTS))
        if "allOf" in schema or beside:
            parts = {path: part for path, part in inside.items() if path.split("/")[1] in _PARTS}
            yield from (at, *(at + path for path in parts))
            targets = (reference(part) for part in (schema, *parts.values()))
            yield from (target for target in targets if target is not None)
    for path, child in inside.items():
        yield from _merged(child, at + path)


def _escaped(key: str) -> str:
    return key.replace("~", "~0").replace("/", "~1")


def _once(pairs: list[tuple[str, Json]]) -> dict[str, Json]:
    keys = [key for key, _ in pairs]
    if twice := sorted({key for key in keys if keys.count(key) > 1}):
        raise GrammarError(f"the schema has twice in one object: {', '.join(twice)}")
    return dict(pairs)


def _no_number(name: str) -> Json:
    raise GrammarError(f"the schema is no JSON: {name} is no number of it")
