"""Compression of token groups: a softmax over the group, channel by channel (section 3.7)."""

from __future__ import annotations

from dataclasses import dataclass

from deepinfer_targets.cpu.rules.base import element, kernel, lanes_refusal

from deepinfer_compile.format.plan import Extent
from deepinfer_compile.ir import ops
from deepinfer_compile.ir.graph import Node
from deepinfer_compile.target import KernelPlan, KernelRule, Machine, RowClass


@dataclass(frozen=True)
class PoolGroupArgs:
    ratio: int
    length: int
    channels: int
    element: str

    @classmethod
    def example(cls) -> PoolGroupArgs:
        return cls(ratio=2, length=7, channels=64, element="bf16")


class PoolGroupRule(KernelRule):
    op = ops.PoolGroup
    from_tail = 0  # tokens before the row's own that the tail must hold besides it

    def refuses(self, node: Node, machine: Machine) -> str | None:
        assert isinstance(node.op, ops.PoolGroup)
        length, needed = node.inputs[0].type.inner[0], node.op.ratio + self.from_tail
        if length < needed:
            return f"the tail holds {length} tokens, needs {needed}"
        return lanes_refusal(node.inputs[0].type.channels, "the tail")

    def plan(self, node: Node, machine: Machine, rows: RowClass) -> KernelPlan:
        assert isinstance(node.op, ops.PoolGroup)
        tail, y, ratio = node.inputs[0].type, node.outputs[0].type, node.op.ratio
        length = tail.inner[0]
        return kernel(
            node,
            dtypes=(y.dtype,),
            dims=f"n{tail.channels}_l{length}_r{ratio}",
            args=PoolGroupArgs(ratio, length, tail.channels, element(y)),
            items=Extent(per_row=1),
            computes=f"y = sum of softmax(score) * value over the {ratio} tokens of a group",
        )


class ChunkPoolGroupRule(PoolGroupRule):
    op = ops.ChunkPoolGroup
    from_tail = -1  # a group's last token is always in the step


RULES: tuple[KernelRule, ...] = (PoolGroupRule(), ChunkPoolGroupRule())
