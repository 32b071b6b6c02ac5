"""Hashed n-gram tables and their gate (section 3.12). Primes and multipliers are in the kernel."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from deepinfer_targets.cpu.rules.base import LANES, element, f32, kernel
from deepinfer_targets.cpu.rules.names import digest, number

from deepinfer_compile.format.plan import Extent
from deepinfer_compile.ir import ops
from deepinfer_compile.ir.graph import Node
from deepinfer_compile.target import KernelPlan, KernelRule, Machine, RowClass


@dataclass(frozen=True)
class MapTokenArgs:
    @classmethod
    def example(cls) -> MapTokenArgs:
        return cls()


class MapTokenRule(KernelRule):
    op = ops.MapToken

    def plan(self, node: Node, machine: Machine, rows: RowClass) -> KernelPlan:
        y = node.outputs[0].type
        return kernel(
            node,
            dtypes=(y.dtype,),
            dims=f"n{y.channels}",
            args=MapTokenArgs(),
            items=Extent(per_row=1),
            computes="y = token_map[token], -1 for an image's",
        )


Grid = tuple[tuple[int, ...], ...]


def _by_heads(columns: tuple[int, ...], heads: int) -> Grid:
    return tuple(columns[i : i + heads] for i in range(0, len(columns), heads))


@dataclass(frozen=True)
class EngramHashArgs:
    """`primes` and `offsets`: a row for each n-gram size, a column for each head."""

    length: int
    pad: int
    multipliers: tuple[int, ...]
    primes: Grid
    offsets: Grid

    @classmethod
    def example(cls) -> EngramHashArgs:
        return cls(
            length=16,
            pad=2,
            multipliers=(29662608052400909, 1873410163432121, 13919202536988139),
            primes=((67, 71), (73, 79)),
            offsets=((0, 67), (138, 211)),
        )


class EngramHashRule(KernelRule):
    op = ops.EngramHash
    stored = 0  # of a row's n-gram, how many tokens more or less than all are in the history

    def refuses(self, node: Node, machine: Machine) -> str | None:
        assert isinstance(node.op, ops.EngramHash)
        length, needed = node.inputs[0].type.inner[0], len(node.op.multipliers) + self.stored
        if length < needed:
            return f"the history holds {length} tokens, needs {needed}"
        return None

    def plan(self, node: Node, machine: Machine, rows: RowClass) -> KernelPlan:
        op = node.op
        assert isinstance(op, ops.EngramHash)
        length = node.inputs[0].type.inner[0]
        heads = len(op.primes) // (len(op.multipliers) - 1)
        offsets = tuple(itertools.accumulate(op.primes, initial=0))[:-1]
        args = EngramHashArgs(
            length=length,
            pad=op.pad,
            multipliers=op.multipliers,
            primes=_by_heads(op.primes, heads),
            offsets=_by_heads(offsets, heads),
        )
        table = digest(op.multipliers, op.primes, op.pad)
        return kernel(
            node,
            dtypes=(node.outputs[0].type.dtype,),
            dims=f"c{len(op.primes)}_l{length}_{table}",
            args=args,
            items=Extent(per_row=1),
            computes="y = (xor of id * multiplier over an n-gram) % prime + offset",
        )


class ChunkEngramHashRule(EngramHashRule):
    op = ops.ChunkEngramHash
    stored = -1


@dataclass(frozen=True)
class EngramLookupArgs:
    columns: int
    codes: int

    @classmethod
    def example(cls) -> EngramLookupArgs:
        return cls(columns=24, codes=256)


class EngramLookupRule(KernelRule):
    op = ops.EngramLookup

    def plan(self, node: Node, machine: Machine, rows: RowClass) -> KernelPlan:
        picks, table, _ = (value.type for value in node.inputs)
        return kernel(
            node,
            dtypes=(node.outputs[0].type.dtype,),
            dims=f"c{picks.channels}_n{table.channels}",
            args=EngramLookupArgs(picks.channels, table.channels),
            items=Extent(per_row=picks.channels),
            computes="y = the codes, then the scales, of the table's rows",
        )


@dataclass(frozen=True)
class EngramGateArgs:
    streams: int
    channels: int
    element: str
    kv_element: str
    norm_eps: str
    scale: str

    @classmethod
    def example(cls) -> EngramGateArgs:
        return cls(
            streams=4,
            channels=64,
            element="bf16",
            kv_element="bf16",
            norm_eps="1e-20f",
            scale="0.125f",
        )


class EngramGateRule(KernelRule):
    op = ops.EngramGate

    def refuses(self, node: Node, machine: Machine) -> str | None:
        channels = node.inputs[0].type.channels
        if channels % (2 * LANES):
            return f"a stream has {channels} channels, needs a multiple of {2 * LANES}"
        return None

    def plan(self, node: Node, machine: Machine, rows: RowClass) -> KernelPlan:
        assert isinstance(node.op, ops.EngramGate)
        x, kv = node.inputs[0].type, node.inputs[1].type
        streams, channels = x.inner
        args = EngramGateArgs(
            streams=streams,
            channels=channels,
            element=element(x),
            kv_element=element(kv),
            norm_eps=f32(node.op.norm_eps),
            scale=f32(channels**-0.5),
        )
        return kernel(
            node,
            dtypes=(x.dtype, kv.dtype),
            dims=f"s{streams}_n{channels}_e{number(node.op.norm_eps)}",
            args=args,
            items=Extent(per_row=streams),
            computes="y = x + sigmoid(signed root of cos(x, key)) * value, each stream",
        )


RULES: tuple[KernelRule, ...] = (
    MapTokenRule(),
    EngramHashRule(),
    ChunkEngramHashRule(),
    EngramLookupRule(),
    EngramGateRule(),
)
