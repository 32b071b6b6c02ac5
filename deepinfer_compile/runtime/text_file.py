"""Files that a verb writes beside an engine: whole or not at all, and never into it."""

from __future__ import annotations

from pathlib import Path

from deepinfer_compile.format.whole_file import write_whole
from deepinfer_compile.runtime.errors import EngineError


def check_outside(engine: Path, out: Path) -> None:
    """E026 when `out` would lie in the engine, or be it."""
    if engine.resolve() in (out.resolve(), *out.resolve().parents):
        message = "the output would become part of the engine, which is sealed"
        raise EngineError("E026", message, where=str(out), help="name another place for it")


def write_text(path: Path, text: str) -> None:
    """Replaces what is there; a pipe or a device stays what it is. E551."""
    try:
        write_whole(path, text)
    except OSError as failure:
        message = f"cannot write the file: {failure.strerror or failure}"
        raise EngineError("E551", message, where=str(path)) from None
