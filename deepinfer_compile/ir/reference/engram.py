"""Engram: token map, n-gram hash, table lookup and gate (model_v41.md section 3.12)."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from deepinfer_compile.ir import codecs, ops
from deepinfer_compile.ir.ops import Op, Types
from deepinfer_compile.ir.reference.operand import Operand, Operands, Results, store
from deepinfer_compile.ir.reference.state import Past


def evaluate(op: Op, xs: Operands, out: Types) -> Results | None:
    """The results of `op`, or None: another family's."""
    match op:
        case ops.MapToken():
            token, image, token_map = (x.ints for x in xs)
            mapped = torch.where(image != 0, -1, token_map[token])
            return (mapped.unsqueeze(1).to(torch.int32),)
        case ops.ChunkEngramHash():
            history, slot, position, row_start, ids = (x.ints for x in xs)
            return (hash_rows(op, Past(history, slot, position, ids, row_start)),)
        case ops.EngramHash():
            history, slot, position = (x.ints for x in xs)
            return (hash_rows(op, Past(history, slot, position)),)
        case ops.EngramLookup():
            rows, table, scale = xs
            codes = codecs.as_bytes(table.stored)[rows.ints].flatten(1)
            scales = codecs.as_bytes(scale.stored)[rows.ints].flatten(1)
            return (torch.cat([codes, scales], dim=1),)
        case ops.EngramGate():
            return (engram_gate(op.norm_eps, *xs),)
    return None


def hash_rows(op: ops.EngramHash, past: Past) -> Tensor:
    """i32[R, columns]. From the first image or missing token on, all older ids are the pad."""
    longest = len(op.multipliers)
    heads = len(op.primes) // (longest - 1)
    back = torch.arange(longest)
    ids = past.table[past.index(back)].squeeze(-1)
    missing = (back > past.position.unsqueeze(1)) | (ids < 0)
    ids = torch.where(missing.long().cumsum(1) > 0, op.pad, ids)
    terms = ids * torch.tensor(op.multipliers)  # fits int64 by the choice of multipliers
    offsets = [0, *itertools.accumulate(op.primes)]
    columns = []
    mixed = terms[:, 0]
    for n in range(1, longest):
        mixed = mixed ^ terms[:, n]
        for column in range((n - 1) * heads, n * heads):
            columns.append(mixed % op.primes[column] + offsets[column])
    return torch.stack(columns, dim=1).to(torch.int32)


def engram_gate(
    eps: float, x: Operand, kv: Operand, q_weight: Operand, k_weight: Operand, image: Operand
) -> Tensor:
    """Statistics are per stream. A product of exactly zero counts as +0: its gate is above 1/2."""
    streams = x.reals
    count, channels = x.type.inner
    rows = kv.reals.reshape(-1, count + 1, channels)
    keys, value = rows[:, :count], rows[:, count:]
    dot = (streams * (q_weight.reals * k_weight.reals) * keys).sum(-1)
    for side in (streams, keys):
        dot = dot * torch.rsqrt(side.square().mean(-1) + eps)
    dot = dot * channels**-0.5
    gate = torch.sigmoid(torch.copysign(dot.abs().clamp(min=1e-6).sqrt(), dot))
    after = store(streams + gate.unsqueeze(-1) * value, x.type.dtype)
    return torch.where(image.ints.reshape(-1, 1, 1) != 0, x.stored, after)
