"""Fuse what a sub-layer starts from: coefficients, collapse, norm and quantisation of its streams.

    %p, %post, %comb = mhc_coefficients %X, %fn, %base, %scale
    %c = mhc_collapse %X, %pre
    %y = rmsnorm %c, %w
    %r = quantize %y {to}
        =>   %p, %post, %comb, %y, %r = mhc_enter %X, %fn, %base, %scale, %pre, %w {to}

The streams are read once instead of twice, and a row stays in cache from its coefficients to its
records. Where nothing quantises %y, or a probe may replace it, the node ends with %y.

Only for coefficients that are handed on: where a sub-layer collapses with its own, %pre is %p, and
the coefficients have to come first.
"""

from __future__ import annotations

from collections.abc import Iterator

from deepinfer_compile.ir import fused, ops
from deepinfer_compile.ir.graph import Graph, Node, Rewrite
from deepinfer_compile.ir.types import DType
from deepinfer_compile.passes.base import Pass, rewrite_each


def _fuse(graph: Graph, node: Node) -> Iterator[Rewrite]:
    if not isinstance(node.op, ops.RmsNorm):
        return
    collapse = graph.producer(node.inputs[0])
    if collapse is None or not isinstance(collapse.op, ops.MhcCollapse):
        return
    for mhc in graph.readers_of(collapse.inputs[0]):
        if isinstance(mhc.op, ops.MhcCoefficients):
            for after in graph.readers_of(node.outputs[0]):
                if isinstance(after.op, ops.Quantize):
                    yield _entered(mhc, collapse, node, after)
            yield _entered(mhc, collapse, node)


def _entered(mhc: Node, collapse: Node, norm: Node, quantize: Node | None = None) -> Rewrite:
    assert isinstance(mhc.op, ops.MhcCoefficients)
    assert isinstance(norm.op, ops.RmsNorm)
    parts = (mhc, collapse, norm) if quantize is None else (mhc, collapse, norm, quantize)
    first, *others = (part.origin for part in parts)
    to: DType | None = None
    if quantize is not None:
        assert isinstance(quantize.op, ops.Quantize)
        to = quantize.op.to
    m = mhc.op
    op = fused.MhcEnter(m.iterations, m.eps, m.norm_eps, norm.op.eps, to)
    inputs = (*mhc.inputs, collapse.inputs[1], norm.inputs[1])
    outputs = (*mhc.outputs, *norm.outputs, *(quantize.outputs if quantize else ()))
    return Rewrite(parts, Node(op, inputs, outputs, first.merged(*others)))


FUSE_MHC_ENTER = Pass("fuse-mhc-enter", rewrite_each(_fuse))
