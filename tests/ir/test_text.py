"""Graphs print and parse to themselves; mistakes in a text point at their column."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import replace

import pytest

from deepinfer_compile.diagnostics import CompileError
from deepinfer_compile.ir import ops
from deepinfer_compile.ir.fused import FUSED
from deepinfer_compile.ir.graph import Graph, Node, Origin, Value
from deepinfer_compile.ir.text import parse_graph, parse_type, print_graph
from deepinfer_compile.ir.types import DType, R, TensorType
from tests.ir.small_graph import TEXT

SAMPLES: dict[str, object] = {
    "int": 7,
    "float": 0.1 + 0.2,
    "bool": True,
    "DType": DType.NVFP4,
    "DType | None": DType.BF16,
    "tuple[int, ...]": (3, -(2**62), 0),
}


def every_op() -> list[ops.Op]:
    """One of each, every attribute away from its default."""
    return [
        op(**{f.name: SAMPLES[str(f.type)] for f in dataclasses.fields(op)})
        for op in (*ops.OPS, *FUSED)
    ]


def with_nodes(*nodes: Node) -> Graph:
    return Graph("g", (nodes[0].inputs[0],), (), (), nodes, nodes[-1].outputs)


def test_text_is_what_prints() -> None:
    assert print_graph(parse_graph(TEXT)) == TEXT


def test_parse_reads_states_origins_and_sources() -> None:
    graph = parse_graph(TEXT)
    assert graph.weights[1].source == 'layers.0.norm "w".weight'
    assert graph.states[1] == Value("window.0", TensorType(DType.MXFP8, (3, 4, 32), True))
    node = graph.nodes[1]
    assert node.op == ops.RmsNorm(1e-20)
    assert node.origin == Origin('a.yaml:9 "m"', 0, ("build", "fuse-x"))
    assert graph.nodes[3].origin == Origin("")
    assert [value.name for value in graph.outputs] == ["pooled", "kv"]


@pytest.mark.parametrize("op", every_op(), ids=lambda op: op.name)
def test_every_operator_round_trips(op: ops.Op) -> None:
    x = Value("x.0", TensorType(DType.BF16, (R, 4)))
    results = Value("a", TensorType(DType.I32, (R,))), Value("b", TensorType(DType.I64, (5,), True))
    graph = with_nodes(Node(op, (x, x), results, Origin("", 2)))
    assert parse_graph(print_graph(graph)) == graph


@pytest.mark.parametrize("eps", [1e-20, 1, math.pi, 5e-324, 1e300, math.inf, -0.1])
def test_floats_are_exact(eps: float) -> None:
    x = Value("x", TensorType(DType.F32, (R, 4)))
    graph = with_nodes(Node(ops.RmsNorm(eps), (x,), (Value("y", x.type),)))
    (node,) = parse_graph(print_graph(graph)).nodes
    assert node.op == ops.RmsNorm(eps)


def test_probes_and_refusals_read_back() -> None:
    x, y = (Value(name, TensorType(DType.F32, (R, 4))) for name in "xy")
    origin = Origin("a.yaml:9 m", 3, ("build",), ('pair: Rule: "w" is bf16', "two"))
    node = Node(ops.RmsNorm(1.0), (x, x), (y,), origin)
    graph = replace(with_nodes(node), probes=(y, x))
    text = print_graph(graph)
    assert '# layer=3 at="a.yaml:9 m" passes=build refused="pair: Rule: \\"w\\" is' in text
    assert text.endswith("  probe %y, %x\n  return %y\n")
    assert parse_graph(text) == graph


def test_graph_without_results_and_tuples_of_any_length() -> None:
    x = Value("x", TensorType(DType.I32, (R,)))
    y = Value("y", TensorType(DType.I32, (R, 0)))
    node = Node(ops.EngramHash((), (5,), 2), (x,), (y,))
    graph = Graph("g", (x,), (), (), (node,), ())
    assert parse_graph(print_graph(graph)) == graph


def test_types_parse_alone() -> None:
    assert parse_type("!nvfp4[9,16,64]") == TensorType(DType.NVFP4, (9, 16, 64), True)


MISTAKES = [
    ("graph g\n  %y: f32[R] = relu %x\n", "E191", 2, 16),
    ("graph g\n  input %x: f32[R,4]\n  %y: f32[R,4] = rmsnorm %x, %w {eps=1}\n", "E192", 3, 30),
    ("graph g\n  input %x: f32[R]\n  state %x: !f32[4]\n", "E193", 3, 9),
    ("graph g\n  input %x: f16[R]\n", "E194", 2, 13),
    ("graph g\n  input %x: f32[4,R]\n", "E194", 2, 19),
    ("graph g\n  input %x: f32[R,4]\n  %y: f32[R,4] = rmsnorm %x {epz=1}\n", "E195", 3, 30),
    ("graph g\n  input %x: f32[R,4]\n  %y: f32[R,4] = rmsnorm %x\n", "E195", 3, 18),
    ("graph g\n  input %x: f32[R,4]\n  %y: f32[R,4] = topk %x {k=1.5, ratio=1}\n", "E196", 3, 29),
    ("graph g\n  input %x: f32[R,4]\n  %y: f32[R,4] = quantize %x {to=fast}\n", "E196", 3, 34),
    ("graph g\n  input %x f32[R]\n", "E190", 2, 12),
    ("graph g\n  input %x: f32[R] trailing\n", "E190", 2, 20),
    ("graph g\n  input %x: f32[R];\n", "E190", 2, 19),
    ("graph g\n  weight %x: f32[4] from here\n", "E190", 2, 26),
    ("graph g\n  return\n  input %x: f32[R]\n", "E190", 3, 3),
]


@pytest.mark.parametrize(("text", "code", "line", "col"), MISTAKES)
def test_a_mistake_points_at_its_place(text: str, code: str, line: int, col: int) -> None:
    with pytest.raises(CompileError) as caught:
        parse_graph(text, "x.ir")
    (found,) = caught.value.diagnostics
    assert found.span is not None
    assert (found.code, found.span.file, found.span.line, found.span.col) == (
        code,
        "x.ir",
        line,
        col,
    )
    assert found.span.source == text.splitlines()[line - 1]


@pytest.mark.parametrize("text", ["", "\n", "graph g\n  input %x: f32[R]\n"])
def test_a_text_without_graph_or_return_is_refused(text: str) -> None:
    with pytest.raises(CompileError, match="E190"):
        parse_graph(text)
