"""RMSNorm: one row per work item, statistics and product in fp32, one rounding."""

from __future__ import annotations

from dataclasses import dataclass

from deepinfer_targets.cpu.rules.base import element, f32, kernel, lanes_refusal
from deepinfer_targets.cpu.rules.names import number

from deepinfer_compile.format.plan import Extent
from deepinfer_compile.ir import ops
from deepinfer_compile.ir.graph import Node
from deepinfer_compile.target import KernelPlan, KernelRule, Machine


@dataclass(frozen=True)
class RmsNormArgs:
    channels: int
    element: str
    eps: str

    @classmethod
    def example(cls) -> RmsNormArgs:
        return cls(channels=64, element="bf16", eps="1e-20f")


class RmsNormRule(KernelRule):
    op = ops.RmsNorm

    def refuses(self, node: Node, machine: Machine) -> str | None:
        return lanes_refusal(node.inputs[0].type.channels, "the row")

    def plan(self, node: Node, machine: Machine) -> KernelPlan:
        assert isinstance(node.op, ops.RmsNorm)
        x = node.inputs[0].type
        return kernel(
            node,
            dtypes=(x.dtype,),
            dims=f"n{x.channels}_e{number(node.op.eps)}",
            args=RmsNormArgs(x.channels, element(x), f32(node.op.eps)),
            items=Extent(per_row=1),
            computes="y = x * rsqrt(mean(x^2) + eps) * w",
        )


RULES: tuple[KernelRule, ...] = (RmsNormRule(),)
