"""Fuse the write-back of a sub-layer into the start of the next one.

    %X1 = mhc_expand %o, %X, %post, %comb
    %p, ..., %y = mhc_enter %X1, ...      =>    %X1, %p, ..., %y = mhc_expand_enter %o, %X, ...

%X1 is still stored: the next write-back reads it. A debug engine that may replace it keeps the two
kernels.
"""

from __future__ import annotations

from collections.abc import Iterator

from deepinfer_compile.ir import fused, ops
from deepinfer_compile.ir.graph import Graph, Node, Rewrite
from deepinfer_compile.passes.base import Pass, rewrite_each


def _fuse(graph: Graph, node: Node) -> Iterator[Rewrite]:
    if not isinstance(node.op, fused.MhcEnter):
        return
    expand = graph.producer(node.inputs[0])
    if expand is None or not isinstance(expand.op, ops.MhcExpand):
        return
    e = node.op
    op = fused.MhcExpandEnter(e.iterations, e.eps, e.norm_eps, e.rms_eps, e.to)
    inputs = (*expand.inputs, *node.inputs[1:])
    origin = expand.origin.merged(node.origin)
    outputs = (*expand.outputs, *node.outputs)
    yield Rewrite((expand, node), Node(op, inputs, outputs, origin))


FUSE_MHC_EXPAND = Pass("fuse-mhc-expand", rewrite_each(_fuse), after=("fuse-mhc-enter",))
