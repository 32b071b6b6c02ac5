"""Rules about which layer does what: ratios, sources, candidates, Engram layers, draft taps.

Each rule yields its own problems and stays quiet where another rule already speaks, so that one
mistake is not told five times. `rules.py` has the table of codes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from deepinfer_compile.spec.layers import nearest_source
from deepinfer_compile.spec.schema import Model
from deepinfer_compile.spec.tree import Problem

KV = "model.compression.kv_source_layer_ids"
INDEX_K = "model.compression.index_k_source_layer_ids"
INDEX = "model.compression.index_source_layer_ids"
CANDIDATE = "model.indexer.candidate_source_layer_id"
ENGRAM = "model.engram.engram_layer_ids"
TAPS = "model.dspark.dspark_target_layer_ids"
RATIOS = "model.compression.ratios"


def _backbone(model: Model) -> tuple[int, ...]:
    """The ratios of backbone layers, as far as they are given."""
    return model.compression.ratios[: model.num_hidden_layers]


def _ratio(model: Model, layer: int) -> int | None:
    """The layer's ratio; None where the list does not reach."""
    ratios = _backbone(model)
    return ratios[layer] if layer < len(ratios) else None


def first_uncompressing(model: Model) -> int | None:
    """The first layer of ratio 1, where prefill may stop for far tokens; None without one."""
    return next((layer for layer, ratio in enumerate(_backbone(model)) if ratio == 1), None)


def _ratios(model: Model) -> Iterator[Problem]:
    ratios, layers = model.compression.ratios, model.num_hidden_layers
    drafts = model.dspark.num_nextn_predict_layers
    if len(ratios) != layers + drafts:
        message = f"{len(ratios)} compression ratios for {layers} layers and {drafts} draft layers"
        yield Problem("E120", RATIOS, message, help=f"list {layers + drafts} ratios, drafts last")
    for layer, ratio in enumerate(_backbone(model)):
        if ratio not in (0, 1, 2):
            message = f"layer {layer} has compression ratio {ratio}, but kernels know 0, 1 and 2"
            yield Problem("E121", f"{RATIOS}[{layer}]", message)
    for draft, ratio in enumerate(ratios[layers:]):
        if ratio != 0:
            message = f"draft layer {draft} has compression ratio {ratio}, but drafts only window"
            yield Problem("E122", f"{RATIOS}[{layers + draft}]", message, help="write 0")


def _lists(model: Model) -> Iterator[Problem]:
    compression = model.compression
    for key, layers in (
        (KV, compression.kv_source_layer_ids),
        (INDEX_K, compression.index_k_source_layer_ids or ()),
        (INDEX, compression.index_source_layer_ids),
        (CANDIDATE, (model.indexer.candidate_source_layer_id,)),
        (ENGRAM, model.engram.engram_layer_ids),
        (TAPS, model.dspark.dspark_target_layer_ids),
    ):
        yield from _list(key, layers, model.num_hidden_layers)


def _list(key: str, layers: Sequence[int], end: int) -> Iterator[Problem]:
    leaf = key.rpartition(".")[2]
    for at, layer in enumerate(layers):
        place = key if key == CANDIDATE else f"{key}[{at}]"
        if layer >= end:
            message = f"`{leaf}` names layer {layer}, but the backbone has layers 0 to {end - 1}"
            yield Problem("E123", place, message)
        elif at and layer <= layers[at - 1]:
            message = f"`{leaf}` must ascend, but {layer} follows {layers[at - 1]}"
            yield Problem("E123", place, message)


def _subsets(model: Model) -> Iterator[Problem]:
    compression = model.compression
    index = compression.index_source_layer_ids
    kv = compression.kv_source_layer_ids
    keys = compression.index_k_source_layer_ids
    chain = [(KV, kv, INDEX, index)] if keys is None else []
    if keys is not None:
        chain = [(KV, kv, INDEX_K, keys), (INDEX_K, keys, INDEX, index)]
    for small_key, small, large_key, large in chain:
        leaf = large_key.rpartition(".")[2]
        for at, layer in enumerate(small):
            if layer not in large:
                message = f"layer {layer} is a source here, so it must be in `{leaf}` too"
                note = "a layer that stores entries must also key and select them"
                yield Problem("E124", f"{small_key}[{at}]", message, notes=(note,))


def _sources(model: Model) -> Iterator[Problem]:
    compression = model.compression
    for key, layers in (
        (KV, compression.kv_source_layer_ids),
        (INDEX_K, compression.index_k_source_layer_ids or ()),
        (INDEX, compression.index_source_layer_ids),
    ):
        for at, layer in enumerate(layers):
            if _ratio(model, layer) == 0:
                message = f"layer {layer} has ratio 0 (window only), so it cannot be a source"
                yield Problem("E125", f"{key}[{at}]", message)


