"""Memory that kernels use, 64-byte aligned: exactly as many zeroed bytes as asked, or a file."""

from __future__ import annotations

import mmap
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from deepinfer_compile.runtime.errors import EngineError

ALIGNMENT = 64
Bytes = NDArray[np.uint8]


def aligned_bytes(count: int, what: str = "weights") -> Bytes:
    """`count` zero bytes on fresh pages; pages take memory when they are first written."""
    if count == 0:
        return np.empty(0, dtype=np.uint8)
    try:
        pages = mmap.mmap(-1, count, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError, ValueError):
        raise EngineError(
            "E242",
            f"cannot allocate {count:,} bytes of {what}",
            help="free memory, or compile with a smaller max_requests, max_context, max_rows or "
            "prefill_chunk",
        ) from None
    array = np.frombuffer(pages, dtype=np.uint8)
    assert address(array) % ALIGNMENT == 0
    return array


def map_file(path: Path) -> Bytes:
    """A file's bytes, read-only, from the page cache that processes share. OSError."""
    with path.open("rb") as file:
        try:
            return np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)
        except ValueError:  # an empty file cannot be mapped
            return np.empty(0, dtype=np.uint8)


def address(array: NDArray[np.generic]) -> int:
    """Where the array's first element lies."""
    place: int = array.__array_interface__["data"][0]
    return place
