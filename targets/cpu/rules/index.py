"""Index scores: of every visible entry, or of the entries of candidate blocks.

`common/index_scores.h` is the arithmetic of both, so an entry scores the same either way.
"""

from __future__ import annotations

from dataclasses import dataclass

from deepinfer_targets.cpu.rules.base import element, f32, kernel
from deepinfer_targets.cpu.rules.names import number

from deepinfer_compile.format.plan import Extent
from deepinfer_compile.ir import ops
from deepinfer_compile.ir.graph import Node
from deepinfer_compile.ir.types import DType
from deepinfer_compile.target import KernelPlan, KernelRule, Machine, RowClass

_PARTS = 16  # work items of a row, at most: each unpacks the query
_TOGETHER = 64  # entries that stay in one item
_FLOATS = (DType.F32, DType.BF16)


def _refusal(node: Node) -> str | None:
    assert isinstance(node.op, ops.IndexScores)
    q, weight = node.inputs[0].type, node.inputs[1].type
    if q.channels % 32:
        return f"{q.channels} index channels, needs a multiple of 32"
    if node.op.out not in _FLOATS or weight.dtype is not node.op.out:
        return (
            f"weights are {weight.dtype.value}, scores {node.op.out.value}; need f32 or bf16 both"
        )
    return None


def _parts(entries: int) -> int:
    return min(_PARTS, -(-entries // _TOGETHER))


def _factor(op: ops.IndexScores, heads: int, channels: int) -> str:
    """Part of a kernel's name unless the factor follows from the shape."""
    usual = heads**-0.5 * channels**-0.5
    return "" if abs(op.factor - usual) <= 1e-12 * usual else f"_f{number(op.factor)}"


@dataclass(frozen=True)
class IndexScoresArgs:
    heads: int
    channels: int
    entries: int
    parts: int
    block: int
    page_entries: int
    table: int
    ratio: int
    factor: str
    rounded: str
    element: str

    @classmethod
    def example(cls) -> IndexScoresArgs:
        return cls(
            heads=4,
            channels=32,
            entries=1024,
            parts=16,
            block=64,
            page_entries=64,
            table=16,
            ratio=1,
            factor="0.0883883461356163f",
            rounded="true",
            element="bf16",
        )


class IndexScoresRule(KernelRule):
    op = ops.IndexScores

    def refuses(self, node: Node, machine: Machine) -> str | None:
        return _refusal(node)

    def plan(self, node: Node, machine: Machine, rows: RowClass) -> KernelPlan:
        assert isinstance(node.op, ops.IndexScores)
        q, weight, keys, page_table = (v.type for v in node.inputs[:4])
        heads, channels = q.inner
        entries, page, table = node.outputs[0].type.channels, keys.inner[0], page_table.channels
        parts = _parts(entries)
        return kernel(
            node,
            dtypes=(q.dtype, node.op.out),
            dims=f"h{heads}_d{channels}_c{entries}_p{page}_r{node.op.ratio}"
            + _factor(node.op, heads, channels),
            args=IndexScoresArgs(
                heads=heads,
                channels=channels,
                entries=entries,
                parts=parts,
                block=_TOGETHER,
                page_entries=page,
                table=table,
                ratio=node.op.ratio,
                factor=f32(node.op.factor),
                rounded="true" if node.op.out is DType.BF16 else "false",
                element=element(weight),
            ),
            items=Extent(per_row=parts),
            computes="y[j] = sum_h weight[h] * factor * relu(q[h] . key[j]); -inf: not visible",
        )


@dataclass(frozen=True)
class CandidateScoresArgs:
    heads: int
    channels: int
    blocks: int
    block: int
    parts: int
    run: int
    page_entries: int
    table: int
    ratio: int
    factor: str
    rounded: str
    element: str

    @classmethod
    def example(cls) -> CandidateScoresArgs:
        return cls(
            heads=4,
            channels=32,
            blocks=8,
            block=8,
            parts=1,
            run=8,
            page_entries=64,
            table=16,
            ratio=1,
            factor="0.0883883461356163f",
            rounded="true",
            element="bf16",
        )


class CandidateScoresRule(KernelRule):
    op = ops.CandidateScores

    def refuses(self, node: Node, machine: Machine) -> str | None:
        return _refusal(node)

    def plan(self, node: Node, machine: Machine, rows: RowClass) -> KernelPlan:
        assert isinstance(node.op, ops.CandidateScores)
        q, weight, keys, page_table = (v.type for v in node.inputs[:4])
        heads, channels = q.inner
        blocks, size = node.inputs[-1].type.channels, node.op.block_size
        page, table = keys.inner[0], page_table.channels
        parts = _parts(blocks * size)
        return kernel(
            node,
            dtypes=(q.dtype, node.op.out),
            dims=f"h{heads}_d{channels}_b{blocks}_s{size}_p{page}_t{table}_r{node.op.ratio}"
            + _factor(node.op, heads, channels),
            args=CandidateScoresArgs(
                heads=heads,
                channels=channels,
                blocks=blocks,
                block=size,
                parts=parts,
                run=max(1, _TOGETHER // size),
                page_entries=page,
                table=table,
                ratio=node.op.ratio,
                factor=f32(node.op.factor),
                rounded="true" if node.op.out is DType.BF16 else "false",
                element=element(weight),
            ),
            items=Extent(per_row=parts),
            computes="y = the index scores of the entries of candidate blocks; -inf: not visible",
        )


RULES: tuple[KernelRule, ...] = (IndexScoresRule(), CandidateScoresRule())
