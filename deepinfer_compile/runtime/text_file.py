"""A text file that is written whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

from deepinfer_compile.runtime.errors import EngineError


def write_text(path: Path, text: str) -> None:
    """Replaces what is there; a pipe or a device stays what it is. E551."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        if path.exists() and not path.is_file():
            path.write_text(text, encoding="utf-8")
        else:
            partial.write_text(text, encoding="utf-8")
            partial.replace(path)
    except OSError as failure:
        partial.unlink(missing_ok=True)
        message = f"cannot write the file: {failure.strerror or failure}"
        raise EngineError("E551", message, where=str(path)) from None
