"""Write a complete checkpoint of random weights: `--write-checkpoint DIR --seed N`.

    Model, seed -> config.json, tokenizer.json, tokenizer_config.json, shards and their index

The bytes of a tensor depend on its name, the seed and the model, never on the shard it is in or
on the machine. The folder appears complete or not at all: files are written into a hidden folder
beside it, which is renamed last.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from deepinfer_compile.checkpoint.config import hf_config
from deepinfer_compile.checkpoint.disk import SPARE_BYTES, raise_if_full
from deepinfer_compile.checkpoint.headers import INDEX_NAME
from deepinfer_compile.checkpoint.recipes import Recipe, normal_quantiles, recipe_for, tensor_bytes
from deepinfer_compile.checkpoint.tensors import TensorSpec, expected_tensors, name_pattern
from deepinfer_compile.checkpoint.tokenizer import make_tokenizer, special_tokens
from deepinfer_compile.checkpoint.vocabulary import TOKENIZER_NAME
from deepinfer_compile.diagnostics import error
from deepinfer_compile.spec.schema import Model

SHARD_BYTES = 5_000_000_000

Progress = Callable[[int, int], None]  # bytes written so far, bytes in total


@dataclass(frozen=True)
class _Shard:
    file: str
    tensors: tuple[TensorSpec, ...]


def write_checkpoint(
    model: Model,
    folder: Path,
    *,
    seed: int,
    shard_bytes: int = SHARD_BYTES,
    progress: Progress | None = None,
) -> None:
    """Make `folder`, which must not exist or be empty; nothing is left behind when it fails."""
    tokenizer = make_tokenizer(model)  # may refuse the model, so before anything is written
    shards = _plan_shards(model, shard_bytes)
    total = sum(t.nbytes for shard in shards for t in shard.tensors)
    target = folder.absolute()
    with _disk_errors(folder):
        _check_target(folder, total)
        partial = target.parent / f".{target.name}.{os.getpid()}.partial"
        try:
            partial.mkdir()
            _write_shards(partial, shards, model, seed, total, progress)
            _write_json(partial / "config.json", hf_config(model))
            _write_json(partial / INDEX_NAME, _index(shards, total))
            _write_json(partial / "tokenizer_config.json", _tokenizer_config(model))
            (partial / TOKENIZER_NAME).write_text(tokenizer.to_str(pretty=True), encoding="utf-8")
            partial.rename(target)
        finally:
            shutil.rmtree(partial, ignore_errors=True)


@contextmanager
def _disk_errors(folder: Path) -> Iterator[None]:
    """Turn what the disk answers into an error of ours."""
    try:
        yield
    except OSError as failure:
        if failure.errno in (errno.ENOSPC, errno.EDQUOT):
            raise error(
                "E501",
                "the disk ran full while the checkpoint was written; nothing was kept",
                where=str(folder),
                help="free some space, or choose a folder on another disk",
            ) from failure
        message = f"cannot write the checkpoint: {failure.strerror or failure}"
        help = "choose a folder that can be written"
        raise error("E502", message, where=str(failure.filename or folder), help=help) from failure


def _check_target(folder: Path, total: int) -> None:
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise error(
            "E503",
            "the folder to write is already there and not empty",
            where=str(folder),
            help="remove it first, or choose another name",
        )
    raise_if_full(folder, total + SPARE_BYTES)
    folder.absolute().parent.mkdir(parents=True, exist_ok=True)


def _plan_shards(model: Model, shard_bytes: int) -> tuple[_Shard, ...]:
    """Tensors in order, a weight and its scale together; a shard is full before it is exceeded."""
    runs: list[list[TensorSpec]] = [[]]
    filled = 0
    for pair in _pairs(model):
        size = sum(t.nbytes for t in pair)
        if filled and filled + size > shard_bytes:
            runs.append([])
            filled = 0
        runs[-1] += pair
        filled += size
    return tuple(
        _Shard(
            f"model-{number:05}-of-{len(runs):05}.safetensors",
            # Wide elements first keeps every tensor aligned to its own element size.
            tuple(sorted(run, key=lambda t: -t.dtype.itemsize)),
        )
        for number, run in enumerate(runs, start=1)
    )


def _pairs(model: Model) -> Iterator[list[TensorSpec]]:
    """Runs of tensors that must share a shard; experts come weights first, then scales."""
    by_stem: dict[str, list[TensorSpec]] = {}
    for tensor in expected_tensors(model):
        stem = tensor.name.removesuffix(".weight").removesuffix(".scale")
        by_stem.setdefault(stem, []).append(tensor)
    yield from by_stem.values()


def _write_shards(
    folder: Path,
    shards: tuple[_Shard, ...],
    model: Model,
    seed: int,
    total: int,
    progress: Progress | None,
) -> None:
    normal = normal_quantiles()
    recipes: dict[tuple[str, tuple[int, ...]], Recipe] = {}
    written = 0
    for shard in shards:
        with (folder / shard.file).open("wb") as file:
            file.write(_header(shard.tensors))
            for tensor in shard.tensors:
                alike = name_pattern(tensor.name), tensor.shape
                if alike not in recipes:
                    recipes[alike] = recipe_for(tensor, model, normal)
                for piece in tensor_bytes(tensor, recipes[alike], seed):
                    file.write(piece)
                    written += len(piece)
                    if progress is not None:
                        progress(written, total)
            file.flush()
            os.fsync(file.fileno())  # a rename must not overtake the data


def _header(tensors: tuple[TensorSpec, ...]) -> bytes:
    """Length and JSON of a safetensors header, padded to whole words."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    begin = 0
    for t in tensors:
        end = begin + t.nbytes
        header[t.name] = {"dtype": t.dtype, "shape": t.shape, "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _index(shards: tuple[_Shard, ...], total: int) -> dict[str, object]:
    places = {t.name: shard.file for shard in shards for t in shard.tensors}
    return {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}


def _tokenizer_config(model: Model) -> dict[str, object]:
    names = special_tokens(model)
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": False,
        "add_eos_token": False,
        "bos_token": names[model.bos_token_id],
        "eos_token": names[model.eos_token_id],
        "pad_token": names[model.pad_token_id],
        "clean_up_tokenization_spaces": False,
        "model_max_length": model.max_position_embeddings,
    }


def _write_json(path: Path, value: dict[str, object]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
