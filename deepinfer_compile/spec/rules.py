"""What a spec may not say although its schema can. Every broken rule is reported, with its place.

The model (model_v41.md sections 2 and 10.1), checked in `rules_layers.py` and `rules_shapes.py`:

    E120  one compression ratio per backbone layer and per draft layer
    E121  a backbone ratio is 0, 1 or 2
    E122  a draft layer's ratio is 0
    E123  layer lists ascend, name a layer once, and stay inside the backbone
    E124  kv sources are index-key sources, index-key sources are index sources
    E125  a window-only layer (ratio 0) is never a source
    E126  a compressed layer has a KV source of its own ratio at or before it
    E127  the candidate source is an index source, and its followers have its ratio
    E128  the first layer of ratio 1 is the KV, index and candidate source
    E129  candidate blocks: count a multiple of 8, size 8 or 16, together at least index_topk
    E130  Engram layers stand before the first layer of ratio 1
    E131  one Engram table per Engram layer, with a row for every hash; at most 1024 hashes
    E132  Engram's compressed vocabulary fits the vocabulary
    E133  draft layers tap layers at or after the first layer of ratio 1
    E134  widths that hold 32x32 and 1x32 quantisation groups are multiples of 32
    E135  the rotated dimensions are even and fit both head sizes
    E136  heads divide evenly into output groups
    E137  expert counts are multiples of 4, and at least the experts per token
    E138  token ids are inside the vocabulary
    E139  rope bases and YaRN's betas give a ramp
    E140  the image tower's heads divide its width; its routing bias is in the checkpoint

The checkpoint and the engine, checked here:

    E145  exactly one of repo, path, synthetic
    E146  a revision belongs to a repo, and a repo needs one
    E150  pages hold whole compressed entries and whole candidate blocks
    E151  max_context is at most the model's
    E152  max_rows holds a row for every request and each of its drafts
    E153  the cache holds a request of max_context, and no more than all of them

Settings the language has and the compiler has not (each line goes when its feature comes):

    E160  draft_len             E165  engram placement
    E161  verify                E166  expert placement
    E163  bounded_replay        E167  parallel
    E164  numerics
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from deepinfer_compile.spec.rules_layers import LAYER_RULES
from deepinfer_compile.spec.rules_shapes import SHAPE_RULES
from deepinfer_compile.spec.schema import Checkpoint, EngineSettings, Model
from deepinfer_compile.spec.tree import Places, Problem


def check(
    model: Model | None,
    checkpoint: Checkpoint | None,
    engine: EngineSettings | None,
    places: Places,
) -> list[Problem]:
    """Every broken rule among the sections that are there; `places` tells how keys are spelled."""
    problems: list[Problem] = []
    if model is not None:
        for rule in (*LAYER_RULES, *SHAPE_RULES):
            problems += rule(model)
    if checkpoint is not None:
        problems += _checkpoint(checkpoint)
    if model is not None and engine is not None:
        problems += _pages(model, engine)
        problems += _limits(model, engine)
    if engine is not None:
        problems += _not_implemented(engine, places)
    return problems


def _checkpoint(checkpoint: Checkpoint) -> Iterator[Problem]:
    kinds = ("repo", "path", "synthetic")
    given = [kind for kind in kinds if getattr(checkpoint, kind) is not None]
    if len(given) != 1:
        yield Problem(
            "E145",
            "checkpoint",
            f"`checkpoint` must have exactly one of {', '.join(kinds)}; "
            f"found {' and '.join(given) or 'none'}",
            help="a hub repository with its revision, a folder, or a seed for random weights",
        )
    if checkpoint.repo is not None and checkpoint.revision is None:
        yield Problem(
            "E146",
            "checkpoint.repo",
            "`checkpoint.repo` needs a `revision`",
            help="name the commit, so that the same spec always means the same weights",
        )
    if checkpoint.revision is not None and checkpoint.repo is None:
        yield Problem(
            "E146", "checkpoint.revision", "`checkpoint.revision` has no `repo` to belong to"
        )


def _pages(model: Model, engine: EngineSettings) -> Iterator[Problem]:
    page, block = engine.page_size, model.indexer.candidate_block_size
    ratios = set(model.compression.ratios) & {1, 2}
    unit = math.lcm(*(ratio * block for ratio in ratios))
    if page % unit:
        yield Problem(
            "E150",
            "engine.page_size",
            f"`engine.page_size` is {page}, but must be a multiple of {unit}",
            notes=(
                f"a candidate block of {block} entries, each {max(ratios)} tokens, "
                "must not straddle two pages",
            ),
            help=f"set page_size: {-(-page // unit) * unit}",
        )


def _limits(model: Model, engine: EngineSettings) -> Iterator[Problem]:
    if engine.max_context > model.max_position_embeddings:
        yield Problem(
            "E151",
            "engine.max_context",
            f"`engine.max_context` is {engine.max_context}, but the model's positions end at "
            f"{model.max_position_embeddings}",
        )
    least = engine.max_requests * (1 + engine.draft_len)
    if engine.max_rows < least:
        yield Problem(
            "E152",
            "engine.max_rows",
            f"`engine.max_rows` is {engine.max_rows}, but {engine.max_requests} requests need "
            f"{least}: one row each and one for each of {engine.draft_len} drafts",
            help=f"set max_rows: {least}, or fewer max_requests",
        )
    held, all_requests = engine.cache_tokens, engine.max_requests * engine.max_context
    if held is not None and not engine.max_context <= held <= all_requests:
        yield Problem(
            "E153",
            "engine.cache_tokens",
            f"`engine.cache_tokens` is {held}, but one request may have {engine.max_context} "
            f"tokens and all of them have {all_requests}",
            help=f"choose from {engine.max_context} to {all_requests}, or leave it out",
        )


def _not_implemented(engine: EngineSettings, places: Places) -> Iterator[Problem]:
    """Settings whose only implementation so far is `have`; the rest is refused, never ignored."""
    parallel = engine.parallel
    for code, key, value, have in (
        ("E160", "draft_len", engine.draft_len, (0,)),
        ("E161", "verify", engine.verify, ("fixed",)),
        ("E163", "bounded_replay", engine.bounded_replay, (False,)),
        ("E164", "numerics", engine.numerics, ("vendor", "f32")),
        ("E165", "engram", engine.engram, ("device",)),
        ("E166", "experts", engine.experts, ("device",)),
        ("E167", "parallel.dp", parallel.dp, (1,)),
        ("E167", "parallel.cp", parallel.cp, (1,)),
        ("E167", "parallel.ep", parallel.ep, (1,)),
        ("E167", "parallel.redundant", parallel.redundant, (0,)),
    ):
        if value in have:
            continue
        source = places.source(f"engine.{key}")
        help = f"set {key}: {' or '.join(_word(one) for one in have)}"
        if source is not None:  # a line in the file would not win against it
            variable = source.partition("environment ")[2]
            help = f"--set engine.{key}={_word(have[0])}"
            help += f", or unset {variable}" if variable else ""
        yield Problem(
            code,
            f"engine.{key}",
            f"`engine.{key}: {_word(value)}` is not implemented yet",
            help=help,
        )


def _word(value: object) -> str:
    """A setting as YAML writes it."""
    return str(value).lower() if isinstance(value, bool) else str(value)
