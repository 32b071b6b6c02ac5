"""What the residual streams start from."""

from __future__ import annotations

from dataclasses import dataclass

from deepinfer_targets.cpu.rules.base import element, kernel, lanes_refusal

from deepinfer_compile.format.plan import Extent
from deepinfer_compile.ir import ops
from deepinfer_compile.ir.graph import Node
from deepinfer_compile.target import KernelPlan, KernelRule, Machine, RowClass


@dataclass(frozen=True)
class EmbedArgs:
    channels: int
    element: str

    @classmethod
    def example(cls) -> EmbedArgs:
        return cls(channels=64, element="bf16")


class EmbedRule(KernelRule):
    op = ops.Embed

    def refuses(self, node: Node, machine: Machine) -> str | None:
        return lanes_refusal(node.inputs[1].type.channels, "the table")

    def plan(self, node: Node, machine: Machine, rows: RowClass) -> KernelPlan:
        y = node.outputs[0].type
        return kernel(
            node,
            dtypes=(y.dtype,),
            dims=f"n{y.channels}",
            args=EmbedArgs(y.channels, element(y)),
            items=Extent(per_row=1),
            computes="y = table[token]",
        )


@dataclass(frozen=True)
class BroadcastStreamsArgs:
    streams: int
    channels: int
    element: str

    @classmethod
    def example(cls) -> BroadcastStreamsArgs:
        return cls(streams=4, channels=64, element="bf16")


class BroadcastStreamsRule(KernelRule):
    op = ops.BroadcastStreams

    def plan(self, node: Node, machine: Machine, rows: RowClass) -> KernelPlan:
        y = node.outputs[0].type
        streams, channels = y.inner
        return kernel(
            node,
            dtypes=(y.dtype,),
            dims=f"s{streams}_n{channels}",
            args=BroadcastStreamsArgs(streams, channels, element(y)),
            items=Extent(per_row=1),
            computes="y[s] = x",
        )


@dataclass(frozen=True)
class FirstStreamArgs:
    streams: int

    @classmethod
    def example(cls) -> FirstStreamArgs:
        return cls(streams=4)


class FirstStreamRule(KernelRule):
    op = ops.FirstStream

    def plan(self, node: Node, machine: Machine, rows: RowClass) -> KernelPlan:
        pre = node.outputs[0].type
        return kernel(
            node,
            dtypes=(pre.dtype,),
            dims=f"s{pre.channels}",
            args=FirstStreamArgs(pre.channels),
            items=Extent(per_row=1),
            computes="pre = 1 on stream 0, 0 on the others",
        )


RULES: tuple[KernelRule, ...] = (EmbedRule(), BroadcastStreamsRule(), FirstStreamRule())
