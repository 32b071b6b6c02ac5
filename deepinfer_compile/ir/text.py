"""Graphs as text, and back: `parse_graph(print_graph(g)) == g`, origins included.

    graph decode
      input %token_id: i32[R]
      weight %embed: bf16[256,64] from "embed.weight"
      state %window.0.0: !mxfp8[9,16,64]
      %x: bf16[R,64] = embed %token_id, %embed {out=bf16}  # at="nano.yaml:3 model" passes=build
      %y: bf16[R,64] = rmsnorm %x, %w {eps=1e-06}  # layer=0 at="nano.yaml:9 model" passes=build
      probe %x
      return %y

An attribute at its default is left out, and so is `probe` without values. Mistakes in a text have
codes E190 to E199.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import get_type_hints

from deepinfer_compile.diagnostics import CompileError, Span, error
from deepinfer_compile.ir.fused import FUSED
from deepinfer_compile.ir.graph import Graph, Node, Origin, Value, Weight
from deepinfer_compile.ir.ops import OPS, Op
from deepinfer_compile.ir.types import Dim, DType, R, TensorType

Attribute = int | float | bool | DType | tuple[int, ...] | None

_OPS: Mapping[str, type[Op]] = {op.name: op for op in (*OPS, *FUSED)}
_WORDS: Mapping[str, Attribute] = {
    "true": True,
    "false": False,
    "none": None,
    **{dtype.value: dtype for dtype in DType},
}


def print_graph(graph: Graph) -> str:
    """The text of a graph, ending in a newline."""
    lines = [f"graph {graph.name}"]
    lines += [f"  input {value}" for value in graph.inputs]
    lines += [f"  weight {w.value} from {json.dumps(w.source)}" for w in graph.weights]
    lines += [f"  state {value}" for value in graph.states]
    lines += [f"  {print_node(node)}" for node in graph.nodes]
    if graph.probes:
        lines.append(f"  probe {_names(graph.probes)}")
    lines.append(f"  return {_names(graph.outputs)}".rstrip())
    return "\n".join(lines) + "\n"


def print_node(node: Node) -> str:
    """One line, without indentation."""
    results = ", ".join(map(str, node.outputs))
    text = f"{results} = {node.op.name} {_names(node.inputs)}".rstrip()
    attributes = _print_attributes(node.op)
    origin = _print_origin(node.origin)
    return text + (f" {{{attributes}}}" if attributes else "") + (f"  # {origin}" if origin else "")


def _names(values: Iterable[Value]) -> str:
    return ", ".join(f"%{value.name}" for value in values)


def _print_attributes(op: Op) -> str:
    assert dataclasses.is_dataclass(op)
    texts = []
    for item in dataclasses.fields(op):
        value: Attribute = getattr(op, item.name)
        if value != item.default:
            texts.append(f"{item.name}={_print_attribute(value)}")
    return ", ".join(texts)


def _print_attribute(value: Attribute) -> str:
    match value:
        case None:
            return "none"
        case bool():
            return str(value).lower()
        case DType():
            return value.value
        case tuple():
            return f"[{', '.join(map(str, value))}]"
        case _:
            return repr(value)


def _print_origin(origin: Origin) -> str:
    parts = []
    if origin.layer is not None:
        parts.append(f"layer={origin.layer}")
    if origin.at:
        parts.append(f"at={json.dumps(origin.at)}")
    if origin.passes:
        parts.append(f"passes={','.join(origin.passes)}")
    if origin.refused:
        parts.append(f"refused={','.join(map(json.dumps, origin.refused))}")
    return " ".join(parts)


def parse_graph(text: str, file: str = "graph.ir") -> Graph:
    """The graph that `text` prints. Names, types and operators are checked; `verify` does more."""
    scope = _Scope()
    name, lines = _header(text, file)
    outputs: tuple[Value, ...] | None = None
    for line in lines:
        if outputs is not None:
            raise line.error("E190", "nothing may follow `return`")
        if line.accept("return"):
            outputs = _operands(line, scope)
            line.finish()
        else:
            _statement(line, scope)
    if outputs is None:
        raise error("E190", "the graph ends without `return`", where=file)
    return Graph(
        name,
        tuple(scope.inputs),
        tuple(scope.weights),
        tuple(scope.states),
        tuple(scope.nodes),
        outputs,
        scope.probes,
    )


def parse_type(text: str) -> TensorType:
    """A single type, such as `!mxfp8[9,16,64]`."""
    line = _Line("type", 1, text)
    found = _type(line)
    line.finish()
    return found


_TOKEN = re.compile(
    r"""(?P<space>\s+)
      | (?P<string>"(?:[^"\\]|\\.)*")
      | (?P<value>%[\w.]+)
      | (?P<number>[+-]?(?:\d+(?:\.\d*)?(?:e[+-]?\d+)?|inf\b|nan\b))
      | (?P<word>[\w.@/-]+)
      | (?P<mark>[:=,{}\[\]!#])
    """,
    re.VERBOSE,
)


@dataclass(frozen=True)
class _Token:
    kind: str
    text: str
    col: int


@dataclass
class _Line:
    """The tokens of one line and how far they are read."""

    file: str
    number: int
    source: str
    tokens: list[_Token] = field(default_factory=list)
    at: int = 0

    def __post_init__(self) -> None:
        start = 0
        while start < len(self.source):
            found = _TOKEN.match(self.source, start)
            if found is None:
                self.tokens = [_Token("mark", self.source[start], start + 1)]
                raise self.error("E190", f"unexpected character {self.source[start]!r}")
            if found.lastgroup != "space":
                self.tokens.append(_Token(found.lastgroup or "", found.group(), start + 1))
            start = found.end()

    @property
    def here(self) -> _Token:
        """The next token; at the end of the line an empty one."""
        if self.at < len(self.tokens):
            return self.tokens[self.at]
        return _Token("end", "", len(self.source) + 1)

    def error(self, code: str, message: str, token: _Token | None = None) -> CompileError:
        token = token or self.here
        width = max(1, len(token.text))
        span = Span(self.file, self.number, token.col, width=width, source=self.source)
        return error(code, message, span=span)

    def accept(self, text: str) -> bool:
        """Read `text` if it comes next."""
        found = self.here.text == text
        self.at += found
        return found

    def expect(self, text: str) -> None:
        if not self.accept(text):
            found = f"`{self.here.text}`" if self.here.text else "the end of the line"
            raise self.error("E190", f"expected `{text}`, found {found}")

    def take(self, *kinds: str) -> _Token:
        """The next token, of one of these kinds."""
        token = self.here
        if token.kind not in kinds:
            found = f"`{token.text}`" if token.text else "the end of the line"
            raise self.error("E190", f"expected a {' or '.join(kinds)}, found {found}")
        self.at += 1
        return token

    def finish(self) -> None:
        if self.here.kind != "end":
            raise self.error("E190", f"unexpected `{self.here.text}` at the end of the line")


@dataclass
class _Scope:
    """What the lines so far define."""

    values: dict[str, Value] = field(default_factory=dict)
    inputs: list[Value] = field(default_factory=list)
    weights: list[Weight] = field(default_factory=list)
    states: list[Value] = field(default_factory=list)
    nodes: list[Node] = field(default_factory=list)
    probes: tuple[Value, ...] = ()


def _header(text: str, file: str) -> tuple[str, Iterator[_Line]]:
    """The graph's name and the lines after it; blank lines do not count."""
    numbered = enumerate(text.splitlines(), 1)
    lines = (_Line(file, number, source) for number, source in numbered if source.strip())
    first = next(lines, None)
    if first is None:
        raise error("E190", "the text is empty", where=file)
    first.expect("graph")
    name = first.take("word").text
    first.finish()
    return name, lines


def _statement(line: _Line, scope: _Scope) -> None:
    if line.accept("input"):
        scope.inputs.append(_definition(line, scope))
    elif line.accept("weight"):
        value = _definition(line, scope)
        line.expect("from")
        scope.weights.append(Weight(value, _string(line)))
    elif line.accept("state"):
        scope.states.append(_definition(line, scope))
    elif line.accept("probe"):
        scope.probes += _operands(line, scope)
    else:
        scope.nodes.append(_node(line, scope))
    line.finish()


def _node(line: _Line, scope: _Scope) -> Node:
    """Results are defined after the operands are read: a node may not read itself."""
    results: dict[str, Value] = {}
    outer = _Scope(results)
    outputs = [_definition(line, outer)]
    while line.accept(","):
        outputs.append(_definition(line, outer))
    line.expect("=")
    token = line.take("word", "number")
    if token.text not in _OPS:
        raise line.error("E191", f"there is no operator `{token.text}`", token)
    inputs = _operands(line, scope)
    op = _attributes(line, _OPS[token.text], token)
    for name, value in results.items():
        if name in scope.values:
            raise line.error("E193", f"`%{name}` is defined twice", line.tokens[0])
        scope.values[name] = value
    return Node(op, inputs, tuple(outputs), _origin(line))


def _definition(line: _Line, scope: _Scope) -> Value:
    token = line.take("value")
    line.expect(":")
    value = Value(token.text[1:], _type(line))
    if value.name in scope.values:
        raise line.error("E193", f"`{token.text}` is defined twice", token)
    scope.values[value.name] = value
    return value


def _type(line: _Line) -> TensorType:
    state = line.accept("!")
    token = line.take("word")
    dtype = _WORDS.get(token.text)
    if not isinstance(dtype, DType):
        raise line.error("E194", f"there is no element type `{token.text}`", token)
    line.expect("[")
    shape = [_dim(line, first=True)]
    while line.accept(","):
        shape.append(_dim(line, first=False))
    line.expect("]")
    return TensorType(dtype, tuple(shape), state)


def _dim(line: _Line, first: bool) -> Dim:
    token = line.take("word", "number")
    if token.text == R.value and first:
        return R
    if not token.text.isdecimal():
        raise line.error("E194", f"`{token.text}` is no dim: integers, and R at the front", token)
    return int(token.text)


def _operands(line: _Line, scope: _Scope) -> tuple[Value, ...]:
    values: list[Value] = []
    while line.here.kind == "value":
        token = line.take("value")
        if token.text[1:] not in scope.values:
            raise line.error("E192", f"`{token.text}` is not defined above", token)
        values.append(scope.values[token.text[1:]])
        if not line.accept(","):
            break
    return tuple(values)


def _attributes(line: _Line, op: type[Op], name: _Token) -> Op:
    """`{key=value, ...}`, or nothing."""
    hints = get_type_hints(op)
    assert dataclasses.is_dataclass(op)
    keys = {item.name for item in dataclasses.fields(op)}
    given: dict[str, Attribute] = {}
    if line.accept("{"):
        while not given or line.accept(","):
            token = line.take("word")
            if token.text not in keys or token.text in given:
                raise line.error("E195", f"`{op.name}` takes no `{token.text}` here", token)
            line.expect("=")
            given[token.text] = _attribute(line, hints[token.text])
        line.expect("}")
    missing = [
        item.name
        for item in dataclasses.fields(op)
        if item.default is dataclasses.MISSING and item.name not in given
    ]
    if missing:
        raise line.error("E195", f"`{op.name}` needs `{'`, `'.join(missing)}`", name)
    made = op(**given)
    assert isinstance(made, Op)
    return made


def _attribute(line: _Line, hint: object) -> Attribute:
    """A value that fits the field's annotation; an integer may stand for a float."""
    token = line.here
    value = _literal(line)
    if hint is float and type(value) is int:
        return float(value)
    kind = tuple if isinstance(value, tuple) else type(value)
    allowed = {hint, *getattr(hint, "__args__", ()), getattr(hint, "__origin__", None)}
    if kind not in allowed:
        raise line.error("E196", f"`{token.text}` does not fit this attribute", token)
    return value


def _literal(line: _Line) -> Attribute:
    if line.accept("["):
        numbers: list[int] = []
        while not line.accept("]"):
            numbers.append(_integer(line))
            if line.here.text != "]":
                line.expect(",")
        return tuple(numbers)
    token = line.take("word", "number")
    if token.text in _WORDS:
        return _WORDS[token.text]
    if token.kind == "number":
        try:
            return int(token.text)
        except ValueError:
            return float(token.text)
    raise line.error("E196", f"`{token.text}` is no attribute value", token)


def _integer(line: _Line) -> int:
    token = line.take("number")
    try:
        return int(token.text)
    except ValueError:
        raise line.error("E196", f"`{token.text}` is no integer", token) from None


def _string(line: _Line) -> str:
    token = line.take("string")
    try:
        text = json.loads(token.text)
    except ValueError:
        raise line.error("E190", "the string has a bad escape", token) from None
    assert isinstance(text, str)
    return text


def _origin(line: _Line) -> Origin:
    """`# layer=3 at="..." passes=a,b refused="..."`, each part optional; nothing is the empty
    origin."""
    at, layer, passes, refused = "", None, [], []
    if line.accept("#"):
        if line.accept("layer"):
            line.expect("=")
            layer = _integer(line)
        if line.accept("at"):
            line.expect("=")
            at = _string(line)
        if line.accept("passes"):
            line.expect("=")
            passes = [line.take("word").text]
            while line.accept(","):
                passes.append(line.take("word").text)
        if line.accept("refused"):
            line.expect("=")
            refused = [_string(line)]
            while line.accept(","):
                refused.append(_string(line))
    return Origin(at, layer, tuple(passes), tuple(refused))
