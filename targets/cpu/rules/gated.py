"""The two products and the gated activation of an expert in one kernel.

A work item owns whole groups of channels that share a scale, so the result can be quantised where
it is made. `common/tile.h` multiplies and `common/swiglu.h` gates, as in the separate kernels.
"""

from __future__ import annotations

from dataclasses import dataclass

from deepinfer_targets.cpu.rules.base import element, f32, kernel
from deepinfer_targets.cpu.rules.linear import (
    FEW_ROWS,
    FLOATS,
    class_suffix,
    elements,
    inputs_refusal,
    multiply,
    rows_reader,
)
from deepinfer_targets.cpu.rules.names import number

from deepinfer_compile.format.plan import Extent
from deepinfer_compile.ir import fused
from deepinfer_compile.ir.graph import Node
from deepinfer_compile.ir.types import DType, TensorType
from deepinfer_compile.target import KernelPlan, KernelRule, Machine, RowClass

TILE = 32  # outputs of a work item

Gated = fused.LinearSwiGlu | fused.ExpertSwiGlu


def _refusal(op: Gated, x: TensorType, w: TensorType, weight: DType) -> str | None:
    if w.dtype is not weight:
        return f"weights are {w.dtype.value}, need {weight.value}"
    if x.dtype not in (DType.MXFP8, *FLOATS):
        return f"x is {x.dtype.value}, needs one of mxfp8, f32, bf16"
    if x.dtype.is_record and x.channels != w.channels:
        return f"a record of x holds {x.channels} channels, the weight takes {w.channels}"
    if op.inner not in FLOATS:
        return f"gate and up are {op.inner.value}, need f32 or bf16"
    if op.to not in (None, DType.MXFP8):
        return f"the result is {op.to.value}, needs mxfp8"
    outputs = (w.shape[0], *w.inner)[-2]
    if not isinstance(outputs, int) or outputs % TILE:
        return f"{outputs} outputs, needs a multiple of {TILE}"
    return inputs_refusal(w)


@dataclass(frozen=True)
class SwiGluArgs:
    """`to`: the type of the records, or nothing. `y_row`: steps of a pointer to the result."""

    inputs: int
    outputs: int
    x_row: int
    y_row: int
    limit: str
    x: str
    x_rows: str
    inner: str
    y: str
    to: str

    @classmethod
    def example(cls) -> SwiGluArgs:
        return cls(
            inputs=64,
            outputs=64,
            x_row=66,
            y_row=66,
            limit="10.0f",
            x="uint8_t",
            x_rows="Mxfp8Rows",
            inner="bf16",
            y="uint8_t",
            to="mxfp8",
        )


def _args(node: Node, op: Gated, w: TensorType) -> SwiGluArgs:
    x, y = node.inputs[0].type, node.outputs[0].type
    return SwiGluArgs(
        inputs=w.channels,
        outputs=y.channels,
        x_row=elements(x, w.channels),
        y_row=elements(y, y.channels),
        limit=f32(op.limit),
        x=element(x),
        x_rows=rows_reader(x),
        inner=element(TensorType(op.inner, (1,))),
        y=element(y),
        to=op.to.value if op.to else "",
    )


@dataclass(frozen=True)
class LinearSwiGluArgs:
    """`of`: what it has in common with the same of many experts. `multiply`: how it multiplies."""

    multiply: str
    of: SwiGluArgs

    @classmethod
    def example(cls) -> LinearSwiGluArgs:
        return cls("multiply_many", SwiGluArgs.example())


class LinearSwiGluRule(KernelRule):
    op = fused.LinearSwiGlu
    class_ends = (FEW_ROWS,)

    def refuses(self, node: Node, machine: Machine) -> str | None:
        assert isinstance(node.op, fused.LinearSwiGlu)
        return _refusal(node.op, node.inputs[0].type, node.inputs[1].type, DType.E4M3)

    def plan(self, node: Node, machine: Machine, rows: RowClass) -> KernelPlan:
        op = node.op
        assert isinstance(op, fused.LinearSwiGlu)
        x, w = node.inputs[0].type, node.inputs[1].type
        args = _args(node, op, w)
        return kernel(
            node,
            dtypes=(x.dtype, w.dtype, op.inner, op.to or op.inner),
            dims=f"n{args.outputs}_k{args.inputs}_l{number(op.limit)}{class_suffix(rows)}",
            args=LinearSwiGluArgs(multiply(rows), args),
            items=Extent(constant=args.outputs // TILE),
            computes=f"y = {_PRODUCT}",
        )


@dataclass(frozen=True)
class ExpertSwiGluArgs:
    """`of`: what it has in common with the same of a single expert."""

    experts: int
    taken: int
    of: SwiGluArgs

    @classmethod
    def example(cls) -> ExpertSwiGluArgs:
        return cls(experts=8, taken=2, of=SwiGluArgs.example())


class ExpertSwiGluRule(KernelRule):
    op = fused.ExpertSwiGlu

    def refuses(self, node: Node, machine: Machine) -> str | None:
        assert isinstance(node.op, fused.ExpertSwiGlu)
        x, w = node.inputs[0].type, node.inputs[2].type
        if len(x.inner) > 1:
            return "each choice of a row reads an x of its own, need one for all"
        return _refusal(node.op, x, w, DType.E2M1)

    def plan(self, node: Node, machine: Machine, rows: RowClass) -> KernelPlan:
        op = node.op
        assert isinstance(op, fused.ExpertSwiGlu)
        x, expert, w = (value.type for value in node.inputs[:3])
        experts, taken, args = w.shape[0], expert.channels, _args(node, op, w)
        assert isinstance(experts, int)
        return kernel(
            node,
            dtypes=(x.dtype, w.dtype, op.inner, op.to or op.inner),
            dims=f"e{experts}_t{taken}_n{args.outputs}_k{args.inputs}_l{number(op.limit)}",
            args=ExpertSwiGluArgs(experts, taken, args),
            items=Extent(constant=args.outputs // TILE * experts),
            computes=f"y[i] = weight[i] * {_PRODUCT}, of expert[i]",
        )


_PRODUCT = "silu(min(x gate^T, limit)) * clamp(x up^T, -limit, limit)"
RULES: tuple[KernelRule, ...] = (LinearSwiGluRule(), ExpertSwiGluRule())
