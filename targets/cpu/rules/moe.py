"""Routing, the gated activation, the combination of experts."""

from __future__ import annotations

from dataclasses import dataclass

from deepinfer_targets.cpu.rules.base import element, f32, kernel, lanes_refusal
from deepinfer_targets.cpu.rules.names import number

from deepinfer_compile.format.plan import Extent
from deepinfer_compile.ir import ops
from deepinfer_compile.ir.graph import Node
from deepinfer_compile.ir.types import DType
from deepinfer_compile.target import KernelPlan, KernelRule, Machine, RowClass


@dataclass(frozen=True)
class TopkGateArgs:
    """`by_image`: rows of images have a bias of their own."""

    experts: int
    taken: int
    scale: str
    by_image: bool

    @classmethod
    def example(cls) -> TopkGateArgs:
        return cls(experts=16, taken=4, scale="1.5f", by_image=True)


class TopkGateRule(KernelRule):
    op = ops.TopKGate

    def refuses(self, node: Node, machine: Machine) -> str | None:
        assert isinstance(node.op, ops.TopKGate)
        logits = node.inputs[0].type
        if logits.dtype is not DType.F32:
            return f"router logits are {logits.dtype.value}, need f32"
        if node.op.k > logits.channels:
            return f"{node.op.k} experts a token of {logits.channels}"
        return None

    def plan(self, node: Node, machine: Machine, rows: RowClass) -> KernelPlan:
        op = node.op
        assert isinstance(op, ops.TopKGate)
        experts = node.inputs[0].type.channels
        by_image = len(node.inputs) > 2
        image = "_vl" if by_image else ""
        return kernel(
            node,
            dtypes=(DType.F32,),
            dims=f"e{experts}_k{op.k}_s{number(op.scale)}{image}",
            args=TopkGateArgs(experts, op.k, f32(op.scale), by_image),
            items=Extent(per_row=1),
            computes=f"s = sqrt(softplus(logits)); expert = top {op.k} of s + bias; "
            "weight = scale * s / sum(s)",
        )


@dataclass(frozen=True)
class SwigluArgs:
    """`weighted`: each row has a routing weight per expert."""

    channels: int
    limit: str
    element: str
    weighted: bool

    @classmethod
    def example(cls) -> SwigluArgs:
        return cls(channels=64, limit="10.0f", element="bf16", weighted=True)


class SwigluRule(KernelRule):
    op = ops.SwiGlu

    def refuses(self, node: Node, machine: Machine) -> str | None:
        gate = node.inputs[0].type
        if gate.dtype not in (DType.F32, DType.BF16):
            return f"the gate is {gate.dtype.value}, need f32 or bf16"
        return lanes_refusal(gate.channels, "the gate")

    def plan(self, node: Node, machine: Machine, rows: RowClass) -> KernelPlan:
        assert isinstance(node.op, ops.SwiGlu)
        gate = node.inputs[0].type
        weighted = len(node.inputs) > 2
        experts = gate.width // gate.channels
        weight = "_w" if weighted else ""
        product = "silu(min(gate, limit)) * clamp(up, -limit, limit)"
        return kernel(
            node,
            dtypes=(gate.dtype,),
            dims=f"k{experts}_n{gate.channels}_l{number(node.op.limit)}{weight}",
            args=SwigluArgs(gate.channels, f32(node.op.limit), element(gate), weighted),
            items=Extent(per_row=experts),
            computes=f"y = weight * {product}" if weighted else f"y = {product}",
        )


@dataclass(frozen=True)
class MoeCombineArgs:
    experts: int
    channels: int
    routed: str
    element: str

    @classmethod
    def example(cls) -> MoeCombineArgs:
        return cls(experts=6, channels=64, routed="bf16", element="bf16")


class MoeCombineRule(KernelRule):
    op = ops.MoeCombine

    def refuses(self, node: Node, machine: Machine) -> str | None:
        for value, what in zip(node.inputs, ("routed", "shared"), strict=True):
            if value.type.dtype not in (DType.F32, DType.BF16):
                return f"{what} outputs are {value.type.dtype.value}, need f32 or bf16"
        return lanes_refusal(node.inputs[1].type.channels, "the row")

    def plan(self, node: Node, machine: Machine, rows: RowClass) -> KernelPlan:
        routed, shared = (value.type for value in node.inputs)
        experts = routed.inner[0]
        return kernel(
            node,
            dtypes=(routed.dtype, shared.dtype),
            dims=f"k{experts}_n{shared.channels}",
            args=MoeCombineArgs(experts, shared.channels, element(routed), element(shared)),
            items=Extent(per_row=1),
            computes="y = sum_k routed[k] + shared",
        )


RULES: tuple[KernelRule, ...] = (TopkGateRule(), SwigluRule(), MoeCombineRule())
