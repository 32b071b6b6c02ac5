"""Fuse two products of one input into one launch.

    %a = linear %x, %w0, %s0 {out}
    %b = linear %x, %w1, %s1 {out}    =>    %a, %b = linear_pair %x, %w0, %s0, %w1, %s1 {out}

The query and window projections read the same rows, and so do the two that follow the query's low
rank where a layer selects entries. A decoded token gives each too few tiles to keep all cores busy;
together they do, and threads meet once instead of twice. Grouped products stay alone: their groups
read different parts of %x.
"""

from __future__ import annotations

from collections.abc import Iterator

from deepinfer_compile.ir import fused, ops
from deepinfer_compile.ir.graph import Graph, Node, Rewrite
from deepinfer_compile.passes.base import Pass, rewrite_each


def _fuse(graph: Graph, node: Node) -> Iterator[Rewrite]:
    if not isinstance(node.op, ops.Linear) or node.op.groups > 1:
        return
    for other in graph.readers_of(node.inputs[0]):
        if graph.position(other) > graph.position(node) and _alike(node, other):
            assert isinstance(other.op, ops.Linear)
            op = fused.LinearPair(node.op.out, (node.op.heads, other.op.heads))
            inputs = (*node.inputs, *other.inputs[1:])
            origin = node.origin.merged(other.origin)
            outputs = (*node.outputs, *other.outputs)
            yield Rewrite((node, other), Node(op, inputs, outputs, origin))


def _alike(node: Node, other: Node) -> bool:
    """The same input, kind of weight and type of result."""
    if not isinstance(node.op, ops.Linear) or not isinstance(other.op, ops.Linear):
        return False
    same = node.inputs[0] == other.inputs[0] and len(node.inputs) == len(other.inputs)
    return same and node.op.out is other.op.out and other.op.groups == 1


FUSE_LINEAR_PAIR = Pass(
    "fuse-linear-pair",
    rewrite_each(_fuse),
    after=("fuse-swiglu",),  # whose pairs gain more
)
