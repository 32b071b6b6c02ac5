"""Fuse the rotation of the queries and of the attended rows, back, into the attention between them.

    %q = rope %x, %angles
    %o = sparse_attention %q, ...
    %y = rope %o, %angles {inverse}    =>    %y = rope_attention %x, ..., %angles

Both rotations work on rows that the attention holds anyway, which saves two passes over all heads.
Rows are rounded after each of the three, as they were. Prefill's chunk_attention becomes
chunk_rope_attention.
"""

from __future__ import annotations

from collections.abc import Iterator

from deepinfer_compile.ir import fused, ops
from deepinfer_compile.ir.graph import Graph, Node, Rewrite
from deepinfer_compile.passes.base import Pass, rewrite_each


def _fuse(graph: Graph, node: Node) -> Iterator[Rewrite]:
    if node.op != ops.Rope(inverse=True):
        return
    attention = graph.producer(node.inputs[0])
    if attention is None or not isinstance(attention.op, ops.SparseAttention):
        return
    turn = graph.producer(attention.inputs[0])
    if turn is None or turn.op != ops.Rope() or turn.inputs[1] != node.inputs[1]:
        return
    a = attention.op
    kind = fused.RopeAttention
    if isinstance(a, ops.ChunkAttention):
        kind = fused.ChunkRopeAttention
    inputs = (turn.inputs[0], *attention.inputs[1:], node.inputs[1])
    origin = turn.origin.merged(attention.origin, node.origin)
    op = kind(a.window, a.scale, a.ratio)
    yield Rewrite((turn, attention, node), Node(op, inputs, node.outputs, origin))


FUSE_ROPE_ATTENTION = Pass("fuse-rope-attention", rewrite_each(_fuse))
