"""A file is there whole or not at all, whatever fails on the way."""

from __future__ import annotations

from pathlib import Path

import pytest

from deepinfer_compile.format.whole_file import write_whole


def test_a_file_is_replaced(tmp_path):
    write_whole(tmp_path / "x", "one")
    write_whole(tmp_path / "x", "zwölf")
    assert (tmp_path / "x").read_bytes() == "zwölf".encode()
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


@pytest.mark.parametrize("failure", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_half_a_file_is_none(tmp_path, monkeypatch, failure):
    write_whole(tmp_path / "x", "older")

    def write_half(path, text, **_):
        path.write_bytes(text[:3].encode())
        raise failure

    monkeypatch.setattr(Path, "write_text", write_half)
    with pytest.raises(type(failure)):
        write_whole(tmp_path / "x", "newer")
    assert (tmp_path / "x").read_text() == "older"
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


def test_a_file_in_the_way_of_the_folder_is_what_is_reported(tmp_path):
    (tmp_path / "x").write_text("mine")
    with pytest.raises(NotADirectoryError) as caught:
        write_whole(tmp_path / "x" / "y", "text")
    assert (tmp_path / "x").read_text() == "mine"
    assert caught.value.errno == 20
