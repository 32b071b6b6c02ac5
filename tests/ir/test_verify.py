"""Well-formed graphs pass; each broken invariant is refused with the node that breaks it."""

from __future__ import annotations

import dataclasses
from dataclasses import replace

import pytest

from deepinfer_compile.ir import ops
from deepinfer_compile.ir.graph import Graph, Node, Value, Weight
from deepinfer_compile.ir.text import parse_graph
from deepinfer_compile.ir.types import DType, R, TensorType
from deepinfer_compile.ir.verify import VerifyError, verify
from tests.ir.small_graph import TEXT

STORE = "  %window.1: !mxfp8[3,4,32] = ring_store %window.0, %slot, %position, %kv\n"
AGAIN = "  %window.2: !mxfp8[3,4,32] = ring_store %window.{}, %slot, %position, %kv\n"


def test_the_small_graph_is_well_formed() -> None:
    verify(parse_graph(TEXT))


def test_a_state_may_pass_through_several_versions_and_out() -> None:
    text = TEXT.replace(STORE, STORE + AGAIN.format(1))
    verify(parse_graph(text))
    verify(parse_graph(text.replace("return %pooled, %kv", "return %window.2")))


def broken(old: str, new: str) -> Graph:
    assert old in TEXT
    return parse_graph(TEXT.replace(old, new))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (STORE, STORE + AGAIN.format(0), r"%window.0 is read after it was consumed.*%window.2"),
        ("pool_group %tail.1", "pool_group %tail", r"%tail is read after.*%pooled"),
        ("return %pooled", "return %window.0", r"%window.0 is read after.*return of decode"),
        ("%y: bf16[R,32] = rms", "%y: f32[R,32] = rms", r"results should be bf16\[R,32\].*%y"),
        ("%x: bf16[R,32]", "%x: bf16[R,31]", r"results should be bf16\[R,32\].*%x"),
        ("rmsnorm %x, %w", "rmsnorm %x, %wv", r"operands do not fit: rmsnorm.*%y"),
        ("rmsnorm %x, %w", "rmsnorm %x", r"operands do not fit.*%y"),
        ("%window.0, %slot", "%kv, %slot", r"operands do not fit.*%window.1"),
        ("input %slot: i32[R]", "input %slot: !i32[3]", r"input %slot: !i32\[3\]"),
        ("weight %w: bf16[32]", "weight %w: bf16[R,32]", r"weight %w: bf16\[R,32\] has rows"),
        ('from "embed.weight"', 'from ""', r"weight %embed.* no source"),
        ("state %tail: !f32[3,4,2,4]", "state %tail: f32[3,4,2,4]", r"state %tail.* not typed"),
        ("state %tail: !f32[3,4,2,4]", "state %tail: !f32[R,4,2,4]", r"state %tail.* has rows"),
        ("%kv: mxfp8[R,32] =", "%kv: !mxfp8[R,32] =", r"results should be mxfp8\[R,32\].*%kv"),
    ],
)
def test_a_broken_invariant_names_its_node(old: str, new: str, message: str) -> None:
    with pytest.raises(VerifyError, match=f"(?s){message}"):
        verify(broken(old, new))


def test_order_and_names_are_checked_without_the_parser() -> None:
    graph = parse_graph(TEXT)
    first, second, *rest = graph.nodes
    with pytest.raises(VerifyError, match="%x is used before it is defined, in: %y"):
        verify(replace(graph, nodes=(second, first, *rest)))
    with pytest.raises(VerifyError, match="%x is defined twice"):
        verify(replace(graph, nodes=(first, first, second, *rest)))
    with pytest.raises(VerifyError, match="%w is defined twice"):
        verify(replace(graph, weights=(*graph.weights, Weight(graph.weights[1].value, "w"))))
    other = Value("x", TensorType(DType.F32, (R, 32)))
    with pytest.raises(VerifyError, match=r"%x: f32.* was defined as %x: bf16"):
        verify(replace(graph, nodes=(first, replace(second, inputs=(other, second.inputs[1])))))


@dataclasses.dataclass(frozen=True)
class Leak(ops.Op):
    """An operator that makes a state from nothing."""

    name = "leak"

    def infer(self, inputs: ops.Types) -> ops.Types:
        return (TensorType(DType.F32, (4, 4), state=True),)


@dataclasses.dataclass(frozen=True)
class Grow(ops.Op):
    """An operator that consumes its operands and changes their type."""

    name = "grow"
    consumes = (0, 1)

    def infer(self, inputs: ops.Types) -> ops.Types:
        return tuple(TensorType(t.dtype, (9, *t.inner), t.state) for t in inputs)


def test_states_come_from_states_of_the_same_type() -> None:
    x = Value("x", TensorType(DType.F32, (R, 4)))
    s, t = (Value(name, TensorType(DType.F32, (8, 4), True)) for name in "st")
    made = Value("made", TensorType(DType.F32, (4, 4), True))
    with pytest.raises(VerifyError, match="%made is a state from nowhere, in: %made"):
        verify(Graph("g", (x,), (), (), (Node(Leak(), (x,), (made,)),), ()))
    grown = tuple(Value(name, TensorType(DType.F32, (9, 4), True)) for name in "uv")
    with pytest.raises(VerifyError, match="%s and its next version differ in type"):
        verify(Graph("g", (), (), (s, t), (Node(Grow(), (s, t), grown),), ()))


def test_one_node_may_not_end_a_version_twice_or_read_what_it_ends() -> None:
    s = Value("s", TensorType(DType.F32, (9, 4), True))
    following = tuple(Value(name, s.type) for name in "uv")
    with pytest.raises(VerifyError, match="%s is read and consumed at once"):
        verify(Graph("g", (), (), (s,), (Node(Grow(), (s, s), following),), ()))
