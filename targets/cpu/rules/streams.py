"""Embedding, residual streams and their hyper-connections.

Collapse and expand touch every stream once. The coefficients are the costly part: `fn` is 24 rows
of 20,480 fp32 numbers in the released model, read once for every `BLOCK` rows of the step.
"""

from __future__ import annotations

from dataclasses import dataclass

from deepinfer_targets.cpu.rules.base import LANES, element, f32, kernel, lanes_refusal
from deepinfer_targets.cpu.rules.names import number

from deepinfer_compile.format.plan import Extent
from deepinfer_compile.ir import ops
from deepinfer_compile.ir.graph import Node
from deepinfer_compile.target import KernelPlan, KernelRule, Machine

# Channels summed before a partial sum joins its total. Four decoded rows of a chunk take half of a
# 32 KiB L1 cache, a block of rows and a chunk of fn 160 KiB of L2; short sums also round less.
CHUNK = 1024
BLOCK = 16
# Accumulators of a tile: with three vectors of fn and one of x they fill AVX2's sixteen registers.
ACCUMULATORS = 12
ROWS = 4


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

    def plan(self, node: Node, machine: Machine) -> KernelPlan:
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

    def plan(self, node: Node, machine: Machine) -> KernelPlan:
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

    def plan(self, node: Node, machine: Machine) -> KernelPlan:
        pre = node.outputs[0].type
        return kernel(
            node,
            dtypes=(pre.dtype,),
            dims=f"s{pre.channels}",
            args=FirstStreamArgs(pre.channels),
            items=Extent(per_row=1),
            computes="pre = 1 on stream 0, 0 on the others",
        )


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
        channels = node.inputs[0].type.channels
        if channels % (4 * LANES):
            return f"a stream has {channels} channels, needs a multiple of {4 * LANES}"
        return None

    def plan(self, node: Node, machine: Machine) -> KernelPlan:
        assert isinstance(node.op, ops.MhcCoefficients)
        x, fn = node.inputs[0].type, node.inputs[1].type
        mixes = fn.shape[0]
        assert isinstance(mixes, int)
        streams, channels = x.inner
        args = MhcCoefficientsArgs(
            streams=streams,
            mixes=mixes,
            width=x.width,
            chunk=min(CHUNK, x.width),
            block=BLOCK,
            tiles=tuple(_tile(mixes, rows) for rows in range(1, ROWS + 1)),
            element=element(x),
            repeats=node.op.iterations - 1,
            eps=f32(node.op.eps),
            norm_eps=f32(node.op.norm_eps),
        )
        attributes = f"i{node.op.iterations}_e{number(node.op.eps)}_n{number(node.op.norm_eps)}"
        return kernel(
            node,
            dtypes=(x.dtype,),
            dims=f"s{streams}_n{channels}_{attributes}",
            args=args,
            items=Extent(per_row=1),
            computes="m = fn x / rms(x); pre, post = sigmoids of m; comb = sinkhorn of m",
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

    def plan(self, node: Node, machine: Machine) -> KernelPlan:
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

    def plan(self, node: Node, machine: Machine) -> KernelPlan:
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


RULES: tuple[KernelRule, ...] = (
    EmbedRule(),
    BroadcastStreamsRule(),
    FirstStreamRule(),
    MhcCoefficientsRule(),
    MhcCollapseRule(),
    MhcExpandRule(),
)