def _consumers(model: Model) -> Iterator[Problem]:
    """Index sources need no check of their own: E124 and E125 put them inside these segments."""
    sources = model.compression.kv_source_layer_ids
    for layer, ratio in enumerate(_backbone(model)):
        if ratio not in (1, 2):
            continue
        source = nearest_source(sources, layer)
        if source is None:
            message = f"layer {layer} is compressed (ratio {ratio}), but no KV source precedes it"
        elif _ratio(model, source) != ratio:
            message = (
                f"layer {layer} has ratio {ratio}, but its KV source, layer {source}, "
                f"has ratio {_ratio(model, source)}"
            )
        else:
            continue
        help = f"make layer {layer} a KV and index source, or change its ratio"
        yield Problem("E126", f"{RATIOS}[{layer}]", message, help=help)
        return  # later layers of the segment repeat the same mistake


def _candidates(model: Model) -> Iterator[Problem]:
    indexer, index = model.indexer, model.compression.index_source_layer_ids
    source = indexer.candidate_source_layer_id
    if not index:
        return  # no selection, so no candidates
    if source not in index:
        message = f"the candidate source, layer {source}, is not an index source"
        yield Problem("E127", CANDIDATE, message, notes=(f"index sources: {_row(index)}",))
    for at, layer in enumerate(index):
        theirs, ours = _ratio(model, layer), _ratio(model, source)
        if layer > source and theirs in (1, 2) and ours in (1, 2) and theirs != ours:
            message = (
                f"layer {layer} (ratio {theirs}) would select among candidates of "
                f"layer {source} (ratio {ours})"
            )
            yield Problem("E127", f"{INDEX}[{at}]", message)


def _decoder_start(model: Model) -> Iterator[Problem]:
    start = first_uncompressing(model)
    if start is None:
        return
    compression = model.compression
    roles = (
        ("KV source", KV, start in compression.kv_source_layer_ids),
        ("index source", INDEX, start in compression.index_source_layer_ids),
        ("candidate source", CANDIDATE, start == model.indexer.candidate_source_layer_id),
    )
    for role, key, holds in roles:
        if not holds:
            message = f"layer {start} is the first of ratio 1, so it must be the {role}"
            message = message if key == CANDIDATE else message.replace("the KV", "a KV")
            yield Problem("E128", key, message.replace("be the index", "be an index"))


def _candidate_sizes(model: Model) -> Iterator[Problem]:
    indexer = model.indexer
    blocks, size, topk = (
        indexer.candidate_topk_blocks,
        indexer.candidate_block_size,
        indexer.index_topk,
    )
    if blocks % 8:
        message = f"`candidate_topk_blocks` is {blocks}, but must be a multiple of 8"
        yield Problem("E129", "model.indexer.candidate_topk_blocks", message)
    if size not in (8, 16):
        message = f"`candidate_block_size` is {size}, but must be 8 or 16"
        yield Problem("E129", "model.indexer.candidate_block_size", message)
    if blocks * size < topk:
        message = f"{blocks} candidate blocks of {size} hold fewer entries than index_topk, {topk}"
        yield Problem("E129", "model.indexer.index_topk", message)


def _engram_layers(model: Model) -> Iterator[Problem]:
    start = first_uncompressing(model)
    for at, layer in enumerate(model.engram.engram_layer_ids):
        if start is not None and start <= layer < model.num_hidden_layers:
            message = f"Engram layer {layer} is not before layer {start}, the first of ratio 1"
            yield Problem("E130", f"{ENGRAM}[{at}]", message)


def _taps(model: Model) -> Iterator[Problem]:
    drafts, taps = model.dspark.num_nextn_predict_layers, model.dspark.dspark_target_layer_ids
    if not drafts:
        return
    if not taps:
        yield Problem("E133", TAPS, f"{drafts} draft layers need at least one layer to tap")
    start = first_uncompressing(model)
    for at, layer in enumerate(taps):
        if start is not None and layer < start:
            message = f"draft layers tap layer {layer}, before layer {start}, the first of ratio 1"
            note = "far prompt tokens may stop there, so earlier taps would miss the last ones"
            yield Problem("E133", f"{TAPS}[{at}]", message, notes=(note,))


def _row(layers: Sequence[int]) -> str:
    return ", ".join(str(layer) for layer in layers)


LAYER_RULES: tuple[Callable[[Model], Iterator[Problem]], ...] = (
    _ratios,
    _lists,
    _subsets,
    _sources,
    _consumers,
    _candidates,
    _decoder_start,
    _candidate_sizes,
    _engram_layers,
    _taps,
)
