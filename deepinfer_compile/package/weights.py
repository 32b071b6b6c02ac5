"""Weight files of an engine: tensors in kernel layout, streamed from a checkpoint.

    weights/model.safetensors       one tensor per weight buffer, experts stacked (packed engines)
    weights/constants.safetensors   what the compiler computed (`@token_map`)

Wider element types come first, so every tensor starts at a multiple of its own element size.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from deepinfer_compile.checkpoint.headers import CheckpointIndex
from deepinfer_compile.format.plan import EnginePlan
from deepinfer_compile.format.recipes import names_of

_ITEM_BYTES = {"I64": 8, "F32": 4, "I32": 4, "BF16": 2, "F8_E4M3": 1, "F8_E8M0": 1, "I8": 1}
_CHUNK = 16 << 20
_ALIGNMENT = 64
Tensors = Mapping[str, tuple[str, tuple[int, ...], bytes]]  # dtype, shape, little-endian bytes


@dataclass(frozen=True)
class PackedTensor:
    """A tensor to write: its `parts` are checkpoint tensors laid one after another."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    parts: tuple[str, ...]
    bytes: int


def packed_tensors(plan: EnginePlan) -> tuple[PackedTensor, ...]:
    """What a packed engine's weight file holds, in file order."""
    tensors = []
    for recipe in plan.weights:
        if recipe.pattern.startswith("@"):
            continue
        shape = (recipe.experts, *recipe.shape) if recipe.experts else recipe.shape
        for index, parts in names_of(recipe):
            buffer = plan.buffers[index]
            tensors.append(PackedTensor(buffer.name, recipe.dtype, shape, parts, buffer.bytes))
    return _in_file_order(tensors)


def _in_file_order(tensors: Iterable[PackedTensor]) -> tuple[PackedTensor, ...]:
    return tuple(sorted(tensors, key=lambda t: (-_ITEM_BYTES[t.dtype], t.name)))


def write_packed(
    file: Path, plan: EnginePlan, index: CheckpointIndex, progress: Callable[[int, int], None]
) -> None:
    """Stream the checkpoint into `file`; `progress` gets bytes done and bytes in total."""
    tensors = packed_tensors(plan)
    total, done = sum(t.bytes for t in tensors), 0
    with file.open("wb") as out:
        out.write(_header(tensors))
        for tensor in tensors:
            for part in tensor.parts:
                for chunk in _read(index, part):
                    out.write(chunk)
                    done += len(chunk)
            progress(done, total)


def write_tensors(file: Path, given: Tensors) -> None:
    """A file of tensors that are in memory."""
    tensors = _in_file_order(
        PackedTensor(name, dtype, shape, (), len(data))
        for name, (dtype, shape, data) in given.items()
    )
    with file.open("wb") as out:
        out.write(_header(tensors))
        for tensor in tensors:
            out.write(given[tensor.name][2])


def _header(tensors: tuple[PackedTensor, ...]) -> bytes:
    """The safetensors header, padded so that data starts aligned."""
    entries: dict[str, object] = {}
    offset = 0
    for tensor in tensors:
        ends = [offset, offset + tensor.bytes]
        entries[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": ends,
        }
        offset = ends[1]
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-(len(text) + 8) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def _read(index: CheckpointIndex, name: str) -> Iterator[bytes]:
    entry = index.tensors[name]
    left = entry.nbytes
    file: BinaryIO
    with (index.folder / entry.file).open("rb") as file:
        file.seek(entry.offset)
        while left:
            chunk = file.read(min(_CHUNK, left))
            assert chunk, f"{entry.file} ends inside {name}: its header was checked"
            left -= len(chunk)
            yield chunk
