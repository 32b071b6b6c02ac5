"""Fuse a norm into the quantisation that reads it, with a rotation between them or without.

    %y = rmsnorm %x, %w {eps}
    %r = quantize %y {to}                 =>   %r = rmsnorm_quantize %x, %w {eps, to}

    %y = rmsnorm %x, %w {eps}
    %r = rope_quantize %y, %angles {to}   =>   %r = rmsnorm_rope_quantize %x, %w, %angles {eps, to}

Not where something else reads %y: a norm whose rows are needed twice keeps its own kernel.
"""

from __future__ import annotations

from collections.abc import Iterator

from deepinfer_compile.ir import fused, ops
from deepinfer_compile.ir.graph import Graph, Node, Rewrite
from deepinfer_compile.ir.ops import Op
from deepinfer_compile.passes.base import Pass, rewrite_each


def _fuse(graph: Graph, node: Node) -> Iterator[Rewrite]:
    norm = graph.producer(node.inputs[0]) if node.inputs else None
    if norm is None or not isinstance(norm.op, ops.RmsNorm):
        return
    op: Op
    match node.op:
        case ops.Quantize(to):
            op = fused.RmsNormQuantize(norm.op.eps, to)
        case fused.RopeQuantize(to):
            op = fused.RmsNormRopeQuantize(norm.op.eps, to)
        case _:
            return
    inputs = (*norm.inputs, *node.inputs[1:])
    origin = norm.origin.merged(node.origin)
    yield Rewrite((norm, node), Node(op, inputs, node.outputs, origin))


FUSE_RMSNORM_QUANTIZE = Pass(
    "fuse-rmsnorm-quantize",
    rewrite_each(_fuse),
    after=("fuse-rope-quantize", "fuse-mhc-enter"),  # which leaves fewer norms
)
