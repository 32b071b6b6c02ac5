"""A text file that is there whole or not at all."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Write UTF-8 beside `path` and rename; a pipe or a device stays what it is. OSError."""
    if path.exists() and not path.is_file():
        path.write_text(text, encoding="utf-8")
        return
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    except BaseException:
        with suppress(OSError):  # the folder itself may be what is missing
            partial.unlink()
        raise
