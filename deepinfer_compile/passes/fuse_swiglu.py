"""Fuse the gated activation, and the quantisation after it, into the two products it reads.

    %g = linear %x, %w1, %s1 {out}
    %u = linear %x, %w3, %s3 {out}
    %h = swiglu %g, %u {limit}
    %r = quantize %h {to}        =>   %r = linear_swiglu %x, %w1, %s1, %w3, %s3 {limit, out, to}

    and expert_linear, swiglu with routing weights   =>   expert_swiglu

Four launches become one, and gate and up are never stored. Where nothing quantises %h, or something
else reads it, the result is %h itself. Gate, up and %h are rounded as they were.
"""

from __future__ import annotations

from collections.abc import Iterator

from deepinfer_compile.ir import fused, ops
from deepinfer_compile.ir.graph import Graph, Node, Rewrite, Value
from deepinfer_compile.ir.ops import Op
from deepinfer_compile.ir.types import DType
from deepinfer_compile.passes.base import Pass, rewrite_each


def _fuse(graph: Graph, node: Node) -> Iterator[Rewrite]:
    if not isinstance(node.op, ops.SwiGlu):
        return
    gate, up = (graph.producer(value) for value in node.inputs[:2])
    if gate is None or up is None or gate is up or gate.op != up.op:
        return
    inputs = _operands(gate, up, node.inputs[2:])
    if inputs is None:
        return
    origin = gate.origin.merged(up.origin, node.origin)
    for after in graph.readers_of(node.outputs[0]):
        if isinstance(after.op, ops.Quantize):
            whole = origin.merged(after.origin)
            op = _op(gate.op, node.op, after.op.to)
            yield Rewrite((gate, up, node, after), Node(op, inputs, after.outputs, whole))
    yield Rewrite((gate, up, node), Node(_op(gate.op, node.op, None), inputs, node.outputs, origin))


def _operands(gate: Node, up: Node, weight: tuple[Value, ...]) -> tuple[Value, ...] | None:
    """Of the fused node; None unless gate and up are products of one x that can be fused."""
    match gate.op:
        case ops.Linear(groups=1, heads=0) if not weight and len(gate.inputs) == 3:
            shared = 1
        case ops.ExpertLinear() if weight:
            shared = 2
        case _:
            return None
    if gate.inputs[:shared] != up.inputs[:shared]:
        return None
    return (*gate.inputs, *up.inputs[shared:], *weight)


def _op(gate: Op, swiglu: ops.SwiGlu, to: DType | None) -> Op:
    match gate:
        case ops.Linear(out=inner):
            return fused.LinearSwiGlu(swiglu.limit, inner, to)
        case ops.ExpertLinear(out=inner):
            return fused.ExpertSwiGlu(swiglu.limit, inner, to)
    raise AssertionError(f"`{gate.name}` has no gated form")


FUSE_SWIGLU = Pass("fuse-swiglu", rewrite_each(_fuse))
