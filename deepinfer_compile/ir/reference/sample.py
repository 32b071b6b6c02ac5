"""The sampler: arg max at temperature 0, else the inverse of the float64 CDF (section 3.18)."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer_compile.ir import ops
from deepinfer_compile.ir.ops import Op, Types
from deepinfer_compile.ir.reference.operand import Operand, Operands, Results, store
from deepinfer_compile.ir.types import DType

_MASK = 2**64 - 1
_GOLD = 0x9E3779B97F4A7C15


def evaluate(op: Op, xs: Operands, out: Types) -> Results | None:
    """The results of `op`, or None: another family's."""
    match op:
        case ops.Sample():
            return sample(*xs)
    return None


def fresh_uniform(seed: int, position: int) -> float:
    """u in [0, 1) of the fresh-sample stream; all words are u64 and wrap around."""
    q = 3 * position * _GOLD & _MASK
    z = seed + (q ^ (q << 13)) + _GOLD & _MASK
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    z = (z ^ z >> 27) * 0x94D049BB133111EB & _MASK
    z ^= z >> 31
    return (z >> 11) * 2.0**-53


def pick(logits: Tensor, temperature: float, seed: int, position: int) -> tuple[int, float]:
    """Token and log probability of one row. At temperature 0 the logits are taken as they are."""
    scaled = logits if temperature == 0 else logits / temperature
    logprobs = torch.log_softmax(scaled, dim=0)
    if temperature == 0:
        token = int((logits == logits.max()).int().argmax())  # int: argmax takes the first
    else:
        cdf = torch.softmax(scaled, dim=0).cumsum(0)
        above = cdf > fresh_uniform(seed, position) * cdf[-1]
        token = int(above.int().argmax())
    return token, float(logprobs[token])


def sample(logits: Operand, temperature: Operand, seed: Operand, position: Operand) -> Results:
    rows = zip(
        logits.reals,
        temperature.reals.tolist(),
        seed.ints.tolist(),
        position.ints.tolist(),
        strict=True,
    )
    picks = [pick(*row) for row in rows]
    tokens = torch.tensor([[token] for token, _ in picks], dtype=torch.int32).reshape(-1, 1)
    logprobs = torch.tensor([[lp] for _, lp in picks], dtype=torch.float64).reshape(-1, 1)
    return tokens, store(logprobs, DType.F32)
