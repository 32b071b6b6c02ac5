"""An engine in one file: a ZIP archive whose members are stored as they are, one after another.

    member header, padding, bytes (64-byte aligned) | the next | ... | table of members | end

The file is mapped once and members are views of it, so weights take no memory of their own. The
library is copied into a memory file (memfd), since the dynamic loader maps whole files only and a
sealed engine may have no folder to write to. ZIP readers forgive much; this one takes nothing but
what the compiler writes: no gap, overlap, compression, link, or byte after the end.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import stat
import zipfile
from collections.abc import Sequence
from pathlib import Path

from deepinfer_compile.format.manifest import plain_name
from deepinfer_compile.runtime.errors import EngineError
from deepinfer_compile.runtime.memory import ALIGNMENT, Bytes, map_file

_AGAIN = "copy the engine again, or recompile it"
_LOCAL, _CENTRAL, _END = b"PK\x03\x04", b"PK\x01\x02", b"PK\x05\x06"
_LOCAL_BYTES, _CENTRAL_BYTES, _END_BYTES = 30, 46, 22
_END_64_BYTES = 56 + 20  # the 64-bit end record and its locator, in archives of 4 GiB and more
_UTF8, _ENCRYPTED = 0x800, 0x1
_CHUNK = 16 << 20
_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE


class SingleFile:
    """`members` are views of the mapped file, by name."""

    def __init__(self, path: Path, members: dict[str, Bytes]) -> None:
        self.path = path
        self._members = members

    def names(self) -> list[str]:
        return sorted(self._members)

    def fault(self, name: str) -> str:
        return "" if name in self._members else "missing"

    def sha256(self, name: str) -> tuple[str, int]:
        digest, content = hashlib.sha256(), self._members[name]
        for begin in range(0, len(content), _CHUNK):
            digest.update(content[begin : begin + _CHUNK].data)
        return digest.hexdigest(), len(content)

    def map(self, name: str) -> Bytes:
        return self._members[name]

    def library(self, name: str, sha256: str) -> Path:
        """A sealed memory file. It is hashed again: what runs is what was hashed.

        Its descriptor stays open for as long as the library stays loaded, which is until the
        process ends: the dynamic loader knows libraries by path, and the next engine must not get
        the same one.
        """
        content = self._members[name].tobytes()
        if hashlib.sha256(content).hexdigest() != sha256:
            message, note = "the engine changed while it was loaded", f"{name}: sha256 differs"
            raise EngineError("E452", message, where=str(self.path), notes=[note], help=_AGAIN)
        memory = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        left = memoryview(content)
        while left:
            left = left[os.write(memory, left) :]
        fcntl.fcntl(memory, fcntl.F_ADD_SEALS, _SEALS)
        return Path(f"/proc/self/fd/{memory}")


def open_single(path: Path) -> SingleFile:
    """Map the file and check where every member lies; no member is read."""
    try:
        content = map_file(path)
        with zipfile.ZipFile(path) as archive:
            table = archive.infolist()
    except OSError as failure:
        message = f"cannot read the file: {failure.strerror or failure}"
        raise EngineError("E550", message, where=str(path)) from None
    except Exception as bad:  # hostile bytes leave zipfile by many exceptions
        if content[: len(_LOCAL)].tobytes() == _LOCAL:
            raise _damaged(path, [f"the table of its files cannot be read: {bad}"]) from None
        message = "not an engine: neither a folder nor an engine in one file"
        help = "compile one: deepinfer-compile SPEC --target cpu -o model.engine"
        raise EngineError("E450", message, where=str(path), help=help) from None
    return SingleFile(path, _members(path, content, table))


def _members(path: Path, content: Bytes, table: Sequence[zipfile.ZipInfo]) -> dict[str, Bytes]:
    members: dict[str, Bytes] = {}
    problems: list[str] = []
    end = 0
    for info in table:
        name = info.orig_filename
        fault = "there twice" if name in members else _fault(info)
        begin = _begin(content, info, end)
        if begin is None:
            fault = fault or f"does not lie where the file before it ends, at byte {end}"
        elif begin % ALIGNMENT:
            fault = fault or f"begins at byte {begin}, not a multiple of {ALIGNMENT}"
        if fault:
            problems.append(f"{name}: {fault}")
        if begin is None:
            break  # whatever follows lies somewhere else too
        end = begin + info.compress_size
        members[name] = content[begin:end]
    if not problems and not _ends_well(content, table, end):
        problems.append(f"there is more in it than its files, which end at byte {end}")
    if problems:
        raise _damaged(path, problems)
    return members


def _fault(info: zipfile.ZipInfo) -> str:
    """What a member must not be."""
    kind = stat.S_IFMT(info.external_attr >> 16)  # 0: the writer did not say
    if not plain_name(info.orig_filename) or info.is_dir():
        return "not the name of a file inside an engine"
    if kind not in (0, stat.S_IFREG):
        return "a link; engines hold plain files" if kind == stat.S_IFLNK else "not a plain file"
    if info.compress_type != zipfile.ZIP_STORED or info.compress_size != info.file_size:
        return "compressed; an engine is mapped as it is"
    return "encrypted" if info.flag_bits & _ENCRYPTED else ""


def _begin(content: Bytes, info: zipfile.ZipInfo, end: int) -> int | None:
    """Where a member's bytes begin; None unless its header lies at `end` and is that member's."""
    head = content[end : end + _LOCAL_BYTES].tobytes()
    name = _stored_name(info)
    if info.header_offset != end or len(head) < _LOCAL_BYTES or head[:4] != _LOCAL:
        return None
    lengths = int.from_bytes(head[26:28], "little"), int.from_bytes(head[28:30], "little")
    stored = content[end + _LOCAL_BYTES : end + _LOCAL_BYTES + lengths[0]].tobytes()
    begin = end + _LOCAL_BYTES + sum(lengths)
    fits = begin + info.compress_size <= len(content)
    return begin if fits and stored == name else None


def _ends_well(content: Bytes, table: Sequence[zipfile.ZipInfo], end: int) -> bool:
    """The table follows the last member, the end record follows the table, and nothing follows."""
    table_bytes = sum(
        _CENTRAL_BYTES + len(_stored_name(info)) + len(info.extra) + len(info.comment)
        for info in table
    )
    last = content[len(content) - _END_BYTES :].tobytes()
    rest = len(content) - end - table_bytes
    return (
        content[end : end + 4].tobytes() == _CENTRAL
        and last[:4] == _END
        and last[-2:] == bytes(2)  # no comment
        and rest in (_END_BYTES, _END_64_BYTES + _END_BYTES)
    )


def _stored_name(info: zipfile.ZipInfo) -> bytes:
    return info.orig_filename.encode("utf-8" if info.flag_bits & _UTF8 else "cp437")


def _damaged(path: Path, problems: Sequence[str]) -> EngineError:
    message = "the file is damaged, or no engine that the compiler wrote"
    return EngineError("E458", message, where=str(path), notes=problems[:20], help=_AGAIN)
