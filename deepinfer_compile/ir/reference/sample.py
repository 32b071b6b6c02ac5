"""The sampler: of logits that `adjust.py` changed the arg max at temperature 0, else the inverse of
the float64 CDF of those that top-p, top-k and min-p keep (section 3.18)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer_compile.ir import ops
from deepinfer_compile.ir.ops import Op, Types
from deepinfer_compile.ir.reference.adjust import Changes, changed, in_order
from deepinfer_compile.ir.reference.operand import Operand, Operands, Results, store
from deepinfer_compile.ir.types import DType

_MASK = 2**64 - 1
_GOLD = 0x9E3779B97F4A7C15
_UNIT = 2.0**44  # shares are summed as integers of this unit


def evaluate(op: Op, xs: Operands, out: Types) -> Results | None:
    """The results of `op`, or None: another family's."""
    match op:
        case ops.Sample():
            return sample(op.listed, *xs)
    return None


def fresh_uniform(seed: int, position: int) -> float:
    """u in [0, 1) of the fresh-sample stream; all words are u64 and wrap around."""
    q = 3 * position * _GOLD & _MASK
    z = seed + (q ^ (q << 13)) + _GOLD & _MASK
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    z = (z ^ z >> 27) * 0x94D049BB133111EB & _MASK
    z ^= z >> 31
    return (z >> 11) * 2.0**-53


@dataclass(frozen=True)
class Filters:
    """What shortens the order of tokens; the defaults keep all."""

    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0


def kept_count(ordered: Tensor, filters: Filters) -> int:
    """How many of the scaled logits, highest first, all filters keep."""
    below_best = ordered - ordered[0]
    kept = len(ordered)
    if filters.top_p < 1:
        mass = (below_best.exp() * _UNIT).round().long()
        before = mass.cumsum(0) - mass
        kept = min(kept, int((before <= int(filters.top_p * float(mass.sum()))).sum()))
    if filters.top_k > 0:
        kept = min(kept, filters.top_k)
    if filters.min_p > 0:
        kept = min(kept, int((below_best >= math.log(filters.min_p)).sum()))
    return kept


def filtered(logits: Tensor, temperature: float, filters: Filters) -> Tensor:
    """The scaled logits of one row, -inf for what is not kept; as they are at temperature 0."""
    if temperature == 0:
        return logits
    scaled = logits / temperature
    order = in_order(logits)
    if scaled.max().isfinite():
        scaled[order[kept_count(scaled[order], filters) :]] = -math.inf
    return scaled


def pick(scaled: Tensor, temperature: float, seed: int, position: int) -> int:
    """The token of one row."""
    if temperature == 0:
        return int((scaled == scaled.max()).int().argmax())  # int: argmax takes the first
    cdf = torch.softmax(scaled, dim=0).cumsum(0)
    above = cdf > fresh_uniform(seed, position) * cdf[-1]
    return int(above.int().argmax())


def at_most(logits: Tensor, token: int) -> Tensor:
    """Which tokens are no likelier than `token`; of equal ones, those up to it."""
    same_up_to = (logits == logits[token]) & (torch.arange(len(logits)) <= token)
    return (logits < logits[token]) | same_up_to


def sample(
    listed: int,
    logits: Operand,
    biased: Operand,
    bias_token: Operand,
    bias: Operand,
    counted: Operand,
    token_counts: Operand,
    repetition: Operand,
    frequency: Operand,
    presence: Operand,
    masked: Operand,
    allowed: Operand,
    shortlist: Operand,
    temperature: Operand,
    top_p: Operand,
    top_k: Operand,
    min_p: Operand,
    top_count: Operand,
    seed: Operand,
    position: Operand,
    forced: Operand,
    summed: Operand,
) -> Results:
    token = torch.zeros(logits.rows, 1, dtype=torch.int32)
    logprob = torch.zeros(logits.rows, 1, dtype=torch.float64)
    top_token = torch.zeros(logits.rows, listed, dtype=torch.int32)
    top_logprob = torch.zeros(logits.rows, listed, dtype=torch.float64)
    smaller = torch.zeros(logits.rows, 1, dtype=torch.float64)
    for r in range(logits.rows):
        biases, slot = int(biased.ints[r]), int(counted.ints[r])
        changes = Changes(
            bias_token=bias_token.ints[r, :biases],
            bias=bias.stored[r, :biases],
            counts=token_counts.ints[slot] if slot else None,
            repetition=repetition.stored[r],
            frequency=frequency.stored[r],
            presence=presence.stored[r],
            allowed=allowed.ints[r] if masked.ints[r] else None,
            shortlist=int(shortlist.ints[r]),
        )
        row = changed(logits.stored[r], changes).double()
        t = float(temperature.reals[r])
        filters = Filters(float(top_p.reals[r]), int(top_k.ints[r]), float(min_p.reals[r]))
        scaled = filtered(row, t, filters)
        logprobs = torch.log_softmax(scaled, dim=0)
        chosen = int(forced.ints[r]) - 1
        if chosen < 0:
            chosen = pick(scaled, t, int(seed.ints[r]), int(position.ints[r]))
        token[r] = chosen
        logprob[r] = logprobs[chosen]
        top = in_order(row)[: min(int(top_count.ints[r]), listed)]
        top_token[r, : len(top)] = top
        top_logprob[r, : len(top)] = logprobs[top]
        if summed.ints[r]:
            smaller[r] = logprobs[at_most(scaled, chosen)].exp().sum()
    return (
        token,
        store(logprob, DType.F32),
        top_token,
        store(top_logprob, DType.F32),
        store(smaller, DType.F32),
    )
