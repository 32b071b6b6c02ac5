"""Packing a folder: one file, the same bytes for the same folder, listed by common tools."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import zipfile

import pytest

from deepinfer_compile.diagnostics import CompileError
from deepinfer_compile.package import folder as package
from deepinfer_compile.package.folder import check_output, engine_folder
from deepinfer_compile.package.single_file import write_single_file

FILES = {"b": b"", "kernels/é.cpp": b"x", "manifest.json": b"{}", "weights/w": bytes(range(200))}


def make(out, *, pack, files=FILES):
    with engine_folder(out, pack=pack) as folder:
        for name, content in files.items():
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_bytes(content)


def contents(path):
    if path.is_dir():
        files = (p for p in path.rglob("*") if p.is_file())
        return {p.relative_to(path).as_posix(): p.read_bytes() for p in files}
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def test_it_holds_the_folder(tmp_path):
    make(tmp_path / "x", pack=True)
    assert contents(tmp_path / "x") == FILES
    with zipfile.ZipFile(tmp_path / "x") as archive:
        assert archive.testzip() is None
        assert archive.namelist() == sorted(FILES)
        assert {info.date_time for info in archive.infolist()} == {(1980, 1, 1, 0, 0, 0)}
        assert {info.external_attr >> 16 for info in archive.infolist()} == {0o100644}


def test_common_tools_test_and_unpack_it(tmp_path):
    if not shutil.which("unzip"):
        pytest.skip("waits for unzip")
    make(tmp_path / "x", pack=True)
    for command in (["unzip", "-tq", "x"], ["unzip", "-q", "x", "-d", "out"]):
        subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    assert contents(tmp_path / "out")["weights/w"] == FILES["weights/w"]


def test_neither_time_nor_mask_nor_order_reaches_the_bytes(tmp_path):
    for name, order, mask in (("a", FILES, 0o022), ("b", dict(reversed(FILES.items())), 0o077)):
        before = os.umask(mask)
        try:
            make(tmp_path / name, pack=True, files=order)
        finally:
            os.umask(before)
        assert (tmp_path / name).stat().st_mode & 0o777 == 0o644
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("second", [False, True])
def test_either_form_replaces_the_other(tmp_path, first, second):
    make(tmp_path / "x", pack=first)
    newer = {**FILES, "weights/w": b"new"}
    make(tmp_path / "x", pack=second, files=newer)
    assert contents(tmp_path / "x") == newer
    assert (tmp_path / "x").is_file() == second
    assert [p.name for p in tmp_path.iterdir()] == ["x"]


@pytest.mark.parametrize("there", [False, True])
def test_a_full_disk_leaves_nothing_and_keeps_what_was_there(tmp_path, monkeypatch, there):
    if there:
        make(tmp_path / "x", pack=False)
    before = contents(tmp_path / "x") if there else {}

    def full(folder, out):
        write_single_file(folder, out)
        os.truncate(out, out.stat().st_size // 2)
        raise OSError(errno.ENOSPC, "No space left on device", str(out))

    monkeypatch.setattr(package, "write_single_file", full)
    with pytest.raises(CompileError, match="E501") as refused:
        make(tmp_path / "x", pack=True)
    assert refused.value.exit_code == 5
    assert (contents(tmp_path / "x") if there else {}) == before
    assert [p.name for p in tmp_path.iterdir()] == (["x"] if there else [])


def test_what_is_no_engine_is_not_replaced(tmp_path):
    with zipfile.ZipFile(tmp_path / "x", "w") as archive:
        archive.writestr("mine", "mine")
    for content in ((tmp_path / "x").read_bytes(), b"PK\x03\x04 and so on"):
        (tmp_path / "x").write_bytes(content)
        with pytest.raises(CompileError, match="E508"):
            check_output(tmp_path / "x")
    make(tmp_path / "engine", pack=True)
    (tmp_path / "link").symlink_to(tmp_path / "engine")
    with pytest.raises(CompileError, match="E508"):
        check_output(tmp_path / "link")
