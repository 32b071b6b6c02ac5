"""Safetensors headers: ours against the library's, and every way a file can lie."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file

from deepinfer_compile.checkpoint.headers import (
    INDEX_NAME,
    MAX_HEADER_BYTES,
    SINGLE_NAME,
    read_checkpoint,
    read_header,
)
from deepinfer_compile.checkpoint.tensors import StorageDType
from deepinfer_compile.diagnostics import CompileError
from tests.golden_data import golden_root

Header = dict[str, object]


def row(dtype: str, shape: list[int], begin: int, end: int) -> Header:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def write(path: Path, header: object, data: bytes = b"") -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def refused(read: Callable[[], object]) -> CompileError:
    with pytest.raises(CompileError) as caught:
        read()
    assert caught.value.exit_code == 4
    return caught.value


def test_entries_point_at_the_bytes_the_library_reads(tmp_path: Path) -> None:
    values = {
        "a": np.arange(6, dtype=np.float32).reshape(2, 3),
        "model.b": np.arange(4, dtype=np.int8),
    }
    save_file(values, tmp_path / SINGLE_NAME)
    index = read_checkpoint(tmp_path)
    assert set(index.tensors) == {"a", "b"}
    for name, value in values.items():
        entry = index.tensors[name.removeprefix("model.")]
        stored = (tmp_path / entry.file).read_bytes()[entry.offset :][: entry.nbytes]
        assert stored == value.tobytes()
        assert entry.shape == value.shape
    assert index.nbytes == sum(value.nbytes for value in values.values())


def test_golden_checkpoint_is_read_as_the_library_reads_it() -> None:
    folder = golden_root() / "v41_tiny"
    index = read_checkpoint(folder)
    with safe_open(folder / SINGLE_NAME, "np") as file:
        assert set(file.keys()) == set(index.tensors)
        for name, entry in index.tensors.items():
            tensor = file.get_slice(name)
            assert tuple(tensor.get_shape()) == entry.shape
            assert tensor.get_dtype() == entry.dtype


def test_every_dtype_has_the_librarys_size(tmp_path: Path) -> None:
    for dtype in StorageDType:
        size = 6 * dtype.itemsize
        path = write(tmp_path / "t.safetensors", {"t": row(dtype, [6], 0, size)}, bytes(size))
        assert read_header(path)["t"].nbytes == size
        with safe_open(path, "np") as file:  # refuses a size that is not its own
            assert file.get_slice("t").get_dtype() == dtype


LIES: list[tuple[object, bytes, str]] = [
    ({"a": row("F32", [2], 0, 8)}, bytes(7), "cut short"),
    ({"a": row("F32", [2], 0, 8)}, bytes(9), "no tensor claims"),
    ({"a": row("F32", [3], 0, 8)}, bytes(8), "F32[3] takes 12 bytes"),
    ({"a": row("F33", [2], 0, 8)}, bytes(8), "dtype 'F33' is none of"),
    ({"a": row("F32", [-2], 0, 8)}, bytes(8), "shape is not"),
    ({"a": row("F32", [2**63], 0, 8)}, bytes(8), "shape is not"),
    ({"a": row("F32", [True, 2], 0, 8)}, bytes(8), "shape is not"),
    ({"a": row("F32", [1] * 9, 0, 4)}, bytes(4), "shape is not"),
    ({"a": row("F32", [2], 8, 0)}, bytes(8), "data_offsets"),
    ({"a": {"dtype": "F32", "shape": [2]}}, bytes(8), "exactly dtype, shape and data_offsets"),
    ({"a": 3}, b"", "exactly dtype, shape and data_offsets"),
    ({"a": row("U8", [4], 0, 4), "b": row("U8", [4], 2, 6)}, bytes(6), "overlaps `a`"),
    ({"a": row("U8", [4], 0, 4), "b": row("U8", [4], 5, 9)}, bytes(9), "leaves a hole after `a`"),
    ({"a": row("U8", [4], 1, 5)}, bytes(5), "leaves a hole after the header"),
    ([1, 2], b"", "expected a JSON object"),
    (b"{not json", b"", "not valid JSON"),
    (b"\xff\xfe{}", b"", "not valid JSON"),
    (b"[" * 100_000, b"", "not valid JSON"),
    (b'{"a": ' + b"9" * 5000 + b"}", b"", "not valid JSON"),
    (b'{"a": 1, "a": 1}', b"", "given twice: `a`"),
]


@pytest.mark.parametrize(("header", "data", "message"), LIES)
def test_a_header_that_lies_is_refused(
    tmp_path: Path, header: object, data: bytes, message: str
) -> None:
    path = write(tmp_path / SINGLE_NAME, header, data)
    failure = refused(lambda: read_checkpoint(tmp_path))
    assert message in str(failure)
    assert all(d.code == "E402" and d.where == str(path) for d in failure.diagnostics)


@pytest.mark.parametrize("length", [0, 1, 17, 2**62, MAX_HEADER_BYTES + 1])
def test_a_header_length_is_bounded_before_it_is_read(tmp_path: Path, length: int) -> None:
    path = tmp_path / SINGLE_NAME
    path.write_bytes(length.to_bytes(8, "little") + b"{}" + bytes(14))
    assert "header length" in str(refused(lambda: read_checkpoint(tmp_path)))
    path.write_bytes(b"123")
    assert "the file has 3 bytes" in str(refused(lambda: read_checkpoint(tmp_path)))


def test_every_truncation_of_a_file_is_refused(tmp_path: Path) -> None:
    whole = write(
        tmp_path / "whole", {"a": row("F32", [2], 0, 8), "b": row("U8", [3], 8, 11)}, bytes(11)
    ).read_bytes()
    for size in range(len(whole)):
        (tmp_path / SINGLE_NAME).write_bytes(whole[:size])
        refused(lambda: read_checkpoint(tmp_path))


def test_all_problems_of_all_files_are_reported_together(tmp_path: Path) -> None:
    write(tmp_path / "a.safetensors", {"x": row("F33", [1], 0, 4), "y": row("F32", [1], 0, 5)})
    write(tmp_path / "b.safetensors", {"z": row("U8", [1], 0, 1)}, b"..")
    weight_map = {"x": "a.safetensors", "z": "b.safetensors", "w": "c.safetensors"}
    (tmp_path / INDEX_NAME).write_text(json.dumps({"weight_map": weight_map}))
    failure = refused(lambda: read_checkpoint(tmp_path))
    assert [d.code for d in failure.diagnostics] == ["E402", "E402", "E402", "E403"]
    assert "shard c.safetensors does not exist; the index lists 1 tensors" in str(failure)


def test_index_and_shards_must_agree(tmp_path: Path) -> None:
    write(tmp_path / "a.safetensors", {"x": row("U8", [1], 0, 1)}, b".")
    write(tmp_path / "b.safetensors", {"model.x": row("U8", [1], 0, 1)}, b".")
    weight_map = {"model.x": "b.safetensors", "y": "a.safetensors"}
    (tmp_path / INDEX_NAME).write_text(json.dumps({"weight_map": weight_map}))
    text = str(refused(lambda: read_checkpoint(tmp_path)))
    assert "listed in a.safetensors, which does not hold them: `y`" in text
    assert "held by a.safetensors, but not listed there: `x`" in text
    assert "`model.x` is stored twice: also as `x` in a.safetensors" in text


@pytest.mark.parametrize("file", ["../x.safetensors", "/etc/x.safetensors", "x.bin", "a\\b"])
def test_a_shard_name_cannot_leave_the_folder(tmp_path: Path, file: str) -> None:
    (tmp_path / INDEX_NAME).write_text(json.dumps({"weight_map": {"x": file}}))
    assert "plain file names" in str(refused(lambda: read_checkpoint(tmp_path)))


@pytest.mark.parametrize("index", ["{}", '{"weight_map": []}', '{"weight_map": {"x": 1}}', "]"])
def test_an_index_without_a_map_is_refused(tmp_path: Path, index: str) -> None:
    (tmp_path / INDEX_NAME).write_text(index)
    refused(lambda: read_checkpoint(tmp_path))


def test_a_folder_without_checkpoint_is_named(tmp_path: Path) -> None:
    assert "holds neither" in str(refused(lambda: read_checkpoint(tmp_path)))
    missing = tmp_path / "nowhere"
    failure = refused(lambda: read_checkpoint(missing))
    assert failure.diagnostics[0].code == "E401"
    assert "does not exist" in str(failure)
