"""An engine folder as one file: a ZIP archive that the runtime maps instead of unpacking.

    folder/** -> names sorted, stored uncompressed, 64-byte aligned, mode 0644, no time

`unzip -l` lists it. The alignment is padding in each member's extra field, as for Android packages
(zipalign), so readers that know nothing of it skip it.
"""

from __future__ import annotations

import shutil
import zipfile
from pathlib import Path

_ALIGNMENT = 64
_EPOCH = (1980, 1, 1, 0, 0, 0)  # the least time ZIP can say
_UNIX, _PLAIN_FILE = 3, 0o100644
_HEADER_BYTES = 30 + 20  # of a member: its fixed part, and its sizes in 64 bits
_PADDING_ID = 0xD935
_CHUNK = 16 << 20


def write_single_file(folder: Path, out: Path) -> None:
    """Every file below `folder` into `out`: the same files, the same bytes. OSError."""
    files = {p.relative_to(folder).as_posix(): p for p in folder.rglob("*") if p.is_file()}
    with zipfile.ZipFile(out, "x", zipfile.ZIP_STORED) as archive:
        for name in sorted(files):
            assert archive.fp is not None
            member = _member(name, archive.fp.tell(), files[name].stat().st_size)
            # 64-bit sizes always: small engines take the way of large ones.
            with (
                files[name].open("rb") as source,
                archive.open(member, "w", force_zip64=True) as stored,
            ):
                shutil.copyfileobj(source, stored, _CHUNK)
    out.chmod(0o644)


def is_single_file(path: Path, manifest: str) -> bool:
    """Whether a file is an engine that `write_single_file` made, as far as its table says."""
    if not zipfile.is_zipfile(path):
        return False
    with zipfile.ZipFile(path) as archive:
        return manifest in archive.namelist()


def _member(name: str, offset: int, size: int) -> zipfile.ZipInfo:
    member = zipfile.ZipInfo(name, _EPOCH)
    member.create_system, member.external_attr = _UNIX, _PLAIN_FILE << 16
    member.file_size = size
    begin = offset + _HEADER_BYTES + len(name.encode()) + 4  # 4: id and length of the padding
    padding = -begin % _ALIGNMENT
    member.extra = _PADDING_ID.to_bytes(2, "little") + padding.to_bytes(2, "little")
    member.extra += bytes(padding)
    return member
