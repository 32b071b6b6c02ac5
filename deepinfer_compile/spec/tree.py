"""YAML text -> plain values with the place of each, and every problem of the text itself.

    engine:            values  {"engine": {"max_rows": 64}}
      max_rows: 64     spans   {"engine": 1:1, "engine.max_rows": 2:3}

A key's span covers key and value when both are on one line. JSON is read by the same code, being
a subset of YAML 1.2. Aliases are refused: a spec says each number where it is used.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, StreamMark, YAMLError
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from deepinfer_compile.diagnostics import CompileError, Diagnostic, Span, error

_PREFIX = "tag:yaml.org,2002:"

Value = None | bool | int | float | str | list["Value"] | dict[str, "Value"]

_SCALARS = ("null", "bool", "int", "float")


@dataclass(frozen=True)
class Problem:
    """A mistake at a dotted path, before the path is turned into a place."""

    code: str
    key: str
    message: str
    notes: tuple[str, ...] = ()
    help: str = ""


@dataclass(frozen=True)
class Places:
    """Where each dotted path was written: in the file, or by a `source` that replaced it.

    `names` holds the paths that the file spells differently (a Hugging Face config).
    """

    file: str
    spans: Mapping[str, Span]
    sources: Mapping[str, str] = field(default_factory=dict)
    names: Mapping[str, str] = field(default_factory=dict)

    def span(self, key: str) -> Span:
        """The span of `key`, or of the nearest enclosing path that has one."""
        for path in enclosing(key):
            if path in self.spans:
                return self.spans[path]
        return self.spans.get("") or Span(self.file, 1, 1)

    def source(self, key: str) -> str | None:
        """What set `key`, when it was not the file."""
        return next((self.sources[path] for path in enclosing(key) if path in self.sources), None)

    def name(self, key: str) -> str:
        """`key` as its author spells it."""
        known = next((path for path in enclosing(key) if path in self.names), None)
        return key if known is None else self.names[known] + key.removeprefix(known)

    def diagnostic(self, problem: Problem) -> Diagnostic:
        source = self.source(problem.key)
        return Diagnostic(
            problem.code,
            problem.message,
            span=None if source else self.span(problem.key),
            where=source or "",
            notes=problem.notes,
            help=problem.help,
        )


@dataclass(frozen=True)
class Tree:
    """A parsed file. `problems` are those that do not stop the reading: doubled keys."""

    values: dict[str, Value]
    places: Places
    problems: tuple[Problem, ...]


def enclosing(key: str) -> list[str]:
    """`a.b[3]` -> `a.b[3]`, `a.b`, `a`."""
    cuts = [match.start() for match in re.finditer(r"[.\[]", key)]
    return [key, *(key[:cut] for cut in reversed(cuts))] if key else []


def shown(path: Path) -> str:
    """How a file is named in messages and engines: as the user wrote it, never absolute.

    What ends a line or is no UTF-8 is escaped: the name stands in a comment of every kernel."""
    name = path.name if path.is_absolute() else path.as_posix()
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in name)


def read_text(path: Path, file: str) -> str:
    """The file's text, or E101."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise error("E101", f"no such file: {path}", where=file) from None
    except OSError as problem:
        reason = (problem.strerror or "unknown reason").lower()
        raise error("E101", f"cannot read {path}: {reason}", where=file) from None
    except UnicodeDecodeError as problem:
        message = f"{path} is not UTF-8 text: byte {problem.start} cannot be decoded"
        raise error("E101", message, where=file) from None
    return text.removeprefix("\ufeff")


def parse_tree(text: str, file: str) -> Tree:
    """Read a mapping of mappings; problems of syntax (E102) are raised at once."""
    lines = text.splitlines()
    root = _compose(text, file, lines)
    walk = _Walk(file, lines)
    start = Span(file, 1, 1, source=lines[0] if lines else "")
    if not isinstance(root, MappingNode):
        raise error("E105", "the file must be a mapping of named sections", span=start)
    try:
        values = walk.mapping(root, "")
    except RecursionError:
        raise error("E102", "not readable: nested too deeply", span=start) from None
    if walk.fatal:
        raise CompileError(walk.fatal)
    spans = {"": start, **walk.spans}
    return Tree(values, Places(file, spans), tuple(walk.problems))


