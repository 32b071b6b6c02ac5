"""Refuse work that cannot fit the disk, before its first byte."""

from __future__ import annotations

import shutil
from pathlib import Path

from deepinfer_compile.diagnostics import error

SPARE_BYTES = 64 << 20  # headers, JSON files, and not filling a disk to the brim


def raise_if_full(folder: Path, needed: int) -> None:
    """E501 when the disk of `folder`, which need not exist yet, has less than `needed` bytes."""
    place = folder.expanduser().absolute()
    existing = next(parent for parent in (place, *place.parents) if parent.exists())
    free = shutil.disk_usage(existing).free
    if free < needed:
        raise error(
            "E501",
            f"{needed} bytes are needed and {free} are free",
            where=str(folder),
            help="free some space, or choose a folder on another disk",
        )
