"""Plan buffers as NumPy arrays. bf16 is carried as its bits: NumPy has no such type."""

from __future__ import annotations

from math import prod

import numpy as np
from numpy.typing import NDArray

from deepinfer_compile.format.plan import Buffer

Array = NDArray[np.generic]
Bytes = NDArray[np.uint8]

_DTYPES: dict[str, type[np.generic]] = {
    "f32": np.float32,
    "bf16": np.uint16,
    "i32": np.int32,
    "i64": np.int64,
}


def array_of(buffer: Buffer, area: Bytes, rows: int | None = None) -> Array:
    """`area` seen as the buffer's dtype and shape; -1 becomes `rows`, or all that fit.

    Codes and records (codes with their scales) have no NumPy type: they stay plain bytes.
    """
    if buffer.dtype not in _DTYPES:
        return area
    flat = area.view(_DTYPES[buffer.dtype])
    inner = prod(buffer.shape[1:])
    if buffer.shape[0] == -1:
        count = len(flat) // inner if rows is None else rows
        return flat[: count * inner].reshape(count, *buffer.shape[1:])
    return flat.reshape(buffer.shape)


def bf16_to_f32(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    """Exact: bf16 is the upper half of an f32."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def f32_to_bf16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Rounded to nearest, ties to even."""
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
