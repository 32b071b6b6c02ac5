"""Hyper-connections of the residual streams; `common/mhc.h` is the arithmetic of all of them.

Collapse and expand touch every stream once. The coefficients are the costly part: `fn` is 24 rows
of 20,480 fp32 numbers in the released model, read once for every `BLOCK` rows of the step.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from deepinfer_targets.cpu.rules.base import LANES, element, f32, kernel, lanes_refusal
from deepinfer_targets.cpu.rules.names import number

from deepinfer_compile.format.plan import Extent
from deepinfer_compile.ir import fused, ops
from deepinfer_compile.ir.graph import Node
from deepinfer_compile.ir.types import TensorType
from deepinfer_compile.target import KernelPlan, KernelRule, Machine, RowClass

Coefficients = ops.MhcCoefficients | fused.MhcEnter | fused.MhcExpandEnter

# Channels summed before a partial sum joins its total. Four decoded rows of a chunk take half of a
# 32 KiB L1 cache, a block of rows and a chunk of fn 160 KiB of L2; short sums also round less.
CHUNK = 1024
BLOCK = 16
# Accumulators of a tile: with three vectors of fn and one of x they fill AVX2's sixteen registers.
ACCUMULATORS = 12
ROWS = 4


@dataclass(frozen=True)
class MhcCoefficientsArgs:
    """`tiles[i]`: how many rows of fn are multiplied at a time with i + 1 rows of x."""

    streams: int
    mixes: int
    width: int
    chunk: int
    block: int
    tiles: tuple[int, ...]
    element: str
    repeats: int
    eps: str
    norm_eps: str

    @classmethod
    def example(cls) -> MhcCoefficientsArgs:
        return cls(
            streams=4,
            mixes=24,
            width=256,
            chunk=256,
            block=16,
            tiles=(6, 6, 4, 3),
            element="bf16",
            repeats=19,
            eps="1e-06f",
            norm_eps="1e-20f",
        )


class MhcCoefficientsRule(KernelRule):
    op = ops.MhcCoefficients

    def refuses(self, node: Node, machine: Machine) -> str | None:
        return _lanes(node.inputs[0].type.channels)

    def plan(self, node: Node, machine: Machine, rows: RowClass) -> KernelPlan:
        assert isinstance(node.op, ops.MhcCoefficients)
        x, fn = node.inputs[0].type, node.inputs[1].type
        streams, channels = x.inner
        return kernel(
            node,
            dtypes=(x.dtype,),
            dims=f"s{streams}_n{channels}_{_attributes(node.op)}",
            args=_coefficients(node.op, x, fn),
            items=Extent(per_row=1),
            computes="m = fn x / rms(x); pre, post = sigmoids of m; comb = sinkhorn of m",
        )


def _lanes(channels: int) -> str | None:
    if channels % (4 * LANES):
        return f"a stream has {channels} channels, needs a multiple of {4 * LANES}"
    return None


def _attributes(op: Coefficients) -> str:
    return f"i{op.iterations}_e{number(op.eps)}_n{number(op.norm_eps)}"


def _coefficients(op: Coefficients, x: TensorType, fn: TensorType) -> MhcCoefficientsArgs:
    mixes = fn.shape[0]
    assert isinstance(mixes, int)
    return MhcCoefficientsArgs(
        streams=x.inner[0],
        mixes=mixes,
        width=x.width,
        chunk=min(CHUNK, x.width),
        block=BLOCK,
        tiles=tuple(_tile(mixes, rows) for rows in range(1, ROWS + 1)),
        element=element(x),
        repeats=op.iterations - 1,
        eps=f32(op.eps),
        norm_eps=f32(op.norm_eps),
    )


def _tile(mixes: int, rows: int) -> int:
    """The most rows of fn that divide `mixes` and leave every product an accumulator.

    One row is bound by reading fn: twelve streams at once would only fight for cache ways."""
    most = ACCUMULATORS // max(rows, 2)
    return max(tile for tile in range(1, most + 1) if mixes % tile == 0)


@dataclass(frozen=True)
class StreamsArgs:
    streams: int
    channels: int
    element: str

    @classmethod
    def example(cls) -> StreamsArgs:
        return cls(streams=4, channels=64, element="bf16")


class MhcCollapseRule(KernelRule):
    op = ops.MhcCollapse

    def refuses(self, node: Node, machine: Machine) -> str | None:
        return lanes_refusal(node.inputs[0].type.channels, "a stream")

    def plan(self, node: Node, machine: Machine, rows: RowClass) -> KernelPlan:
        x = node.inputs[0].type
        streams, channels = x.inner
        return kernel(
            node,
            dtypes=(x.dtype,),
            dims=f"s{streams}_n{channels}",
            args=StreamsArgs(streams, channels, element(x)),
            items=Extent(per_row=1),
            computes="y = sum_s pre[s] * x[s]",
        )


class MhcExpandRule(KernelRule):
    op = ops.MhcExpand

    def refuses(self, node: Node, machine: Machine) -> str | None:
        return lanes_refusal(node.inputs[1].type.channels, "a stream")

    def plan(self, node: Node, machine: Machine, rows: RowClass) -> KernelPlan:
        x = node.inputs[1].type
        streams, channels = x.inner
        return kernel(
            node,
            dtypes=(x.dtype,),
            dims=f"s{streams}_n{channels}",
            args=StreamsArgs(streams, channels, element(x)),
            items=Extent(per_row=1),
            computes="y[j] = post[j] * o + sum_i comb[i,j] * x[i]",
        )


@dataclass(frozen=True)
class MhcEnterArgs(MhcCoefficientsArgs):
    """`to`: the type of the records, or nothing; then `record` is 0."""

    rms_eps: str
    to: str
    record: int

    @classmethod
    def example(cls) -> MhcEnterArgs:
        coefficients = asdict(MhcCoefficientsArgs.example())
        return cls(**coefficients, rms_eps="1e-20f", to="mxfp8", record=66)


_ENTER = (
    "m = fn x / rms(x); pre, post = sigmoids of m; comb = sinkhorn of m; "
    "y = the norm of sum_s given pre[s] * x[s]"
)


class MhcEnterRule(KernelRule):
    op: type[ops.Op] = fused.MhcEnter
    streams = 0  # which operand they are
    before = ""

    def refuses(self, node: Node, machine: Machine) -> str | None:
        return _lanes(node.inputs[self.streams].type.channels)

    def plan(self, node: Node, machine: Machine, rows: RowClass) -> KernelPlan:
        op = node.op
        assert isinstance(op, fused.MhcEnter | fused.MhcExpandEnter)
        x, fn = node.inputs[self.streams].type, node.inputs[-5].type
        streams, channels = x.inner
        return kernel(
            node,
            dtypes=(x.dtype, op.to) if op.to else (x.dtype,),
            dims=f"s{streams}_n{channels}_{_attributes(op)}_r{number(op.rms_eps)}",
            args=MhcEnterArgs(
                **asdict(_coefficients(op, x, fn)),
                rms_eps=f32(op.rms_eps),
                to=op.to.value if op.to else "",
                record=op.to.row_bytes(channels) if op.to else 0,
            ),
            items=Extent(per_row=1),
            computes=self.before + _ENTER + (f", as {op.to.value} too" if op.to else ""),
        )


class MhcExpandEnterRule(MhcEnterRule):
    op = fused.MhcExpandEnter
    streams = 1
    before = "x = given post[j] * o + sum_i given comb[i,j] * x[i]; "


RULES: tuple[KernelRule, ...] = (
    MhcCoefficientsRule(),
    MhcCollapseRule(),
    MhcExpandRule(),
    MhcEnterRule(),
    MhcExpandEnterRule(),
)
