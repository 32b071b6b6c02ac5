"""What changes a row of logits before it is a distribution: bias, penalties, mask, shortlist.

Each step is one fp32 operation, as the definition rounds there (`ops.Sample`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

_COUNT = 2**31 - 1  # all bits of an i32 but the sign


@dataclass(frozen=True)
class Changes:
    """Of one row: `bias_token` i64[n] and `bias` f32[n]; `counts` i64[V] or None; the penalties,
    f32 scalars; `allowed`, i64 words of 32 bits, or None; `shortlist` 0 for all."""

    bias_token: Tensor
    bias: Tensor
    counts: Tensor | None
    repetition: Tensor
    frequency: Tensor
    presence: Tensor
    allowed: Tensor | None
    shortlist: int


def changed(logits: Tensor, changes: Changes) -> Tensor:
    """The f32 logits of one row as the distribution sees them."""
    row = logits.clone()
    row[changes.bias_token] += changes.bias
    if changes.counts is not None:
        row = _penalised(row, changes.counts, changes)
    if changes.allowed is not None:
        row = torch.where(_bits(changes.allowed, len(row)), row, -math.inf)
    if changes.shortlist > 0:
        row[in_order(row)[changes.shortlist :]] = -math.inf
    return row


def in_order(logits: Tensor) -> Tensor:
    """Token ids, highest logit first, of equal ones the lower id."""
    return torch.argsort(logits, descending=True, stable=True)


def _penalised(row: Tensor, counts: Tensor, by: Changes) -> Tensor:
    times = counts & _COUNT
    scaled = torch.where(row > 0, row / by.repetition, row * by.repetition)
    lowered = scaled - by.frequency * times.float()
    lowered = lowered - torch.where(times != 0, by.presence, 0.0)
    return torch.where(counts != 0, lowered, row)


def _bits(words: Tensor, vocab: int) -> Tensor:
    """Bits of one row's words, as bools by token."""
    bits = words[:, None] >> torch.arange(32) & 1
    return bits.flatten()[:vocab].bool()
