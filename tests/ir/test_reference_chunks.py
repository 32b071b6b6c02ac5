"""A chunk at once equals its rows one by one: `Chunk...` operators against their decode forms.

Layouts are drawn: one to three requests, each with rows already in the past, chunks shorter and
longer than the ring, in any slots.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from hypothesis import given as drawn
from hypothesis import settings
from hypothesis import strategies as st
from torch import Tensor

from deepinfer_compile.ir import codecs, ops
from deepinfer_compile.ir.types import DType
from tests.ir.given import bytes_of, one

SLOTS, LENGTH = 4, 5
Pair = tuple[Tensor, str]


@dataclass(frozen=True)
class Layout:
    """Rows of a step: `slot`, `position` and `row_start` are operands."""

    slot: Tensor
    position: Tensor
    row_start: Tensor

    @property
    def rows(self) -> int:
        return len(self.slot)

    def of(self, name: str) -> Pair:
        return getattr(self, name), "i32[R]"

    def row(self, at: int) -> tuple[Pair, Pair]:
        """slot and position of a step of one row."""
        return (self.slot[at : at + 1], "i32[R]"), (self.position[at : at + 1], "i32[R]")


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    slots = draw(st.lists(st.integers(1, SLOTS - 1), min_size=1, max_size=3, unique=True))
    slot, position, row_start = [], [], []
    for s in slots:
        first, count = draw(st.integers(0, 9)), draw(st.integers(1, 8))
        row_start += [len(slot)] * count
        slot += [s] * count
        position += range(first, first + count)
    return Layout(*(torch.tensor(v, dtype=torch.int32) for v in (slot, position, row_start)))


def one_by_one(
    layout: Layout, state: Pair, rows: tuple[Pair, ...], read: Callable[[Pair, int], Tensor]
) -> tuple[Tensor, Tensor]:
    """Store each row, then read: the results together, and the state at the end."""
    results = []
    for at in range(layout.rows):
        parts = tuple((tensor[at : at + 1], type) for tensor, type in rows)
        state = (one(ops.RingStore(), state, *layout.row(at), *parts), state[1])
        results.append(read(state, at))
    return torch.cat(results), state[0]


def whole_store(layout: Layout, state: Pair, *rows: Pair) -> Tensor:
    return one(ops.RingStore(), state, layout.of("slot"), layout.of("position"), *rows)


@drawn(layouts(), st.integers(0, 2**31))
@settings(max_examples=30, deadline=None)
def test_chunk_pool_group_equals_decode(layout: Layout, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    tail = (torch.randn(SLOTS, LENGTH, 2, 4, generator=generator), f"!f32[{SLOTS},{LENGTH},2,4]")
    rows = tuple((torch.randn(layout.rows, 4, generator=generator), "f32[R,4]") for _ in range(2))
    chunk = one(
        ops.ChunkPoolGroup(2, DType.F32),
        tail,
        *(layout.of(name) for name in ("slot", "position", "row_start")),
        *rows,
    )

    def read(state: Pair, at: int) -> Tensor:
        return one(ops.PoolGroup(2, DType.F32), state, *layout.row(at))

    decode, after = one_by_one(layout, tail, rows, read)
    assert torch.equal(chunk, decode)
    assert torch.equal(whole_store(layout, tail, *rows), after)


@drawn(layouts(), st.integers(0, 2**31))
@settings(max_examples=30, deadline=None)
def test_chunk_engram_hash_equals_decode(layout: Layout, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    shape = (SLOTS, LENGTH, 1)
    history = torch.randint(-1, 50, shape, generator=generator, dtype=torch.int32)
    ids = torch.randint(-1, 50, (layout.rows, 1), generator=generator, dtype=torch.int32)
    state, rows = (history, f"!i32[{SLOTS},{LENGTH},1]"), (ids, "i32[R,1]")
    constants = ((12345671, 7654321, 1234577, 999331), (67, 71, 73, 79, 83, 89), 2)
    places = (layout.of(name) for name in ("slot", "position", "row_start"))
    chunk = one(ops.ChunkEngramHash(*constants), state, *places, rows)

    def read(now: Pair, at: int) -> Tensor:
        return one(ops.EngramHash(*constants), now, *layout.row(at))

    decode, _ = one_by_one(layout, state, (rows,), read)
    assert torch.equal(chunk, decode)


@drawn(layouts(), st.integers(0, 2**31), st.booleans())
@settings(max_examples=30, deadline=None)
def test_chunk_attention_equals_decode(layout: Layout, seed: int, compressed: bool) -> None:
    generator = torch.Generator().manual_seed(seed)
    heads, d, pages, entries, k = 2, 32, 6, 2, 3

    def records(dtype: DType, *shape: int) -> Tensor:
        return codecs.encode_records(torch.randn(shape, generator=generator), dtype)

    q = torch.randn(layout.rows, heads, d, generator=generator)
    sink = (torch.randn(heads, generator=generator), f"f32[{heads}]")
    state = (records(DType.MXFP8, SLOTS, LENGTH, d), f"!mxfp8[{SLOTS},{LENGTH},{d}]")
    kv = (records(DType.MXFP8, layout.rows, d), f"mxfp8[R,{d}]")
    store = (records(DType.NVFP4, pages, entries, d), f"!nvfp4[{pages},{entries},{d}]")
    table = torch.randint(0, pages, (SLOTS, 3), generator=generator, dtype=torch.int32)
    chosen = torch.randint(-1, 6, (layout.rows, k), generator=generator, dtype=torch.int32)

    def far(first: int, last: int) -> tuple[Pair, ...]:
        if not compressed:
            return ()
        return store, (table, f"i32[{SLOTS},3]"), (chosen[first:last], f"i32[R,{k}]")

    op = (LENGTH - 1, d**-0.5, 1 if compressed else 0)
    chunk = one(
        ops.ChunkAttention(*op),
        (q, f"f32[R,{heads},{d}]"),
        state,
        layout.of("slot"),
        layout.of("position"),
        sink,
        layout.of("row_start"),
        kv,
        *far(0, layout.rows),
    )

    def read(now: Pair, at: int) -> Tensor:
        row = (q[at : at + 1], f"f32[R,{heads},{d}]")
        return one(ops.SparseAttention(*op), row, now, *layout.row(at), sink, *far(at, at + 1))

    decode, after = one_by_one(layout, state, (kv,), read)
    assert torch.equal(chunk, decode)
    assert bytes_of(whole_store(layout, state, kv)) == bytes_of(after)