def parse_value(text: str) -> Value:
    """One value as YAML, as in `--set key=value`; `ValueError` if it is not readable."""
    try:
        return _Walk("", []).value(YAML(typ="safe", pure=True).compose(text), "")
    except (YAMLError, RecursionError) as problem:
        raise ValueError("not readable as YAML") from problem


def _compose(text: str, file: str, lines: list[str]) -> Node | None:
    try:
        node: Node | None = YAML(typ="safe", pure=True).compose(text)
    except MarkedYAMLError as problem:
        mark = problem.problem_mark or problem.context_mark
        span = _point(mark, file, lines) if mark else Span(file, 1, 1)
        reason = " ".join(filter(None, (problem.context, problem.problem)))
        raise error("E102", f"not readable as YAML: {reason}", span=span) from None
    except YAMLError:
        message = "not readable as YAML: the file holds a control character"
        raise error("E102", message, where=file) from None
    except RecursionError:
        raise error("E102", "not readable as YAML: nested too deeply", where=file) from None
    return node


def _point(mark: StreamMark, file: str, lines: list[str]) -> Span:
    source = lines[mark.line] if mark.line < len(lines) else ""
    return Span(file, mark.line + 1, mark.column + 1, source=source)


class _Walk:
    """Turns nodes into values while noting where each stood."""

    def __init__(self, file: str, lines: list[str]) -> None:
        self.file = file
        self.lines = lines
        self.spans: dict[str, Span] = {}
        self.problems: list[Problem] = []
        self.fatal: list[Diagnostic] = []
        self._seen: set[int] = set()
        # Knows YAML's number forms: 0x10, 1_000, 1e-20, .inf.
        self._numbers = YAML(typ="safe", pure=True).constructor

    def value(self, node: Node | None, path: str) -> Value:
        if node is None:
            return None
        if id(node) in self._seen:
            return self._refuse(node, path, "an alias (`*name`): write the value out")
        self._seen.add(id(node))
        if isinstance(node, MappingNode) and node.tag == _PREFIX + "map":
            return self.mapping(node, path)
        if isinstance(node, SequenceNode) and node.tag == _PREFIX + "seq":
            return self._sequence(node, path)
        if isinstance(node, ScalarNode):
            return self._scalar(node, path)
        return self._refuse(node, path, f"the tag `{node.tag}`")

    def mapping(self, node: MappingNode, path: str) -> dict[str, Value]:
        values: dict[str, Value] = {}
        for key_node, value_node in node.value:
            key = key_node.value if isinstance(key_node, ScalarNode) else "?"
            full = f"{path}.{key}" if path else key
            span = self._span(key_node, value_node, full)
            if key in values:
                first = self.spans[full].line
                self.spans[f"{full}#again"] = span
                message = f"`{full}` is written twice"
                notes = (f"first written on line {first}",)
                self.problems.append(Problem("E108", f"{full}#again", message, notes))
                continue
            self.spans[full] = span
            values[key] = self.value(value_node, full)
        return values

    def _sequence(self, node: SequenceNode, path: str) -> list[Value]:
        values: list[Value] = []
        for index, item in enumerate(node.value):
            full = f"{path}[{index}]"
            self.spans[full] = self._span(item, item, full)
            values.append(self.value(item, full))
        return values

    def _scalar(self, node: ScalarNode, path: str) -> Value:
        kind = str(node.tag).removeprefix(_PREFIX)
        if kind in {"str", "timestamp", "merge"}:
            return str(node.value)
        if kind not in _SCALARS:
            return self._refuse(node, path, f"the tag `{node.tag}`")
        try:
            made: Value = self._numbers.construct_object(node)
        except ValueError:
            return self._refuse(node, path, "a number that is too long")
        return made

    def _refuse(self, node: Node, path: str, what: str) -> Value:
        if not self.file:
            raise YAMLError(what)
        span = self.spans.get(path) or _point(node.start_mark, self.file, self.lines)
        message = f"`{path}` uses {what}" if path else f"the file uses {what}"
        self.fatal.append(Diagnostic("E102", message, span))
        return None

    def _span(self, first: Node, last: Node, key: str) -> Span:
        """From `first` to the end of `last`, cut to the first line's part."""
        start, end = first.start_mark, last.end_mark
        source = self.lines[start.line] if start.line < len(self.lines) else ""
        if end.line != start.line:
            end = first.end_mark
        width = end.column - start.column if end.line == start.line else 1
        return Span(self.file, start.line + 1, start.column + 1, key, max(1, width), source)
