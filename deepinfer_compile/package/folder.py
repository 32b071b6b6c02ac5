"""An engine appears whole or not at all, as a folder or packed into one file.

Files are written into a hidden sibling, hashed, and renamed into place last. An existing engine of
either form is replaced; anything else at that path is refused.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from deepinfer_compile.diagnostics import error
from deepinfer_compile.format.manifest import MANIFEST
from deepinfer_compile.package.single_file import is_single_file, write_single_file


def check_output(out: Path) -> None:
    """E508 unless `out` is free or an engine we may replace."""
    if not out.exists() and not out.is_symlink():
        return
    engine = (out / MANIFEST).is_file() or (out.is_file() and is_single_file(out, MANIFEST))
    if out.is_symlink() or not engine:
        raise error(
            "E508",
            "the output is already there and is no engine",
            where=str(out),
            help="remove it, or name another output with -o",
        )


@contextmanager
def engine_folder(out: Path, *, pack: bool = False) -> Iterator[Path]:
    """A scratch folder that becomes `out` when the block ends well, and vanishes otherwise.

    `pack`: `out` is one file that holds the folder; the disk has to take both for a moment.
    """
    check_output(out)
    target = out.absolute()
    scratch = target.parent / f".{target.name}.{os.getpid()}.partial"
    packed = scratch.with_suffix(".packed")
    missing = [folder for folder in target.parents if not folder.exists()]
    try:
        _make_parent(target.parent)
        scratch.mkdir()
        yield scratch
        _set_modes(scratch)
        if pack:
            write_single_file(scratch, packed)
        _replace(packed if pack else scratch, target)
    except OSError as failure:
        raise _disk_error(out, failure) from failure
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
        with suppress(OSError):  # most often there is none
            packed.unlink()
        for folder in missing:  # innermost first; those on the way to an engine are not empty
            with suppress(OSError):
                folder.rmdir()


def _make_parent(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(folder)) from None


def hash_files(folder: Path) -> dict[str, str]:
    """sha256 of every file below `folder` by relative path; the manifest itself left out."""
    hashes = {}
    for file in sorted(p for p in folder.rglob("*") if p.is_file()):
        name = file.relative_to(folder).as_posix()
        if name != MANIFEST:
            with file.open("rb") as stream:
                hashes[name] = hashlib.file_digest(stream, "sha256").hexdigest()
    return dict(sorted(hashes.items()))


def _set_modes(folder: Path) -> None:
    """The same modes whatever the umask."""
    folder.chmod(0o755)
    for path in folder.rglob("*"):
        path.chmod(0o755 if path.is_dir() else 0o644)


def _replace(scratch: Path, target: Path) -> None:
    """Rename into place; an engine already there is kept until the new one is named."""
    if not target.exists() or (target.is_file() and scratch.is_file()):
        scratch.replace(target)
        return
    old = target.parent / f".{target.name}.{os.getpid()}.old"
    target.rename(old)
    try:
        scratch.rename(target)
    except OSError:
        old.rename(target)
        raise
    if old.is_file():
        old.unlink()
    else:
        shutil.rmtree(old, ignore_errors=True)


def _disk_error(out: Path, failure: OSError) -> Exception:
    if failure.errno in (errno.ENOSPC, errno.EDQUOT):
        return error(
            "E501",
            "the disk ran full while the engine was written; nothing was kept",
            where=str(out),
            help="free some space, or name another output with -o",
        )
    message = f"cannot write the engine: {failure.strerror or failure}"
    help = "name another output with -o"
    return error("E502", message, where=str(failure.filename or out), help=help)
