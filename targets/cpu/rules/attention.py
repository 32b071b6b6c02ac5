"""Sparse attention with a sink, decode and prefill; `common/attend.h` is the arithmetic of both.

Each can rotate its queries before and its result back after, in rows it holds anyway.

A work item is a group of heads of one row. A wider group decodes keys less often, a narrower one
leaves work for every core when there is a single row.
"""

from __future__ import annotations

from dataclasses import dataclass

from deepinfer_targets.cpu.rules.base import element, f32, kernel
from deepinfer_targets.cpu.rules.names import number

from deepinfer_compile.format.plan import Extent
from deepinfer_compile.ir import fused, ops
from deepinfer_compile.ir.graph import Node
from deepinfer_compile.ir.types import DType
from deepinfer_compile.target import KernelPlan, KernelRule, Machine, RowClass

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
    turned: int
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
            turned=32,
            scale="0.125f",
            element="bf16",
        )


def _paired(group: int, heads: int) -> bool:
    """Kernels take heads two at a time: only an odd number of them leaves one over."""
    return group % 2 == 0 or heads % 2 == 1


def _parts(node: Node) -> tuple[ops.SparseAttention, ops.Types, int]:
    """The attention, its operands' types, and how many channels are rotated."""
    types = tuple(value.type for value in node.inputs)
    if isinstance(node.op, fused.RopeAttention):
        return node.op.attention(), types[:-1], 2 * types[-1].channels
    assert isinstance(node.op, ops.SparseAttention)
    return node.op, types, 0


class SparseAttentionRule(KernelRule):
    op: type[ops.Op] = ops.SparseAttention
    template = "sparse_attention"

    def refuses(self, node: Node, machine: Machine) -> str | None:
        op, inputs, _ = _parts(node)
        q = node.inputs[0].type
        channels = q.channels
        if channels % 32:
            return f"{channels} channels, needs a multiple of 32"
        ring = node.inputs[1].type.inner[0]
        if ring < op.window:
            return f"rings of {ring} entries, need the {op.window} of the window"
        keys = op.window + (inputs[-1].channels if op.ratio else 0)
        if keys > _MOST_KEYS:
            return f"{keys} keys a row, takes at most {_MOST_KEYS}"
        return None

    def plan(self, node: Node, machine: Machine, rows: RowClass) -> KernelPlan:
        op, inputs, turned = _parts(node)
        q, window = inputs[:2]
        heads, channels = q.inner
        group = next(
            g for g in range(min(heads, _GROUP), 0, -1) if heads % g == 0 and _paired(g, heads)
        )
        selected = page_entries = table = 0
        dtypes: tuple[DType, ...] = (q.dtype, window.dtype)
        compressed = ""
        if op.ratio:
            pages, page_table, chosen = inputs[-3:]
            selected, table = chosen.channels, page_table.channels
            page_entries = pages.inner[0]
            dtypes = (q.dtype, window.dtype, DType.NVFP4)
            compressed = f"_k{selected}_p{page_entries}_t{table}"
        ring = window.inner[0]
        scale = "" if op.scale == channels**-0.5 else f"_s{number(op.scale)}"
        rotated = f"_rope{turned}" if turned else ""
        return kernel(
            node,
            dtypes=dtypes,
            dims=f"h{heads}_d{channels}_w{op.window}_r{ring}{rotated}{compressed}{scale}",
            args=AttentionArgs(
                heads=heads,
                group=group,
                channels=channels,
                window=op.window,
                ring=ring,
                selected=selected,
                page_entries=page_entries,
                table=table,
                turned=turned,
                scale=f32(op.scale),
                element=element(q),
            ),
            items=Extent(per_row=heads // group),
            computes="o = softmax(q k * scale, with exp(sink) in the sum) k"
            + (", q rotated before, o back after" if turned else ""),
            template=self.template,
        )


class ChunkAttentionRule(SparseAttentionRule):
    op: type[ops.Op] = ops.ChunkAttention
    template = "chunk_attention"


class RopeAttentionRule(SparseAttentionRule):
    op = fused.RopeAttention


class ChunkRopeAttentionRule(ChunkAttentionRule):
    op = fused.ChunkRopeAttention


RULES: tuple[KernelRule, ...] = (
    SparseAttentionRule(),
    ChunkAttentionRule(),
    RopeAttentionRule(),
    ChunkRopeAttentionRule(),
)
