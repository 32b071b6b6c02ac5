"""Memory that kernels use: zeroed, 64-byte aligned, exactly as many bytes as asked."""

from __future__ import annotations

import mmap

import numpy as np
from numpy.typing import NDArray

from deepinfer_compile.runtime.errors import EngineError

ALIGNMENT = 64


def aligned_bytes(count: int, what: str = "weights") -> NDArray[np.uint8]:
    """`count` zero bytes on fresh pages; pages take memory when they are first written."""
    if count == 0:
        return np.empty(0, dtype=np.uint8)
    try:
        pages = mmap.mmap(-1, count, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError, ValueError):
        raise EngineError(
            "E242",
            f"cannot allocate {count:,} bytes of {what}",
            help="free memory, or compile with a smaller max_requests or max_context",
        ) from None
    array = np.frombuffer(pages, dtype=np.uint8)
    assert address(array) % ALIGNMENT == 0
    return array


def address(array: NDArray[np.generic]) -> int:
    """Where the array's first element lies."""
    place: int = array.__array_interface__["data"][0]
    return place
