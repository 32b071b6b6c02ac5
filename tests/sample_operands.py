"""The sampler's operands by name, as a test gives them: a value per row, or one for all rows."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer_compile.ir import ops
from deepinfer_compile.ir.types import DType, R, TensorType

# Rows are as the host writes them where a test says nothing: greedy, all kept.
_DTYPES = {
    "biased": torch.int32,
    "bias_token": torch.int32,
    "bias": torch.float32,
    "counted": torch.int32,
    "token_counts": torch.int32,
    "repetition": torch.float32,
    "frequency": torch.float32,
    "presence": torch.float32,
    "masked": torch.int32,
    "allowed": torch.int32,
    "shortlist": torch.int32,
    "temperature": torch.float32,
    "top_p": torch.float32,
    "top_k": torch.int32,
    "min_p": torch.float32,
    "top_count": torch.int32,
    "seed": torch.int64,
    "position": torch.int64,
    "forced": torch.int32,
    "summed": torch.int32,
}
_DEFAULTS = {"top_p": 1.0, "top_k": -1}
_NAMES = {torch.float32: DType.F32, torch.int32: DType.I32, torch.int64: DType.I64}
SLOTS = 3


def operands(logits: Tensor, **arrays: object) -> tuple[list[Tensor], list[TensorType]]:
    """Tensors and types of the operator. Of those with more dims, zeros stand for what a test does
    not give."""
    rows, vocab = logits.shape
    biases = min(300, vocab)
    shapes = {
        "bias_token": (R, biases),
        "bias": (R, biases),
        "token_counts": (SLOTS, vocab),
        "allowed": (R, ops.mask_words(vocab)),
    }
    given = _DEFAULTS | arrays
    assert given.keys() <= _DTYPES.keys()
    tensors, types = [logits], [TensorType(DType.F32, (R, vocab))]
    for name, dtype in _DTYPES.items():
        value = torch.as_tensor(given.get(name, 0), dtype=dtype)
        shape = shapes.get(name, (R,))
        whole = tuple(rows if dim is R else int(dim) for dim in shape)
        tensors.append(value if value.dim() else value.repeat(whole))
        types.append(TensorType(_NAMES[dtype], shape))
    return tensors, types
