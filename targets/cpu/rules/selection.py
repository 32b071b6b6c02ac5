"""Top-k lists and candidate blocks: one row per work item, `common/select.h` does the choosing.

Selecting is exact, so a list never depends on how a row is scanned: scores become integers that
order alike, radix passes find the k-th largest, and one more pass collects in index order.
"""

from __future__ import annotations

from dataclasses import dataclass

from deepinfer_targets.cpu.rules.base import LANES, element, kernel

from deepinfer_compile.format.plan import Extent
from deepinfer_compile.ir import ops
from deepinfer_compile.ir.graph import Node
from deepinfer_compile.ir.types import DType
from deepinfer_compile.target import KernelPlan, KernelRule, Machine, RowClass


def _scores_refusal(node: Node) -> str | None:
    dtype = node.inputs[0].type.dtype
    if dtype not in (DType.F32, DType.BF16):
        return f"scores are {dtype.value}, need f32 or bf16"
    return None


@dataclass(frozen=True)
class TopkArgs:
    entries: int
    taken: int
    ratio: int
    element: str

    @classmethod
    def example(cls) -> TopkArgs:
        return cls(entries=512, taken=16, ratio=2, element="bf16")


class TopkRule(KernelRule):
    op = ops.TopK

    def refuses(self, node: Node, machine: Machine) -> str | None:
        return _scores_refusal(node)

    def plan(self, node: Node, machine: Machine, rows: RowClass) -> KernelPlan:
        assert isinstance(node.op, ops.TopK)
        scores = node.inputs[0].type
        return kernel(
            node,
            dtypes=(scores.dtype,),
            dims=f"c{scores.channels}_k{node.op.k}_r{node.op.ratio}",
            args=TopkArgs(scores.channels, node.op.k, node.op.ratio, element(scores)),
            items=Extent(per_row=1),
            computes=f"selected = ascending top {node.op.k} of the visible scores",
        )


@dataclass(frozen=True)
class CandidateTopkArgs:
    blocks: int
    block_size: int
    taken: int
    element: str

    @classmethod
    def example(cls) -> CandidateTopkArgs:
        return cls(blocks=8, block_size=8, taken=16, element="bf16")


class CandidateTopkRule(KernelRule):
    op = ops.CandidateTopK

    def refuses(self, node: Node, machine: Machine) -> str | None:
        return _scores_refusal(node)

    def plan(self, node: Node, machine: Machine, rows: RowClass) -> KernelPlan:
        assert isinstance(node.op, ops.CandidateTopK)
        scores, blocks = node.inputs[0].type, node.inputs[1].type
        size = node.op.block_size
        return kernel(
            node,
            dtypes=(scores.dtype,),
            dims=f"b{blocks.channels}x{size}_k{node.op.k}",
            args=CandidateTopkArgs(blocks.channels, size, node.op.k, element(scores)),
            items=Extent(per_row=1),
            computes=f"selected = ascending top {node.op.k} of the candidate scores, as entries",
        )


@dataclass(frozen=True)
class TopBlocksArgs:
    entries: int
    block_size: int
    taken: int
    ratio: int
    element: str

    @classmethod
    def example(cls) -> TopBlocksArgs:
        return cls(entries=512, block_size=8, taken=8, ratio=1, element="bf16")


class TopBlocksRule(KernelRule):
    op = ops.TopBlocks

    def refuses(self, node: Node, machine: Machine) -> str | None:
        assert isinstance(node.op, ops.TopBlocks)
        if node.op.block_size % LANES:
            return f"blocks of {node.op.block_size} entries, need a multiple of {LANES}"
        return _scores_refusal(node)

    def plan(self, node: Node, machine: Machine, rows: RowClass) -> KernelPlan:
        op = node.op
        assert isinstance(op, ops.TopBlocks)
        scores = node.inputs[0].type
        return kernel(
            node,
            dtypes=(scores.dtype,),
            dims=f"c{scores.channels}_b{op.blocks}x{op.block_size}_r{op.ratio}",
            args=TopBlocksArgs(
                scores.channels, op.block_size, op.blocks, op.ratio, element(scores)
            ),
            items=Extent(per_row=1),
            computes=f"blocks = ascending top {op.blocks} by best visible score, newest pinned",
        )


RULES: tuple[KernelRule, ...] = (TopkRule(), CandidateTopkRule(), TopBlocksRule())
