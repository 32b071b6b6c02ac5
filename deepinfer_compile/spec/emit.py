"""`ModelSpec` -> YAML with every setting spelled out: what `--emit-spec` writes.

Reading the text back gives an equal spec. Keys stand in the schema's order; optional numbers that
the model does not have are left out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from enum import Enum

from deepinfer_compile.spec.load import ModelSpec
from deepinfer_compile.spec.schema import Section
from deepinfer_compile.spec.tree import parse_value

_COMMENTS = {
    "model.image_routing_bias": "a second router bias for image tokens",
    "model.attention": "one head_dim vector per token is key and value of every head",
    "model.attention.sliding_window": "tokens that every layer sees",
    "model.rope": "theta: window-only layers; compress_theta with yarn: compressed layers",
    "model.compression": "layer lists; a layer reads the nearest source at or before it",
    "model.compression.ratios": "tokens per entry: 0 none, 2 pairs, 1 each; drafts last",
    "model.compression.kv_source_layer_ids": "store compressed entries",
    "model.compression.index_k_source_layer_ids": "store index keys",
    "model.compression.index_source_layer_ids": "select entries",
    "model.indexer": "top-k selection of entries",
    "model.indexer.candidate_source_layer_id": "confines later index sources to its best blocks",
    "model.hyper_connections": "residual streams and how they mix",
    "model.moe": "routed experts and one shared expert",
    "model.engram": "tables of hashed n-grams",
    "model.engram.compressed_vocabulary": "tokenizer: from tokenizer.json; identity: token = id",
    "model.dspark": "draft layers after the backbone",
    "model.dspark.dspark_target_layer_ids": "layers whose streams feed the drafts",
    "model.vision": "the image tower, not compiled yet",
    "model.quantization": "the published checkpoint format",
    "checkpoint": "one of repo with revision, path, synthetic: seed",
    "engine": "what the engine must hold",
    "engine.max_requests": "running at once",
    "engine.max_rows": "decode rows of one step: requests times (1 + drafts)",
    "engine.max_context": "tokens of one request, prompt and answer",
    "engine.cache_tokens": "tokens of all requests, held in pages; without it, max_context each",
    "engine.prefix_snapshots": "ends of prompts that others can go on from; default two a request",
    "engine.page_size": "tokens per cache page",
    "engine.prefill_chunk": "prompt tokens of one step",
    "engine.draft_len": "draft tokens per request and step",
    "engine.verify": "fixed or confidence",
    "engine.kv_format": "FP8 window, FP4 entries, FP4 index keys",
    "engine.batch_invariant": "same bits whatever else is in the batch",
    "engine.bounded_replay": "prefill skips late layers for far tokens (approximate)",
    "engine.engram": "device or host",
    "engine.experts": "device, host or disk",
    "engine.parallel": "data, context, expert parallel ranks; spare experts",
    "engine.numerics": "f32, vendor or production",
    "engine.probes": "compile tap and inject points, for debugging",
}
_WIDTH = 100


def emit_spec(spec: ModelSpec) -> str:
    """The whole spec as commented YAML."""
    lines = [f"# {spec.model.architecture}, written out by deepinfer-compile --emit-spec."]
    for name, section in (
        ("model", spec.model),
        ("checkpoint", spec.checkpoint),
        ("engine", spec.engine),
    ):
        lines += ["", *_section(name, name, section, depth=0)]
    return "\n".join(lines) + "\n"


def _section(name: str, path: str, section: Section, depth: int) -> Iterator[str]:
    indent = "  " * depth
    yield _with_comment(f"{indent}{name}:", path)
    for field in type(section).model_fields:
        value, inner = getattr(section, field), f"{path}.{field}"
        if value is None:
            continue
        if isinstance(value, Section):
            yield from _section(field, inner, value, depth + 1)
        elif isinstance(value, tuple):
            yield from _list(f"{indent}  {field}:", inner, value)
        else:
            yield _with_comment(f"{indent}  {field}: {_scalar(value)}", inner)


def _list(head: str, path: str, values: tuple[object, ...]) -> Iterator[str]:
    """On one line where it fits, else in rows of ten, so that a layer can be found by counting."""
    words = [_scalar(value) for value in values]
    line = _with_comment(f"{head} [{', '.join(words)}]", path)
    if len(line) <= _WIDTH:
        yield line
        return
    indent = " " * (len(head) - len(head.lstrip()))
    yield _with_comment(f"{head} [", path)
    for at in range(0, len(words), 10):
        yield f"{indent}  {', '.join(words[at : at + 10])},"
    yield f"{indent}]"


def _with_comment(line: str, path: str) -> str:
    comment = _COMMENTS.get(path)
    return f"{line}  # {comment}" if comment else line


def _scalar(value: object) -> str:
    if isinstance(value, Enum):
        return str(value.value)
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    return _text(str(value))


def _text(text: str) -> str:
    """A word stands bare where it reads back as itself; other text is quoted and escaped."""
    if re.fullmatch(r"[A-Za-z][\w./-]*", text, re.ASCII) and parse_value(text) == text:
        return text
    quoted = json.dumps(text, ensure_ascii=False)
    return "".join(c if c.isprintable() else f"\\U{ord(c):08x}" for c in quoted)
