"""An engine folder appears whole or not at all, and replaces only engines."""

import os

import pytest

from deepinfer_compile.diagnostics import CompileError
from deepinfer_compile.package.folder import engine_folder, hash_files


def make(out, text="{}"):
    with engine_folder(out) as folder:
        (folder / "manifest.json").write_text(text)


def test_a_failed_build_leaves_nothing(tmp_path):
    out = tmp_path / "new" / "deep" / "a.engine"

    def fail():
        with engine_folder(out) as folder:
            (folder / "half").write_text("written")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert list(tmp_path.iterdir()) == []
    make(out)
    assert (out / "manifest.json").is_file()


def test_an_engine_is_replaced_and_survives_a_failed_replacement(tmp_path):
    out = tmp_path / "a.engine"
    make(out, "first")
    make(out, "second")
    assert (out / "manifest.json").read_text() == "second"

    def fail():
        with engine_folder(out):
            raise ValueError

    with pytest.raises(ValueError):
        fail()
    assert (out / "manifest.json").read_text() == "second"
    assert [p.name for p in tmp_path.iterdir()] == ["a.engine"]


@pytest.mark.parametrize("kind", ["file", "folder", "link"])
def test_anything_else_at_the_output_is_refused(tmp_path, kind):
    out = tmp_path / "a.engine"
    if kind == "file":
        out.write_text("mine")
    elif kind == "folder":
        out.mkdir()
        (out / "mine").write_text("mine")
    else:
        other = tmp_path / "other"
        make(other)
        out.symlink_to(other)
    with pytest.raises(CompileError) as refused:
        make(out)
    assert refused.value.exit_code == 5
    assert "error[E508]: the output is already there and is no engine" in str(refused.value)


def test_modes_do_not_follow_the_mask(tmp_path):
    before = os.umask(0o077)
    try:
        make(tmp_path / "a.engine")
    finally:
        os.umask(before)
    found = {path.stat().st_mode & 0o777 for path in tmp_path.rglob("*")}
    assert found == {0o755, 0o644}


def test_hashes_cover_every_file_but_the_manifest(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "b").write_text("")
    (tmp_path / "manifest.json").write_text("")
    empty = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
    assert hash_files(tmp_path) == {"sub/b": empty}
