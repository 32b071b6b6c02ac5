"""A Hugging Face checkpoint folder -> `ModelSpec`, by the same schema and rules as a YAML spec.

    config.json                          spec
    text_config.compress_ratios          model.compression.ratios
    text_config.rope_scaling.factor      model.rope.yarn.factor
    vision_config.*, image_token_id      model.vision.*
    quantization_config.*                model.quantization.*

Spans point into config.json and messages use its names. Nothing is skipped unseen: a key is
translated, required to have its one meaning here, listed as irrelevant, or refused.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from deepinfer_compile.diagnostics import error
from deepinfer_compile.spec.load import ModelSpec, assemble
from deepinfer_compile.spec.tree import (
    Places,
    Problem,
    Tree,
    Value,
    enclosing,
    parse_tree,
    read_text,
    shown,
)
from deepinfer_compile.spec.validate import describe, schema_paths, section_at, unknown_name

_ARCHITECTURE = "DeepseekV41ForCausalLM"

# Schema paths whose config name is not simply their last part, in `text_config`.
_RENAMED = {
    "model.compression.ratios": "text_config.compress_ratios",
    "model.rope.theta": "text_config.rope_theta",
    "model.rope.compress_theta": "text_config.compress_rope_theta",
    "model.vision.image_token_id": "image_token_id",
    "model.bos_token_id": "bos_token_id",
    "model.eos_token_id": "eos_token_id",
    "model.pad_token_id": "pad_token_id",
}
_SECTIONS = {
    "model.rope.yarn.": "text_config.rope_scaling.",
    "model.vision.": "vision_config.",
    "model.quantization.": "quantization_config.",
}

# Keys with one meaning that the compiler implements.
_FIXED: Mapping[str, Value] = {
    "model_type": "deepseek_v41",
    "dtype": "bfloat16",
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
    "tokenizer_compatibility": "release",
    "text_config.model_type": "deepseek_v41_text",
    "text_config.dtype": "bfloat16",
    "text_config.torch_dtype": "bfloat16",
    "text_config.rope_scaling.type": "yarn",
    "text_config.rope_scaling.rope_type": "yarn",
    "text_config.gate_temp": 1.0,
    "text_config.hc_shifted": True,
    "text_config.hc_pre_from_prev_sublayer": True,
    "text_config.q_head_norm": False,
    "text_config.dspark_target_attn_input": True,
    "text_config.use_fp4_sparse_kv": True,
    "text_config.yoco_swa_share_hidden": False,
    "quantization_config.fmt": "e4m3",
}
# Keys that say nothing about inference.
_IRRELEVANT = (
    "transformers_version",
    "auto_map",
    "use_cache",
    "_name_or_path",
    "text_config.use_cache",
    "text_config.transformers_version",
    "vision_config.model_type",
    "vision_config.dtype",
)
_SECTION_NAMES = (
    "architectures",
    "text_config",
    "text_config.rope_scaling",
    "vision_config",
    "quantization_config",
)

# What a model without Engram, or without draft layers, leaves unsaid. No kernel reads these.
_NO_ENGRAM: Mapping[str, Value] = {
    "engram_layer_ids": [],
    "engram_num_embeddings": [],
    "engram_max_ngram_size": 2,
    "engram_vocab_size": 1,
    "engram_n_heads": 1,
    "engram_head_dim": 32,
    "engram_pad_token_id": 0,
    "engram_compressed_vocab_size": 1,
}
_NO_DRAFTS: Mapping[str, Value] = {
    "num_nextn_predict_layers": 0,
    "dspark_block_size": 1,
    "dspark_noise_token_id": 0,
    "dspark_target_layer_ids": [],
    "dspark_markov_rank": 1,
    "dspark_n_routed_experts": 4,
    "dspark_num_experts_per_tok": 1,
}


def from_hf(
    folder: str | os.PathLike[str],
    *,
    overrides: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> ModelSpec:
    """The spec of the checkpoint in `folder`; `--set` and the environment apply as to a file."""
    place = Path(folder)
    if not place.is_dir():
        help = "name the folder that holds the checkpoint's config.json"
        raise error("E101", f"no such folder: {place}", where="--from-hf", help=help)
    file = f"{shown(place)}/config.json"
    config = parse_tree(read_text(place / "config.json", file), file)
    _check_architecture(config)
    tree = _translate(config, os.fspath(folder))
    return assemble(tree, overrides=overrides, environment=environment, pinned=("checkpoint.path",))


def _check_architecture(config: Tree) -> None:
    found = config.values.get("architectures")
    if found == [_ARCHITECTURE]:
        return
    names = ", ".join(f"`{name}`" for name in found) if isinstance(found, list) else describe(found)
    span = config.places.span("architectures")
    help = f"config.json must say `{_ARCHITECTURE}`"
    raise error("E112", f"unknown architecture {names or 'nothing'}", span=span, help=help)


def _fields(config: Tree) -> dict[str, str]:
    """Schema path -> config path, for every number that a config may hold."""
    fields: dict[str, str] = {}
    for key in schema_paths():
        if key.startswith("model.") and key != "model.architecture" and section_at(key) is None:
            fields[key] = _config_path(key)
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        inner = f"text_config.{name}"
        if inner in config.places.spans and name not in config.places.spans:
            fields[f"model.{name}"] = inner
    return fields


def _config_path(key: str) -> str:
    if key in _RENAMED:
        return _RENAMED[key]
    for section, theirs in _SECTIONS.items():
        if key.startswith(section):
            return theirs + key.removeprefix(section)
    return "text_config." + key.rpartition(".")[2]


def _translate(config: Tree, folder: str) -> Tree:
    """The config as the tree of a spec file, with the spans and names of the config."""
    fields = _fields(config)
    has_vision = config.values.get("vision_config") is not None
    model: dict[str, Value] = {
        "architecture": "deepseek_v41",
        # Text-only checkpoints carry no second router bias, unless the config says so: the
        # checkpoints written here name this and `compressed_vocabulary` where they depart.
        "image_routing_bias": has_vision,
    }
    for key, path in fields.items():
        if not has_vision and key.startswith("model.vision."):
            continue
        section = _section(model, key)
        if _present(config, path):
            section[key.rpartition(".")[2]] = _get(config, path)
    _fill_absent(model)
    values: dict[str, Value] = {
        "model": model,
        "checkpoint": {"path": folder},
        "engine": _engine(model),
    }
    problems = (*config.problems, *_unknown(config, fields), *_contradictions(config))
    return Tree(values, _places(config, fields), problems)


def _section(model: dict[str, Value], key: str) -> dict[str, Value]:
    """The mapping that holds `key`, made on the way down."""
    at = model
    for name in key.split(".")[1:-1]:
        inner = at.setdefault(name, {})
        assert isinstance(inner, dict)
        at = inner
    return at


def _present(config: Tree, path: str) -> bool:
    return path in config.places.spans


def _get(config: Tree, path: str) -> Value:
    value: Value = config.values
    for name in path.split("."):
        assert isinstance(value, dict), "a span inside a value that is no mapping"
        value = value[name]
    return value


def _fill_absent(model: dict[str, Value]) -> None:
    engram, dspark = model["engram"], model["dspark"]
    assert isinstance(engram, dict)
    assert isinstance(dspark, dict)
    if not engram or engram.get("engram_layer_ids") == []:
        model["engram"] = {**_NO_ENGRAM, **engram}
    if not dspark or dspark.get("num_nextn_predict_layers") == 0:
        model["dspark"] = {**_NO_DRAFTS, **dspark}


def _engine(model: Mapping[str, Value]) -> dict[str, Value]:
    """Limits that fit any machine; `--set` makes them larger."""
    limit = model.get("max_position_embeddings")
    indexer = model.get("indexer")
    block = indexer.get("candidate_block_size") if isinstance(indexer, dict) else None
    # Every ratio divides 2, so pages of whole pairs of blocks suit all layers.
    unit = 2 * block if isinstance(block, int) and 0 < block <= 1024 else 1
    return {
        "max_requests": 8,
        "max_rows": 64,
        "max_context": min(limit, 4096) if isinstance(limit, int) and limit > 0 else 4096,
        "page_size": math.lcm(64, unit),
        "prefill_chunk": 128,
    }


def _places(config: Tree, fields: Mapping[str, str]) -> Places:
    spans = dict(config.places.spans)
    back = {path: key for key, path in fields.items()}
    for path, span in config.places.spans.items():
        home = next((part for part in enclosing(path) if part in back), None)
        if home is not None:
            spans[back[home] + path.removeprefix(home)] = span
    for key, path in fields.items():
        # A missing number is shown at the section of the config that should have held it.
        parent = config.places.span(path.rpartition(".")[0])
        spans.setdefault(key.rpartition(".")[0], parent)
        spans.setdefault(key, parent)
    sources = {"engine": "default of --from-hf", "checkpoint": "--from-hf"}
    return replace(config.places, spans=spans, names=dict(fields), sources=sources)


def _unknown(config: Tree, fields: Mapping[str, str]) -> Iterator[Problem]:
    known = {*fields.values(), *_FIXED, *_IRRELEVANT, *_SECTION_NAMES}
    known |= {f"text_config.{name}" for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    for path in config.places.spans:
        parent = path.rpartition(".")[0]
        if not path or "[" in path or "#" in path or path in known:
            continue
        if parent and parent not in _SECTION_NAMES:
            continue  # inside a key already refused
        siblings = [name for name in known if name.rpartition(".")[0] == parent]
        yield unknown_name(path, sorted(n.rpartition(".")[2] for n in siblings), config.places)


def _contradictions(config: Tree) -> Iterator[Problem]:
    for path in _SECTION_NAMES[1:]:
        value = _get(config, path) if _present(config, path) else None
        if value is not None and not isinstance(value, dict):
            message = f"`{path}` must be a mapping, found {describe(value)}"
            yield Problem("E105", path, message)
    for path, wanted in _FIXED.items():
        if _present(config, path) and _get(config, path) != wanted:
            found = describe(_get(config, path))
            want = wanted if isinstance(wanted, str) else describe(wanted).strip("`")
            yield Problem("E106", path, f"`{path}` must be `{want}`, found {found}")
