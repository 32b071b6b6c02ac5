"""Read the headers of a safetensors folder: where every tensor lies, without touching its data.

    folder with model.safetensors.index.json or model.safetensors -> CheckpointIndex

Headers come from anywhere, so nothing in them is believed: lengths are bounded before they are
read, and byte ranges must tile the file. All problems of all files are reported together.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import MappingProxyType

from deepinfer_compile.checkpoint.tensors import StorageDType
from deepinfer_compile.diagnostics import CompileError, Diagnostic, error

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
# The safetensors library refuses longer headers; the published shards stay under 3 MB.
MAX_HEADER_BYTES = 100_000_000
_PREFIX_BYTES = 8
_MAX_DIMS = 8
_REFETCH = "fetch the file again, or point to another copy of the checkpoint"


@dataclass(frozen=True)
class TensorEntry:
    """Where one tensor lies: `offset` counts from the start of `file`."""

    file: str
    dtype: StorageDType
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True)
class CheckpointIndex:
    """Every tensor of a folder by name; a leading `model.` is stripped."""

    folder: Path
    tensors: Mapping[str, TensorEntry]

    @property
    def nbytes(self) -> int:
        return sum(entry.nbytes for entry in self.tensors.values())

    @property
    def files(self) -> tuple[str, ...]:
        return tuple(sorted({entry.file for entry in self.tensors.values()}))


def read_checkpoint(folder: Path) -> CheckpointIndex:
    """The index of a checkpoint folder; raises one `CompileError` with everything wrong in it."""
    listed = _listed(folder)
    problems: list[Diagnostic] = []
    tensors: dict[str, TensorEntry] = {}
    stored_as: dict[str, str] = {}
    for file in sorted(listed) if listed is not None else [SINGLE_NAME]:
        if listed is not None and not (folder / file).is_file():
            problems.append(_missing_shard(folder, file, len(listed[file])))
            continue
        try:
            stored = read_header(folder / file)
        except CompileError as damaged:
            problems += damaged.diagnostics
            continue
        if listed is not None:
            problems += _disagreements(folder, file, listed[file], stored)
        for name, entry in stored.items():
            plain = name.removeprefix("model.")
            if plain in tensors:
                first = f"`{stored_as[plain]}` in {tensors[plain].file}"
                problems.append(_duplicate(folder / file, name, first))
            else:
                tensors[plain], stored_as[plain] = entry, name
    if problems:
        raise CompileError(problems)
    return CheckpointIndex(folder, MappingProxyType(tensors))


def read_header(path: Path) -> dict[str, TensorEntry]:
    """The tensors of one safetensors file under the names it stores."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(_PREFIX_BYTES), "little")
            room = min(MAX_HEADER_BYTES, size - _PREFIX_BYTES)
            if not 2 <= length <= room:
                raise error("E402", _bad_length(size, length), where=str(path), help=_REFETCH)
            text = file.read(length)
    except FileNotFoundError:
        raise error("E402", "the file does not exist", where=str(path), help=_REFETCH) from None
    except OSError as failure:
        message = f"cannot read the file: {failure.strerror or failure}"
        raise error("E402", message, where=str(path), help="check its permissions") from failure

    header = _parse_object(path, text)
    header.pop("__metadata__", None)
    begin = _PREFIX_BYTES + length
    entries: dict[str, TensorEntry] = {}
    problems: list[Diagnostic] = []
    for name, facts in header.items():
        entry = _entry(path.name, facts, begin)
        if isinstance(entry, str):
            problems.append(Diagnostic("E402", f"tensor `{name}`: {entry}", where=str(path)))
        else:
            entries[name] = entry
    if not problems:  # ranges are only worth comparing when all of them are known
        problems += _gaps(path, entries, begin, size)
    if problems:
        raise CompileError(problems)
    return entries


def _bad_length(size: int, length: int) -> str:
    if size < _PREFIX_BYTES:
        return f"the file has {size} bytes; a safetensors file starts with an 8 byte header length"
    if length > MAX_HEADER_BYTES:
        return f"header length {length} is over the limit of {MAX_HEADER_BYTES}: not safetensors"
    return f"header length {length} does not fit the file of {size} bytes: it is cut short"


def _parse_object(path: Path, text: bytes) -> dict[str, object]:
    """A JSON object whose keys are all different."""

    def unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
        result = dict(pairs)
        if len(result) < len(pairs):
            twice = [key for key, times in Counter(key for key, _ in pairs).items() if times > 1]
            raise ValueError("given twice: " + ", ".join(f"`{key}`" for key in twice[:5]))
        return result

    try:
        parsed = json.loads(text.decode("utf-8"), object_pairs_hook=unique)
    except (ValueError, RecursionError) as failure:
        message = f"not valid JSON: {failure}"
        raise error("E402", message, where=str(path), help=_REFETCH) from None
    if not isinstance(parsed, dict):
        raise error("E402", "expected a JSON object", where=str(path), help=_REFETCH)
    return parsed


