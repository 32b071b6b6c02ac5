"""Exact codecs of the stored element types: what the kernels' encoders and decoders answer to.

    e4m3    sign, 4 exponent, 3 mantissa bits; 448 is the largest, 0x7f and 0xff are NaN
    e2m1    sign and 0 0.5 1 1.5 2 3 4 6; two codes a byte, the even channel in the low nibble
    ue8m0   byte e is 2^(e - 127); 255 is NaN
    records a row's codes, then its scales (`ir/types.py`; model_v41.md sections 4.1 to 4.4)

Encoding rounds to nearest, ties to the even code, and saturates; zeros keep their sign. A group
that holds a NaN (or, under a ue8m0 scale, an infinity) gets a NaN scale and so decodes to NaN.
Decoding is exact in float64.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from deepinfer_compile.ir.types import DType


def _e4m3_magnitude(code: int) -> float:
    exponent, mantissa = code >> 3, code & 7
    if exponent == 0:
        return math.ldexp(mantissa, -9)
    return math.ldexp(8 + mantissa, exponent - 10)


# Finite magnitudes in code order; the sign is the bit above them.
_E4M3 = torch.tensor([_e4m3_magnitude(code) for code in range(127)], dtype=torch.float64)
_E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)

_NAN = torch.tensor([math.nan], dtype=torch.float64)
_E4M3_DECODE = torch.cat([_E4M3, _NAN, -_E4M3, _NAN])
_E2M1_DECODE = torch.cat([_E2M1, -_E2M1])
_UE8M0_DECODE = torch.tensor(
    [math.ldexp(1.0, e - 127) for e in range(255)] + [math.nan], dtype=torch.float64
)


def as_bytes(codes: Tensor) -> Tensor:
    """Codes as uint8, whether they came as bytes or in one of torch's one-byte float types."""
    return codes if codes.dtype is torch.uint8 else codes.view(torch.uint8)


def round_bf16(x: Tensor) -> Tensor:
    """float64 to bf16 with a single rounding; torch's own cast rounds to f32 on the way.

    Rounding the f32 step to odd (inexact results get their last bit set) keeps every tie visible.
    """
    near = x.to(torch.float32)
    bits = near.view(torch.int32)
    away = near.double().abs() > x.abs()
    bits = torch.where(away, bits - 1, bits)
    inexact = near.double() != x
    bits = torch.where(inexact, bits | 1, bits)
    return bits.view(torch.float32).to(torch.bfloat16)


def _nearest(x: Tensor, magnitudes: Tensor) -> Tensor:
    """Index of the magnitude nearest to |x|, ties to the even index; past the last: the last."""
    x = x.abs()
    middles = (magnitudes[1:] + magnitudes[:-1]) / 2
    index = torch.searchsorted(middles, x.contiguous())
    tie = middles[index.clamp(max=len(middles) - 1)] == x
    return index + (tie & (index % 2 == 1))


def encode_e4m3(x: Tensor) -> Tensor:
    """float64 to e4m3 codes, saturating at 448."""
    code = _nearest(x, _E4M3)
    code = torch.where(x.isnan(), 127, code)
    return (code | (torch.signbit(x).long() << 7)).to(torch.uint8)


def decode_e4m3(codes: Tensor) -> Tensor:
    return _E4M3_DECODE[as_bytes(codes).long()]


def encode_e2m1(x: Tensor) -> Tensor:
    """float64 to e2m1 codes, one a byte, saturating at 6. There is no NaN: it becomes 6."""
    code = _nearest(x, _E2M1)
    return (code | (torch.signbit(x).long() << 3)).to(torch.uint8)


def decode_e2m1(codes: Tensor) -> Tensor:
    """One code a byte; `unpack_nibbles` first for stored rows."""
    return _E2M1_DECODE[codes.long()]


def pack_nibbles(codes: Tensor) -> Tensor:
    """[..., N] codes to [..., N/2] bytes, the even channel in the low nibble."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack_nibbles(packed: Tensor) -> Tensor:
    packed = as_bytes(packed)
    return torch.stack([packed & 15, packed >> 4], dim=-1).flatten(-2)


def encode_ue8m0(t: Tensor) -> Tensor:
    """The byte of `pow2ceil(t)`, t a positive normal f32: a mantissa bit raises the exponent.

    NaN of either sign gives 255, NaN."""
    bits = t.to(torch.float32).view(torch.int32) & 0x7FFFFFFF
    exponent = bits >> 23
    raised = ((bits & 0x7FFFFF) != 0) & (exponent < 255)
    return (exponent + raised).to(torch.uint8)


def decode_ue8m0(codes: Tensor) -> Tensor:
    return _UE8M0_DECODE[as_bytes(codes).long()]


def _scales(amax: Tensor, dtype: DType) -> Tensor:
    """Scale bytes of groups with largest magnitude `amax`. Floors keep scales normal, so nonzero.

    The product with the f32 reciprocal is an f32 product: it decides which side of a power of two
    the scale falls, and the published kernels do it so.
    """
    amax = amax.to(torch.float32)
    match dtype:
        case DType.MXFP8:
            floor = torch.tensor(1e-4, dtype=torch.float32)
            return encode_ue8m0(amax.maximum(floor) * torch.tensor(1 / 448, dtype=torch.float32))
        case DType.NVFP4:
            floor = torch.tensor(6 * 2.0**-9, dtype=torch.float32)
            return encode_e4m3((amax.maximum(floor) / 6).double())
        case DType.MXFP4:
            floor = torch.tensor(6 * 2.0**-126, dtype=torch.float32)
            return encode_ue8m0(amax.maximum(floor) * torch.tensor(1 / 6, dtype=torch.float32))
        case _:
            raise AssertionError(f"{dtype.value} is not a record type")


def decode_scales(scales: Tensor, dtype: DType) -> Tensor:
    """Scale bytes of records of type `dtype`."""
    return decode_e4m3(scales) if dtype is DType.NVFP4 else decode_ue8m0(scales)


def _grouped(rows: Tensor, dtype: DType) -> Tensor:
    """[..., N] as [..., groups, channels of a group]."""
    groups = rows.shape[-1] // dtype.group
    return rows.reshape(*rows.shape[:-1], groups, dtype.group)


def encode_records(rows: Tensor, dtype: DType) -> Tensor:
    """[..., N] stored as f32 or bf16 to uint8 [..., row_bytes(N)]."""
    groups = _grouped(rows.double(), dtype)
    scales = _scales(groups.abs().amax(-1), dtype)
    scaled = (groups / decode_scales(scales, dtype).unsqueeze(-1)).flatten(-2)
    codes = encode_e4m3(scaled) if dtype is DType.MXFP8 else pack_nibbles(encode_e2m1(scaled))
    return torch.cat([codes, scales], dim=-1)


def split_records(records: Tensor, dtype: DType) -> tuple[Tensor, Tensor]:
    """Code bytes and scale bytes of uint8 [..., row_bytes(N)]."""
    per_group = dtype.row_bytes(dtype.group)
    groups = records.shape[-1] // per_group
    cut = records.shape[-1] - groups
    return records[..., :cut], records[..., cut:]


def decode_records(records: Tensor, dtype: DType) -> Tensor:
    """uint8 [..., row_bytes(N)] to float64 [..., N]."""
    codes, scales = split_records(records, dtype)
    values = decode_e4m3(codes) if dtype is DType.MXFP8 else decode_e2m1(unpack_nibbles(codes))
    return (_grouped(values, dtype) * decode_scales(scales, dtype).unsqueeze(-1)).flatten(-2)
