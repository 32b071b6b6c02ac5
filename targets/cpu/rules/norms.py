"""RMSNorm: one row per work item, statistics and product in fp32, one rounding.

What quantises the normed rows can be part of it; `common/norm.h` is the arithmetic of both.
"""

from __future__ import annotations

from dataclasses import dataclass

from deepinfer_targets.cpu.rules.base import element, f32, kernel, lanes_refusal
from deepinfer_targets.cpu.rules.names import number

from deepinfer_compile.format.plan import Extent
from deepinfer_compile.ir import fused, ops
from deepinfer_compile.ir.graph import Node
from deepinfer_compile.target import KernelPlan, KernelRule, Machine, RowClass


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

    def plan(self, node: Node, machine: Machine, rows: RowClass) -> KernelPlan:
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


@dataclass(frozen=True)
class RmsNormQuantizeArgs:
    channels: int
    record: int
    to: str
    element: str
    eps: str

    @classmethod
    def example(cls) -> RmsNormQuantizeArgs:
        return cls(channels=64, record=66, to="mxfp8", element="bf16", eps="1e-20f")


class RmsNormQuantizeRule(KernelRule):
    op = fused.RmsNormQuantize

    def refuses(self, node: Node, machine: Machine) -> str | None:
        return lanes_refusal(node.inputs[0].type.channels, "the row")

    def plan(self, node: Node, machine: Machine, rows: RowClass) -> KernelPlan:
        op = node.op
        assert isinstance(op, fused.RmsNormQuantize)
        x = node.inputs[0].type
        record = op.to.row_bytes(x.channels)
        return kernel(
            node,
            dtypes=(x.dtype, op.to),
            dims=f"n{x.channels}_e{number(op.eps)}",
            args=RmsNormQuantizeArgs(x.channels, record, op.to.value, element(x), f32(op.eps)),
            items=Extent(per_row=1),
            computes=f"y = x * rsqrt(mean(x^2) + eps) * w, as {op.to.value}",
        )


RULES: tuple[KernelRule, ...] = (RmsNormRule(), RmsNormQuantizeRule())
