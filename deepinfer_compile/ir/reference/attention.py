"""Attention over the window and the selected entries, with a sink (model_v41.md section 3.9)."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer_compile.ir import ops
from deepinfer_compile.ir.ops import Op, Types
from deepinfer_compile.ir.reference.operand import Operand, Operands, Results, store
from deepinfer_compile.ir.reference.state import Past


def evaluate(op: Op, xs: Operands, out: Types) -> Results | None:
    """The results of `op`, or None: another family's."""
    match op:
        case ops.ChunkAttention():
            q, ring, slot, position, sink, row_start, kv, *compressed = xs
            past = Past(ring.reals, slot.ints, position.ints, kv.reals, row_start.ints)
        case ops.SparseAttention():
            q, ring, slot, position, sink, *compressed = xs
            past = Past(ring.reals, slot.ints, position.ints)
        case _:
            return None
    return (store(_sparse_attention(op, q, past, sink, compressed), out[0].dtype),)


def attend(q: Tensor, keys: Tensor, valid: Tensor, sink: Tensor, scale: float) -> Tensor:
    """One query: q[H,d] over the valid rows of keys[n,d], which are values too -> [H,d].

    The sink is a logit per head that takes part in the denominator only."""
    keys = keys[valid]  # not a mask: 0 x NaN of a place never written would be NaN
    scores = (q @ keys.T) * scale
    peak = torch.cat([scores, sink.unsqueeze(1)], dim=1).amax(1, keepdim=True)
    p = torch.exp(scores - peak)
    total = p.sum(1, keepdim=True) + torch.exp(sink.unsqueeze(1) - peak)
    return (p @ keys) / total


def _sparse_attention(
    op: ops.SparseAttention, q: Operand, past: Past, sink: Operand, compressed: list[Operand]
) -> Tensor:
    back = torch.arange(op.window - 1, -1, -1)
    table, index = past.table, past.index(back)
    valid = back <= past.position.unsqueeze(1)
    if compressed:
        pages, page_table, selected = compressed
        chosen = selected.ints
        entries = page_entries(page_table.ints[past.slot], chosen, pages.stored.shape[1])
        index = torch.cat([index, len(table) + entries], dim=1)
        valid = torch.cat([valid, chosen >= 0], dim=1)
        table = torch.cat([table, pages.reals.flatten(0, 1)])
    queries, sinks = q.reals, sink.reals
    rows = [
        attend(queries[r], table[index[r].clamp(min=0)], valid[r], sinks, op.scale)
        for r in range(q.rows)
    ]
    return torch.stack(rows) if rows else queries


def page_entries(pages_of: Tensor, entry: Tensor, entries: int) -> Tensor:
    """Where entries [R,n] lie among all pages' entries; `pages_of` [R,pages] is each row's table.

    Entry -1 (none) maps anywhere; callers mask it."""
    entry = entry.clamp(min=0)
    return pages_of.gather(1, entry // entries) * entries + entry % entries
