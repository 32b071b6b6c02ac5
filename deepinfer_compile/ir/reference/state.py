"""Stores into rings and pages, reads of the past, and group pooling.

A store returns a new tensor: a state version is a value like any other.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer_compile.ir import ops
from deepinfer_compile.ir.ops import Op, Types
from deepinfer_compile.ir.reference.operand import Operand, Operands, Results, store


def evaluate(op: Op, xs: Operands, out: Types) -> Results | None:
    """The results of `op`, or None: another family's."""
    match op:
        case ops.RingStore():
            return (ring_store(*xs),)
        case ops.PageStore():
            return (page_store(op.ratio, *xs),)
        case ops.ChunkPoolGroup():
            tail, slot, position, row_start, value, score = xs
            chunk = torch.stack([value.reals, score.reals], dim=1)
            past = Past(tail.reals, slot.ints, position.ints, chunk, row_start.ints)
            return (store(pool_group(op.ratio, past), op.out),)
        case ops.PoolGroup():
            tail, slot, position = xs
            past = Past(tail.reals, slot.ints, position.ints)
            return (store(pool_group(op.ratio, past), op.out),)
    return None


def ring_store(ring: Operand, slot: Operand, position: Operand, *rows: Operand) -> Tensor:
    """Row by row, so that the last of those that share a place stays."""
    after = ring.stored.clone()
    entries = torch.cat([part.stored.flatten(1) for part in rows], dim=1)
    entries = entries.reshape(-1, *after.shape[2:])
    places = (position.ints % after.shape[1]).tolist()
    for row, (s, place) in enumerate(zip(slot.ints.tolist(), places, strict=True)):
        after[s, place] = entries[row]
    return after


def page_store(
    ratio: int, pages: Operand, page_table: Operand, slot: Operand, position: Operand, rows: Operand
) -> Tensor:
    """Only rows that complete a group have an entry."""
    after = pages.stored.clone()
    entries = after.shape[1]
    table = page_table.ints
    for row, (s, p) in enumerate(zip(slot.ints.tolist(), position.ints.tolist(), strict=True)):
        if (p + 1) % ratio == 0:
            entry = p // ratio
            after[int(table[s, entry // entries]), entry % entries] = rows.stored[row]
    return after


@dataclass(frozen=True)
class Past:
    """What the rows of a step read back: `ring` for older positions, for newer ones the `chunk`.

    Without a chunk (decode) everything is in the ring. Rows of a request are contiguous, so the
    row `back` positions before row r is r - back, unless that precedes the request's `row_start`.
    """

    ring: Tensor
    slot: Tensor
    position: Tensor
    chunk: Tensor | None = None
    row_start: Tensor | None = None

    @property
    def table(self) -> Tensor:
        """All entries: the rings one after another, then the chunk's rows."""
        rings = self.ring.flatten(0, 1)
        return rings if self.chunk is None else torch.cat([rings, self.chunk])

    def index(self, back: Tensor) -> Tensor:
        """[R, len(back)]: where `table` holds the entry `back` positions before each row's own.

        Meaningless where that position is negative; callers mask it."""
        length = self.ring.shape[1]
        places = (self.position.unsqueeze(1) - back) % length
        in_ring = self.slot.unsqueeze(1) * length + places
        if self.row_start is None:
            return in_ring
        row = torch.arange(len(self.slot)).unsqueeze(1) - back
        in_chunk = self.ring.shape[0] * length + row
        return torch.where(row >= self.row_start.unsqueeze(1), in_chunk, in_ring)


def pool_group(ratio: int, past: Past) -> Tensor:
    """[R,N]: the softmax over a group's scores weighs its values, channel by channel."""
    back = torch.arange(ratio - 1, -1, -1)
    entries = past.table[past.index(back)]  # [R, ratio, 2, N]
    value, score = entries[:, :, 0], entries[:, :, 1]
    pooled = (torch.softmax(score, dim=1) * value).sum(1)
    complete = (past.position + 1) % ratio == 0
    return torch.where(complete.unsqueeze(1), pooled, 0.0)
