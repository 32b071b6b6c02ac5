"""Find an engine's weights and give every weight buffer an address.

    plan.weights (patterns) + checkpoint, packed file or cache -> buffer index -> bytes

Order: the caller's folder, DEEPINFER_HF_MODEL_DIR, the engine's packed file, the Hugging Face
cache at the manifest's revision. Single tensors stay where they are, mapped; experts, which lie one
after another in a buffer but apart in a checkpoint, are copied once. Everything wrong with a
checkpoint is reported together, before a byte of it is read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from deepinfer_compile.format.manifest import CONSTANTS, PACKED_WEIGHTS, CheckpointOrigin, Manifest
from deepinfer_compile.format.plan import EnginePlan, WeightRecipe
from deepinfer_compile.format.recipes import names_of, tensor_table_sha256
from deepinfer_compile.runtime.errors import EngineError
from deepinfer_compile.runtime.files import EngineFiles
from deepinfer_compile.runtime.memory import Bytes, aligned_bytes
from deepinfer_compile.runtime.settings import Settings
from deepinfer_compile.runtime.shards import ITEM_BYTES, TensorView, read_folder, read_tensors

_SHOWN = 20  # problems in one message; more are counted


@dataclass(frozen=True)
class WeightSource:
    """Where weights come from. `packed`: one file whose tensors are the plan's buffers."""

    place: Path
    packed: bool
    reason: str


@dataclass(frozen=True)
class Weights:
    """`by_buffer` keeps every mapping and copy alive; bytes of the two kinds for the report."""

    source: WeightSource
    by_buffer: Mapping[int, Bytes]
    mapped: int
    copied: int


def find_weights(
    folder: Path, manifest: Manifest, checkpoint: Path | None, settings: Settings
) -> WeightSource:
    """The first source that is there; a folder somebody named is used or refused, never skipped.

    Packed weights of no published model (made from a seed) go before the folder in the environment:
    it can only be another model's.
    """
    if checkpoint is not None:
        return WeightSource(checkpoint, False, "--checkpoint")
    origin = manifest.checkpoint
    if settings.model_dir is not None and not (origin.packed and not origin.repo):
        return WeightSource(settings.model_dir, False, "DEEPINFER_HF_MODEL_DIR")
    if origin.packed:
        return WeightSource(folder / PACKED_WEIGHTS, True, "packed in the engine")
    cached = _cached(origin, settings.hub_cache)
    if cached is not None:
        return WeightSource(cached, False, "the Hugging Face cache")
    raise EngineError(
        "E460",
        "no weights found",
        where=str(folder),
        notes=[
            "the engine holds none, and neither --checkpoint nor DEEPINFER_HF_MODEL_DIR is given",
            *([f"{origin.repo}@{origin.revision} is not in the cache"] if origin.revision else []),
        ],
        help=_fetch(origin),
    )


def _cached(origin: CheckpointOrigin, cache: Path | None) -> Path | None:
    if cache is None or not origin.revision or origin.repo.count("/") != 1:
        return None
    folder = cache / f"models--{origin.repo.replace('/', '--')}" / "snapshots" / origin.revision
    return folder if folder.is_dir() else None


def _fetch(origin: CheckpointOrigin) -> str:
    if origin.revision and origin.repo.count("/") == 1:
        return f"fetch them: hf download {origin.repo} --revision {origin.revision}"
    return "name the checkpoint folder the engine was compiled from: --checkpoint DIR"


def load_weights(
    files: EngineFiles, plan: EnginePlan, source: WeightSource, headers: str
) -> Weights:
    """Every weight buffer's bytes; `headers` is the manifest's hash of the tensor table."""
    constants = [r for r in plan.weights if r.pattern.startswith("@")]
    learned = [r for r in plan.weights if not r.pattern.startswith("@")]
    arrays = _constants(files, constants)
    if source.packed:
        arrays |= _packed(files, plan, learned)
        copied = 0
    else:
        stored = read_folder(source.place, source.reason)
        _check_tensors(source, learned, stored, headers)
        loaded = {
            index: _gather(parts) for recipe in learned for index, parts in _parts(recipe, stored)
        }
        copied = sum(a.nbytes for a in loaded.values() if a.flags.writeable)
        arrays |= loaded
    for index, array in arrays.items():
        buffer = plan.buffers[index]
        if array.nbytes != buffer.bytes:
            message = f"`{buffer.name}` has {array.nbytes} bytes, the plan says {buffer.bytes}"
            raise EngineError("E455", message, where=str(source.place))
    return Weights(source, arrays, sum(a.nbytes for a in arrays.values()) - copied, copied)


def _parts(
    recipe: WeightRecipe, stored: Mapping[str, TensorView]
) -> Iterator[tuple[int, list[TensorView]]]:
    for buffer, names in names_of(recipe):
        yield buffer, [stored[name] for name in names]


def _gather(parts: list[TensorView]) -> Bytes:
    """One tensor as it lies in its file; several, or a misaligned one, copied."""
    if len(parts) == 1:
        data = parts[0].data
        if data.__array_interface__["data"][0] % ITEM_BYTES[parts[0].dtype] == 0:
            return data
    whole = aligned_bytes(sum(part.data.nbytes for part in parts))
    end = 0
    for part in parts:
        begin, end = end, end + part.data.nbytes
        whole[begin:end] = part.data
    return whole


def _check_tensors(
    source: WeightSource,
    recipes: list[WeightRecipe],
    stored: Mapping[str, TensorView],
    headers: str,
) -> None:
    problems: list[str] = []
    for recipe in recipes:
        wanted = f"{recipe.dtype} {list(recipe.shape)}"
        for _, names in names_of(recipe):
            for name in names:
                view = stored.get(name)
                if view is None:
                    problems.append(f"`{name}` is missing ({wanted} expected)")
                elif str(view) != wanted:
                    problems.append(f"`{name}` is {view}, the engine was compiled for {wanted}")
    where = f"{source.place} ({source.reason})"
    if problems:
        rest = len(problems) - _SHOWN
        notes = problems[:_SHOWN] + ([f"and {rest} more"] if rest > 0 else [])
        raise EngineError(
            "E461",
            f"the checkpoint is not the one this engine was compiled for: {len(problems)} problems",
            where=where,
            notes=notes,
            help="point to that checkpoint, or compile an engine for this one",
        )
    if headers and headers != tensor_table_sha256(recipes):
        raise EngineError(
            "E455",
            "plan.json and manifest.json name different checkpoint tensors",
            where=where,
            help="recompile the engine",
        )


def _constants(files: EngineFiles, recipes: list[WeightRecipe]) -> dict[int, Bytes]:
    wanted = {
        index: names[0].removeprefix("@") for recipe in recipes for index, names in names_of(recipe)
    }
    return _named(files, CONSTANTS, wanted) if wanted else {}


def _packed(files: EngineFiles, plan: EnginePlan, recipes: list[WeightRecipe]) -> dict[int, Bytes]:
    return _named(
        files, PACKED_WEIGHTS, {i: plan.buffers[i].name for r in recipes for i in r.buffers}
    )


def _named(files: EngineFiles, name: str, wanted: Mapping[int, str]) -> dict[int, Bytes]:
    """Tensors of one of the engine's own files."""
    stored = read_tensors(files.path / name, files.map(name))
    missing = [f"`{tensor}` is missing" for tensor in wanted.values() if tensor not in stored]
    if missing:
        message, where = "the engine's weight file lacks tensors of the plan", files.path / name
        raise EngineError("E455", message, where=str(where), notes=missing[:_SHOWN])
    return {index: _gather([stored[tensor]]) for index, tensor in wanted.items()}
