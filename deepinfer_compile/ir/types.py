"""Element types, dims and tensor types.

Three element types are *records*: a row of channels stored as codes followed by scales, the way
caches and quantised activations hold it (model_v41.md section 4):

    mxfp8   e4m3 codes, then one ue8m0 scale per 32 channels      512 channels: 528 B
    nvfp4   e2m1 pairs (even channel low), then e4m3 per 16       512 channels: 288 B
    mxfp4   e2m1 pairs, then one ue8m0 scale per 32               128 channels:  68 B

Weights keep codes and scales apart, as the checkpoint does: `e4m3` or `e2m1` beside `ue8m0`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from functools import cached_property


class DType(Enum):
    """An element type; `value` is its name in IR text."""

    F32 = "f32"
    BF16 = "bf16"
    I32 = "i32"
    I64 = "i64"
    E4M3 = "e4m3"
    E2M1 = "e2m1"
    UE8M0 = "ue8m0"
    MXFP8 = "mxfp8"
    NVFP4 = "nvfp4"
    MXFP4 = "mxfp4"

    @property
    def is_record(self) -> bool:
        """Codes and scales of a row stored together."""
        return self in _GROUP

    @property
    def group(self) -> int:
        """Channels that share one scale; records only."""
        return _GROUP[self]

    def row_bytes(self, channels: int) -> int:
        """Bytes of one row of `channels` elements, scales of a record included."""
        bits = channels * _BITS[self]
        assert bits % 8 == 0, f"{channels} channels of {self.value} end inside a byte"
        scales = channels // _GROUP[self] if self.is_record else 0
        assert not self.is_record or channels % _GROUP[self] == 0
        return bits // 8 + scales


_BITS = {
    DType.F32: 32,
    DType.BF16: 16,
    DType.I32: 32,
    DType.I64: 64,
    DType.E4M3: 8,
    DType.E2M1: 4,
    DType.UE8M0: 8,
    DType.MXFP8: 8,
    DType.NVFP4: 4,
    DType.MXFP4: 4,
}
_GROUP = {DType.MXFP8: 32, DType.NVFP4: 16, DType.MXFP4: 32}


class Rows(Enum):
    """The one symbolic dim: rows of a step, bounded by the spec."""

    R = "R"


R = Rows.R
Dim = int | Rows


@dataclass(frozen=True)
class TensorType:
    """`dtype[shape]`. `R` may only lead. `state` marks a linear value: consumed exactly once."""

    dtype: DType
    shape: tuple[Dim, ...]
    state: bool = False

    def __post_init__(self) -> None:
        assert self.shape, "a tensor has at least one dim"
        assert all(isinstance(dim, int) for dim in self.shape[1:]), f"R may only lead: {self}"

    def __str__(self) -> str:
        return self._text

    @cached_property
    def _text(self) -> str:
        dims = ",".join(dim.value if isinstance(dim, Rows) else str(dim) for dim in self.shape)
        return f"{'!' if self.state else ''}{self.dtype.value}[{dims}]"

    @property
    def by_rows(self) -> bool:
        """Whether the leading dim is R."""
        return self.shape[0] is R

    @cached_property
    def inner(self) -> tuple[int, ...]:
        """The dims after the first."""
        return tuple(dim for dim in self.shape[1:] if isinstance(dim, int))

    @property
    def channels(self) -> int:
        """The last dim of a tensor of two or more dims."""
        return self.inner[-1]

    @cached_property
    def width(self) -> int:
        """Elements after the first dim."""
        product = 1
        for dim in self.inner:
            product *= dim
        return product

    def bytes(self, rows: int) -> int:
        """Bytes with R = `rows`; a row of records keeps its scales."""
        lead = rows if isinstance(self.shape[0], Rows) else self.shape[0]
        if not self.inner:
            return self.dtype.row_bytes(lead)
        return lead * (self.width // self.channels) * self.dtype.row_bytes(self.channels)

    def with_dtype(self, dtype: DType) -> TensorType:
        """The same shape in another element type, no longer a state."""
        return TensorType(dtype, self.shape)
