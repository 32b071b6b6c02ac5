"""Read safetensors files in place: headers parsed, tensors as views of a read-only mapping.

    folder -> {name: TensorView}        a leading `model.` of a name is dropped

Tensors stay in the page cache: nothing is copied, and processes share the pages. Headers come from
anywhere, so lengths are bounded before they are read and byte ranges must lie inside the file.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from math import prod
from pathlib import Path

from deepinfer_compile.runtime.errors import EngineError
from deepinfer_compile.runtime.memory import Bytes, map_file

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
ITEM_BYTES = {
    **dict.fromkeys(("F64", "I64", "U64"), 8),
    **dict.fromkeys(("F32", "I32", "U32"), 4),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 2),
    **dict.fromkeys(("F8_E4M3", "F8_E5M2", "F8_E8M0", "I8", "U8", "BOOL"), 1),
}
_MAX_HEADER_BYTES = 100_000_000
_PREFIX_BYTES = 8
_REFETCH = "fetch the file again, or point to another copy of the checkpoint"


@dataclass(frozen=True)
class TensorView:
    """One stored tensor; `data` is its bytes in the mapping."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    data: Bytes

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"


def read_folder(folder: Path, reason: str = "") -> dict[str, TensorView]:
    """Every tensor of a checkpoint folder; one error with the problems of all its files.

    `reason`: who named the folder, for the message.
    """
    where = f"{folder} ({reason})" if reason else str(folder)
    tensors: dict[str, TensorView] = {}
    problems: list[str] = []
    for file in _shards(folder, where):
        try:
            stored = read_file(file)
        except EngineError as damaged:
            problems.append(f"{file.name}: {damaged.message}")
            continue
        for name, view in stored.items():
            plain = name.removeprefix("model.")
            if plain in tensors:
                problems.append(f"{file.name}: tensor `{name}` is stored twice")
            tensors[plain] = view
    if problems:
        message = "the checkpoint cannot be read"
        raise EngineError("E461", message, where=where, notes=problems, help=_REFETCH)
    return tensors


def read_file(path: Path) -> dict[str, TensorView]:
    """The tensors of one file under the names it stores."""
    try:
        return read_tensors(path, map_file(path))
    except OSError as failure:
        message = f"cannot read the file: {failure.strerror or failure}"
        raise EngineError("E550", message, where=str(path)) from None


def read_tensors(path: Path, content: Bytes) -> dict[str, TensorView]:
    """The tensors of a file's bytes; `path` is what messages call it."""
    if not len(content):
        raise _damaged(path, "the file is empty")
    length = int.from_bytes(content[:_PREFIX_BYTES].tobytes(), "little")
    begin = _PREFIX_BYTES + length
    if length > _MAX_HEADER_BYTES or begin > len(content):
        raise _damaged(path, f"header length {length} does not fit a file of {len(content)} bytes")
    try:
        header = json.loads(content[_PREFIX_BYTES:begin].tobytes())
    except (ValueError, RecursionError) as bad:
        raise _damaged(path, f"its header is not JSON: {bad}") from None
    if not isinstance(header, dict):
        raise _damaged(path, "its header is not a JSON object")
    header.pop("__metadata__", None)
    return {name: _view(path, name, facts, content[begin:]) for name, facts in header.items()}


def _view(path: Path, name: str, facts: object, data: Bytes) -> TensorView:
    match facts:
        case {"dtype": str(dtype), "shape": list(dims), "data_offsets": [int(first), int(end)]} if (
            all(isinstance(dim, int) and dim >= 0 for dim in dims)
            and 0 <= first <= end <= len(data)
            and end - first == prod(dims) * ITEM_BYTES.get(dtype, -1)
        ):
            return TensorView(path, dtype, tuple(dims), data[first:end])
    raise _damaged(path, f"tensor `{name}` has no valid dtype, shape and data_offsets")


def _shards(folder: Path, where: str) -> list[Path]:
    index = folder / INDEX
    if not index.is_file():
        if (folder / SINGLE).is_file():
            return [folder / SINGLE]
        message = f"the folder holds neither {INDEX} nor {SINGLE}"
        if not folder.is_dir():
            message = "the checkpoint folder does not exist"
        raise EngineError("E461", message, where=where, help="give a checkpoint folder")
    try:
        parsed = json.loads(index.read_bytes())
        names = sorted({name + "" for name in parsed["weight_map"].values()})
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise _damaged(index, "`weight_map` does not give a file name for every tensor") from None
    # A name with a folder in it could lead out of the checkpoint.
    strays = [name for name in names if Path(name).name != name or "\\" in name or "\0" in name]
    if strays:
        raise _damaged(index, f"shard names must be plain file names: {', '.join(strays[:5])}")
    return [folder / name for name in names]


def _damaged(path: Path, message: str) -> EngineError:
    return EngineError("E461", message, where=str(path), help=_REFETCH)
