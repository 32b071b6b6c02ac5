"""Sparse attention with a sink, decode and prefill; `common/attend.h` is the arithmetic of both.

A work item is a group of heads of one row. A wider group decodes keys less often, a narrower one
leaves work for every core when there is a single row.
"""

from __future__ import annotations

from dataclasses import dataclass

from deepinfer_targets.cpu.rules.base import element, f32, kernel
from deepinfer_targets.cpu.rules.names import number

from deepinfer_compile.format.plan import Extent
from deepinfer_compile.ir import ops
from deepinfer_compile.ir.graph import Node
from deepinfer_compile.ir.types import DType
from deepinfer_compile.target import KernelPlan, KernelRule, Machine

_GROUP = 32
_MOST_KEYS = 4096  # a row's key list stays on the stack


@dataclass(frozen=True)
class AttentionArgs:
    heads: int
    group: int
    channels: int
    window: int
    ring: int
    selected: int
    page_entries: int
    table: int
    scale: str
    element: str

    @classmethod
    def example(cls) -> AttentionArgs:
        return cls(
            heads=4,
            group=4,
            channels=64,
            window=16,
            ring=16,
            selected=16,
            page_entries=32,
            table=16,
            scale="0.125f",
            element="bf16",
        )


def _paired(group: int, heads: int) -> bool:
    """Kernels take heads two at a time: only an odd number of them leaves one over."""
    return group % 2 == 0 or heads % 2 == 1


class SparseAttentionRule(KernelRule):
    op: type[ops.Op] = ops.SparseAttention

    def refuses(self, node: Node, machine: Machine) -> str | None:
        assert isinstance(node.op, ops.SparseAttention)
        q = node.inputs[0].type
        channels = q.channels
        if channels % 32:
            return f"{channels} channels, needs a multiple of 32"
        ring = node.inputs[1].type.inner[0]
        if ring < node.op.window:
            return f"rings of {ring} entries, need the {node.op.window} of the window"
        keys = node.op.window + (node.inputs[-1].type.channels if node.op.ratio else 0)
        if keys > _MOST_KEYS:
            return f"{keys} keys a row, takes at most {_MOST_KEYS}"
        return None

    def plan(self, node: Node, machine: Machine) -> KernelPlan:
        assert isinstance(node.op, ops.SparseAttention)
        q, window = node.inputs[0].type, node.inputs[1].type
        heads, channels = q.inner
        group = next(
            g for g in range(min(heads, _GROUP), 0, -1) if heads % g == 0 and _paired(g, heads)
        )
        selected = page_entries = table = 0
        dtypes: tuple[DType, ...] = (q.dtype, window.dtype)
        compressed = ""
        if node.op.ratio:
            pages, page_table, chosen = (v.type for v in node.inputs[-3:])
            selected, table = chosen.channels, page_table.channels
            page_entries = pages.inner[0]
            dtypes = (q.dtype, window.dtype, DType.NVFP4)
            compressed = f"_k{selected}_p{page_entries}_t{table}"
        ring = window.inner[0]
        scale = "" if node.op.scale == channels**-0.5 else f"_s{number(node.op.scale)}"
        return kernel(
            node,
            dtypes=dtypes,
            dims=f"h{heads}_d{channels}_w{node.op.window}_r{ring}{compressed}{scale}",
            args=AttentionArgs(
                heads=heads,
                group=group,
                channels=channels,
                window=node.op.window,
                ring=ring,
                selected=selected,
                page_entries=page_entries,
                table=table,
                scale=f32(node.op.scale),
                element=element(q),
            ),
            items=Extent(per_row=heads // group),
            computes="o = softmax(q k * scale, with exp(sink) in the sum) k",
        )


class ChunkAttentionRule(SparseAttentionRule):
    op = ops.ChunkAttention


RULES: tuple[KernelRule, ...] = (SparseAttentionRule(), ChunkAttentionRule())
