"""Rotary angles and rotations, alone or on the way to a record.

The frequencies are numbers in the kernel (section 3.5).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from deepinfer_targets.cpu.rules.base import element, f32, kernel, lanes_refusal
from deepinfer_targets.cpu.rules.names import number

from deepinfer_compile.format.plan import Extent
from deepinfer_compile.ir import fused, ops
from deepinfer_compile.ir.graph import Node
from deepinfer_compile.target import KernelPlan, KernelRule, Machine, RowClass


@dataclass(frozen=True)
class RopeAnglesArgs:
    pairs: int
    ratio: int
    frequencies: tuple[str, ...]

    @classmethod
    def example(cls) -> RopeAnglesArgs:
        plain = ops.RopeAngles(dim=64, theta=10000.0)
        return cls(pairs=32, ratio=1, frequencies=literals(frequencies(plain)))


def frequencies(op: ops.RopeAngles) -> npt.NDArray[np.float32]:
    """f_k of section 3.5. Each step is rounded to fp32, and the power comes before the reciprocal:
    other orders differ in the last bit, which moves a cosine by 1e-2 at position 2^20."""
    k = np.arange(op.dim // 2, dtype=np.float32)
    power = np.array([op.theta ** (2 * i / op.dim) for i in range(op.dim // 2)], dtype=np.float32)
    f: npt.NDArray[np.float32] = np.float32(1) / power
    if op.yarn_factor == 0:
        return f
    first = max(math.floor(_channel(op, op.beta_fast)), 0)
    last = min(math.ceil(_channel(op, op.beta_slow)), op.dim - 1)
    span = np.float32(max(last - first, 0.001))
    ramp = np.clip((k - np.float32(first)) / span, np.float32(0), np.float32(1))
    stretched = f / np.float32(op.yarn_factor)
    mixed: npt.NDArray[np.float32] = stretched * ramp + f * (np.float32(1) - ramp)
    return mixed


def _channel(op: ops.RopeAngles, turns: float) -> float:
    """The channel that makes `turns` turns over the original context."""
    return op.dim * math.log(op.original / (turns * 2 * math.pi)) / (2 * math.log(op.theta))


def literals(values: npt.NDArray[np.float32]) -> tuple[str, ...]:
    """C++ literals of one width; nine digits read back exactly."""
    return tuple(f"{value:.8e}f" for value in values.tolist())


class RopeAnglesRule(KernelRule):
    op = ops.RopeAngles

    def plan(self, node: Node, machine: Machine, rows: RowClass) -> KernelPlan:
        op = node.op
        assert isinstance(op, ops.RopeAngles)
        dims = f"d{op.dim}_t{number(op.theta)}_r{op.ratio}"
        if op.yarn_factor:
            dims += f"_y{number(op.yarn_factor)}_b{number(op.beta_fast)}_{number(op.beta_slow)}"
            dims += f"_o{op.original}"
        return kernel(
            node,
            dtypes=(node.outputs[0].type.dtype,),
            dims=dims,
            args=RopeAnglesArgs(op.dim // 2, op.ratio, literals(frequencies(op))),
            items=Extent(per_row=1),
            computes="y = cos, sin of (p - p % ratio) * f_k",
        )


@dataclass(frozen=True)
class RopeArgs:
    """`turned`: the last channels, rotated in adjacent pairs. `direction`: 1, or -1 for back."""

    heads: int
    channels: int
    turned: int
    direction: str
    element: str

    @classmethod
    def example(cls) -> RopeArgs:
        return cls(heads=4, channels=64, turned=32, direction="1.0f", element="bf16")


class RopeRule(KernelRule):
    op = ops.Rope

    def plan(self, node: Node, machine: Machine, rows: RowClass) -> KernelPlan:
        assert isinstance(node.op, ops.Rope)
        x, angles = (value.type for value in node.inputs)
        heads, turned = x.width // x.channels, 2 * angles.channels
        inverse = node.op.inverse
        return kernel(
            node,
            dtypes=(x.dtype,),
            dims=f"h{heads}_n{x.channels}_r{turned}_{'inverse' if inverse else 'forward'}",
            args=RopeArgs(heads, x.channels, turned, "-1.0f" if inverse else "1.0f", element(x)),
            items=Extent(per_row=heads),
            computes=f"y = x, its last {turned} channels as pairs times e^({'-' * inverse}i angle)",
        )


@dataclass(frozen=True)
class RopeQuantizeArgs:
    heads: int
    channels: int
    turned: int
    record: int
    to: str
    element: str

    @classmethod
    def example(cls) -> RopeQuantizeArgs:
        return cls(heads=4, channels=64, turned=32, record=66, to="mxfp8", element="bf16")


class RopeQuantizeRule(KernelRule):
    op = fused.RopeQuantize

    def plan(self, node: Node, machine: Machine, rows: RowClass) -> KernelPlan:
        assert isinstance(node.op, fused.RopeQuantize)
        x, angles = (value.type for value in node.inputs)
        heads, turned, to = x.width // x.channels, 2 * angles.channels, node.op.to
        record = to.row_bytes(x.channels)
        return kernel(
            node,
            dtypes=(x.dtype, to),
            dims=f"h{heads}_n{x.channels}_r{turned}",
            args=RopeQuantizeArgs(heads, x.channels, turned, record, to.value, element(x)),
            items=Extent(per_row=heads),
            computes=f"y = x, its last {turned} channels as pairs times e^(i angle), as {to.value}",
        )


@dataclass(frozen=True)
class RmsNormRopeQuantizeArgs:
    channels: int
    turned: int
    record: int
    to: str
    element: str
    eps: str

    @classmethod
    def example(cls) -> RmsNormRopeQuantizeArgs:
        return cls(channels=64, turned=32, record=66, to="mxfp8", element="bf16", eps="1e-20f")


class RmsNormRopeQuantizeRule(KernelRule):
    op = fused.RmsNormRopeQuantize

    def refuses(self, node: Node, machine: Machine) -> str | None:
        x = node.inputs[0].type
        if len(x.inner) > 1:
            return f"rows of {x.inner[0]} heads, takes one"
        return lanes_refusal(x.channels, "the row")

    def plan(self, node: Node, machine: Machine, rows: RowClass) -> KernelPlan:
        op = node.op
        assert isinstance(op, fused.RmsNormRopeQuantize)
        x, _, angles = (value.type for value in node.inputs)
        turned = 2 * angles.channels
        return kernel(
            node,
            dtypes=(x.dtype, op.to),
            dims=f"n{x.channels}_r{turned}_e{number(op.eps)}",
            args=RmsNormRopeQuantizeArgs(
                channels=x.channels,
                turned=turned,
                record=op.to.row_bytes(x.channels),
                to=op.to.value,
                element=element(x),
                eps=f32(op.eps),
            ),
            items=Extent(per_row=1),
            computes=f"y = x * rsqrt(mean(x^2) + eps) * w, its last {turned} channels as pairs "
            f"times e^(i angle), as {op.to.value}",
        )


RULES: tuple[KernelRule, ...] = (
    RopeAnglesRule(),
    RopeRule(),
    RopeQuantizeRule(),
    RmsNormRopeQuantizeRule(),
)