def _entry(file: str, facts: object, begin: int) -> TensorEntry | str:
    """One header row, or what is wrong with it."""
    if not isinstance(facts, dict) or set(facts) != {"dtype", "shape", "data_offsets"}:
        return "expected exactly dtype, shape and data_offsets"
    known = {str(dtype) for dtype in StorageDType}
    if not isinstance(facts["dtype"], str) or facts["dtype"] not in known:
        return f"dtype {facts['dtype']!r:.40} is none of {', '.join(sorted(known))}"
    shape, offsets = _naturals(facts["shape"]), _naturals(facts["data_offsets"])
    if shape is None or len(shape) > _MAX_DIMS:
        return f"shape is not a list of at most {_MAX_DIMS} whole numbers"
    if offsets is None or len(offsets) != 2 or offsets[0] > offsets[1]:
        return "data_offsets is not [begin, end]"
    dtype, nbytes = StorageDType(facts["dtype"]), offsets[1] - offsets[0]
    if nbytes != prod(shape) * dtype.itemsize:
        return (
            f"{nbytes} bytes, but {dtype}{list(shape)} takes {prod(shape) * dtype.itemsize} bytes"
        )
    return TensorEntry(file, dtype, shape, begin + offsets[0], nbytes)


def _naturals(value: object) -> tuple[int, ...] | None:
    """A list of integers in [0, 2**63); bool is an int to Python but not here."""
    if not isinstance(value, list):
        return None
    if all(type(item) is int and 0 <= item < 2**63 for item in value):
        return tuple(value)
    return None


def _gaps(
    path: Path, entries: Mapping[str, TensorEntry], begin: int, size: int
) -> Iterator[Diagnostic]:
    """Data must follow the header without overlap, hole or rest, as the format demands."""
    end, before = begin, "the header"
    for name, entry in sorted(entries.items(), key=lambda kv: (kv[1].offset, kv[1].nbytes)):
        if entry.offset != end:
            fault = "overlaps" if entry.offset < end else "leaves a hole after"
            message = (
                f"tensor `{name}` at byte {entry.offset} {fault} {before}, which ends at {end}"
            )
            yield Diagnostic("E402", message, where=str(path), help=_REFETCH)
        end, before = max(end, entry.offset + entry.nbytes), f"`{name}`"
    if end != size:
        fault = "it is cut short" if size < end else "it has bytes that no tensor claims"
        message = f"the file has {size} bytes, its header describes {end}: {fault}"
        yield Diagnostic("E402", message, where=str(path), help=_REFETCH)


def _listed(folder: Path) -> dict[str, set[str]] | None:
    """The names that the index lists for each shard; None for a checkpoint of a single file."""
    index = folder / INDEX_NAME
    if not index.is_file():
        if (folder / SINGLE_NAME).is_file():
            return None
        message = f"the folder holds neither {INDEX_NAME} nor {SINGLE_NAME}"
        if not folder.is_dir():
            message = "the checkpoint folder does not exist"
        help = "give a folder in the Hugging Face layout, such as the one `--fetch` prints"
        raise error("E401", message, where=str(folder), help=help)
    if index.stat().st_size > MAX_HEADER_BYTES:
        message = f"the index is over the limit of {MAX_HEADER_BYTES} bytes"
        raise error("E403", message, where=str(index), help=_REFETCH)
    mapped: object = _parse_object(index, index.read_bytes()).get("weight_map")
    if not isinstance(mapped, dict) or not all(isinstance(file, str) for file in mapped.values()):
        message = "`weight_map` must give a file name for every tensor"
        raise error("E403", message, where=str(index), help=_REFETCH)
    # A name with a folder in it could lead out of the checkpoint.
    strays = sorted({file for file in mapped.values() if not _plain_name(file)})
    if strays:
        message = f"shard names must be plain file names: {', '.join(strays[:5])}"
        raise error("E403", message, where=str(index), help=_REFETCH)
    listed: dict[str, set[str]] = {}
    for name, file in mapped.items():
        listed.setdefault(file, set()).add(name)
    return listed


def _plain_name(file: str) -> bool:
    return file.endswith(".safetensors") and not set(file) & {"/", "\\", "\0"}


def _missing_shard(folder: Path, file: str, count: int) -> Diagnostic:
    message = f"shard {file} does not exist; the index lists {count} tensors in it"
    return Diagnostic("E403", message, where=str(folder / INDEX_NAME), help=_REFETCH)


def _disagreements(
    folder: Path, file: str, listed: set[str], stored: Mapping[str, TensorEntry]
) -> Iterator[Diagnostic]:
    """Tensors that only one of index and shard knows, one line per shard and direction."""
    where = str(folder / INDEX_NAME)
    for names, message in (
        (listed - stored.keys(), f"listed in {file}, which does not hold them"),
        (stored.keys() - listed, f"held by {file}, but not listed there"),
    ):
        if names:
            some = ", ".join(f"`{name}`" for name in sorted(names)[:5])
            more = f" and {len(names) - 5} more" if len(names) > 5 else ""
            yield Diagnostic("E403", f"{message}: {some}{more}", where=where, help=_REFETCH)


def _duplicate(path: Path, name: str, first: str) -> Diagnostic:
    message = f"tensor `{name}` is stored twice: also as {first}"
    help = "keep one; a leading `model.` does not make another name"
    return Diagnostic("E403", message, where=str(path), help=help)
