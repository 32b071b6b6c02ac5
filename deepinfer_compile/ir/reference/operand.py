"""Stored tensors as numbers, and numbers as stored tensors.

f32, bf16, i32 and i64 are torch tensors of that type; e4m3 and ue8m0 are bytes (or torch's one-byte
floats); e2m1 is packed, [..., K/2] bytes; records are [..., row_bytes(N)] bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer_compile.ir import codecs
from deepinfer_compile.ir.types import DType, TensorType

_TORCH = {
    DType.F32: torch.float32,
    DType.BF16: torch.bfloat16,
    DType.I32: torch.int32,
    DType.I64: torch.int64,
}


def stored_dtype(dtype: DType) -> torch.dtype:
    """The torch type a tensor of `dtype` is stored in."""
    return _TORCH.get(dtype, torch.uint8)


def stored_shape(type: TensorType, rows: int) -> tuple[int, ...]:
    """The torch shape of a tensor of `type` with R = `rows`."""
    lead = rows if type.by_rows else type.shape[0]
    assert isinstance(lead, int)
    if type.dtype not in (DType.E2M1, DType.MXFP8, DType.NVFP4, DType.MXFP4):
        return (lead, *type.inner)
    return (lead, *type.inner[:-1], type.dtype.row_bytes(type.channels))


@dataclass(frozen=True)
class Operand:
    """A stored tensor and its type."""

    stored: Tensor
    type: TensorType

    @property
    def rows(self) -> int:
        return self.stored.shape[0]

    @property
    def reals(self) -> Tensor:
        """float64 in the logical shape."""
        match self.type.dtype:
            case DType.E4M3:
                return codecs.decode_e4m3(self.stored)
            case DType.UE8M0:
                return codecs.decode_ue8m0(self.stored)
            case DType.E2M1:
                return codecs.decode_e2m1(codecs.unpack_nibbles(self.stored))
            case DType.MXFP8 | DType.NVFP4 | DType.MXFP4 as record:
                return codecs.decode_records(self.stored, record)
            case _:
                return self.stored.double()

    @property
    def ints(self) -> Tensor:
        """int64, for ids and positions."""
        return self.stored.long()


Operands = tuple[Operand, ...]
Results = tuple[Tensor, ...]


def store(reals: Tensor, dtype: DType) -> Tensor:
    """float64 to storage with one rounding."""
    match dtype:
        case DType.BF16:
            return codecs.round_bf16(reals)
        case DType.E4M3:
            return codecs.encode_e4m3(reals)
        case DType.F32 | DType.I32 | DType.I64:
            return reals.to(_TORCH[dtype])
        case _:
            return codecs.encode_records(reals, dtype)


def rounded(reals: Tensor, dtype: DType) -> Tensor:
    """float64 rounded to `dtype` and read back: an inner rounding."""
    return store(reals, dtype).double()
