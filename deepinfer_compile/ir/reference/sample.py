"""The sampler: of the tokens a mask allows the arg max at temperature 0, else the inverse of the
float64 CDF of those that top-p, top-k and min-p keep (section 3.18)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer_compile.ir import ops
from deepinfer_compile.ir.ops import Op, Types
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


def in_order(logits: Tensor) -> Tensor:
    """Token ids, highest logit first, of equal ones the lower id."""
    return torch.argsort(logits, descending=True, stable=True)


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


def allowed_tokens(words: Tensor, vocab: int) -> Tensor:
    """Bits of one row's i64 words, as bools by token."""
    bits = words[:, None] >> torch.arange(32) & 1
    return bits.flatten()[:vocab].bool()


def sample(
    listed: int,
    logits: Operand,
    masked: Operand,
    allowed: Operand,
    temperature: Operand,
    top_p: Operand,
    top_k: Operand,
    min_p: Operand,
    top_count: Operand,
    seed: Operand,
    position: Operand,
) -> Results:
    vocab = logits.type.channels
    rows = zip(
        logits.reals,
        masked.ints.tolist(),
        allowed.ints,
        temperature.reals.tolist(),
        top_p.reals.tolist(),
        top_k.ints.tolist(),
        min_p.reals.tolist(),
        top_count.ints.tolist(),
        seed.ints.tolist(),
        position.ints.tolist(),
        strict=True,
    )
    token = torch.zeros(logits.rows, 1, dtype=torch.int32)
    logprob = torch.zeros(logits.rows, 1, dtype=torch.float64)
    top_token = torch.zeros(logits.rows, listed, dtype=torch.int32)
    top_logprob = torch.zeros(logits.rows, listed, dtype=torch.float64)
    for r, (row, has_mask, words, t, p, k, least, count, s, at) in enumerate(rows):
        if has_mask:
            row = torch.where(allowed_tokens(words, vocab), row, -math.inf)
        scaled = filtered(row, t, Filters(p, k, least))
        logprobs = torch.log_softmax(scaled, dim=0)
        token[r] = pick(scaled, t, s, at)
        logprob[r] = logprobs[int(token[r])]
        top = in_order(row)[: min(count, listed)]
        top_token[r, : len(top)] = top
        top_logprob[r, : len(top)] = logprobs[top]
    return token, store(logprob, DType.F32), top_token, store(top_logprob, DType.F32)
