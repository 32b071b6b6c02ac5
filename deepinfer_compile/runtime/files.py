"""The files of an engine, whichever form it has: a folder, or one file that holds the folder.

    open_files("flash.engine") -> EngineFiles: names, fault, sha256, read, map, library

Names are relative, with `/`. Nothing is unpacked: what is read is mapped where it lies.
"""

from __future__ import annotations

import hashlib
import os
import stat
from pathlib import Path
from typing import Protocol

from deepinfer_compile.runtime.errors import EngineError
from deepinfer_compile.runtime.memory import Bytes, map_file
from deepinfer_compile.runtime.single_file import open_single


class EngineFiles(Protocol):
    """`path` is the engine's; `path / name` is how messages call a file, in both forms."""

    @property
    def path(self) -> Path: ...

    def names(self) -> list[str]:
        """Everything that is there and is no plain folder, sorted."""

    def fault(self, name: str) -> str:
        """Why there is no plain file of this name; "" if there is one."""

    def sha256(self, name: str) -> tuple[str, int]:
        """Hash and size in bytes. OSError when it cannot be read."""

    def map(self, name: str) -> Bytes:
        """The file's bytes where they lie, read-only and 64-byte aligned. E550."""

    def library(self, name: str, sha256: str) -> Path:
        """A path that the dynamic loader takes for this file."""


def open_files(path: Path) -> EngineFiles:
    """E450, E458, E550 when a file is given that is no engine in one file."""
    return open_single(path) if path.is_file() else FolderFiles(path)


class FolderFiles:
    """An engine folder."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def names(self) -> list[str]:
        def refuse(failure: OSError) -> None:
            message = f"cannot read the folder: {failure.strerror or failure}"
            raise EngineError("E550", message, where=str(failure.filename))

        found: list[str] = []
        for folder, inner, files in os.walk(self.path, onerror=refuse):  # links are not followed
            links = [name for name in inner if (Path(folder) / name).is_symlink()]
            place = Path(folder).relative_to(self.path)
            found += ((place / name).as_posix() for name in (*files, *links))
        return sorted(found)

    def fault(self, name: str) -> str:
        try:
            mode = (self.path / name).lstat().st_mode
        except (FileNotFoundError, NotADirectoryError):
            return "missing"
        except OSError as failure:
            return f"cannot be read: {failure.strerror or failure}"
        if stat.S_ISLNK(mode):
            return "a link; engines hold plain files"
        return "" if stat.S_ISREG(mode) else "not a plain file"

    def sha256(self, name: str) -> tuple[str, int]:
        with (self.path / name).open("rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest(), stream.tell()

    def map(self, name: str) -> Bytes:
        try:
            return map_file(self.path / name)
        except OSError as failure:
            message = f"cannot read the file: {failure.strerror or failure}"
            raise EngineError("E550", message, where=str(self.path / name)) from None

    def library(self, name: str, sha256: str) -> Path:
        del sha256  # checked when the engine was opened
        return self.path / name
