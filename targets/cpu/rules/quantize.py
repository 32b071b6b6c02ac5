"""Rows to records of codes and scales; the codecs are `templates/cpu/common/records.h.jinja`."""

from __future__ import annotations

from dataclasses import dataclass

from deepinfer_targets.cpu.rules.base import element, kernel

from deepinfer_compile.format.plan import Extent
from deepinfer_compile.ir import ops
from deepinfer_compile.ir.graph import Node
from deepinfer_compile.target import KernelPlan, KernelRule, Machine, RowClass


@dataclass(frozen=True)
class QuantizeArgs:
    channels: int
    record: int
    to: str
    element: str

    @classmethod
    def example(cls) -> QuantizeArgs:
        return cls(channels=64, record=66, to="mxfp8", element="bf16")


class QuantizeRule(KernelRule):
    op = ops.Quantize

    def plan(self, node: Node, machine: Machine, rows: RowClass) -> KernelPlan:
        assert isinstance(node.op, ops.Quantize)
        x, to = node.inputs[0].type, node.op.to
        return kernel(
            node,
            dtypes=(x.dtype, to),
            dims=f"n{x.channels}",
            args=QuantizeArgs(x.channels, to.row_bytes(x.channels), to.value, element(x)),
            items=Extent(per_row=x.width // x.channels),
            computes=f"y = x as {to.value}: codes, then a scale of every {to.group} channels",
        )


RULES: tuple[KernelRule, ...] = (QuantizeRule(),)
