"""Fuse a rotation into the quantisation that reads it.

    %y = rope %x, %angles
    %r = quantize %y {to}      =>      %r = rope_quantize %x, %angles {to}

%y is never stored. Rounding does not move: the fused kernel rounds the rotated row to %y's type
before it looks for the largest channel of a group.
"""

from __future__ import annotations

from collections.abc import Iterator

from deepinfer_compile.ir import fused, ops
from deepinfer_compile.ir.graph import Graph, Node, Rewrite
from deepinfer_compile.passes.base import Pass, rewrite_each


def _fuse(graph: Graph, node: Node) -> Iterator[Rewrite]:
    if not isinstance(node.op, ops.Quantize):
        return
    rope = graph.producer(node.inputs[0])
    if rope is None or not isinstance(rope.op, ops.Rope) or rope.op.inverse:
        return
    op = fused.RopeQuantize(node.op.to)
    origin = rope.origin.merged(node.origin)
    yield Rewrite((rope, node), Node(op, rope.inputs, node.outputs, origin))


FUSE_ROPE_QUANTIZE = Pass("fuse-rope-quantize", rewrite_each(_fuse))
