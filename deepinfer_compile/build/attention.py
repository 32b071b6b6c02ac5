"""The attention sub-layer: projections, compressor, indexer, sparse attention, output projection.

Sections 3.5 to 3.10. A layer stores its own window; compressed KV, index keys and top-k lists
come from the sources that `LayerFacts` names.
"""

from __future__ import annotations

from dataclasses import dataclass

from deepinfer_compile.build.builder import Builder
from deepinfer_compile.ir import ops
from deepinfer_compile.ir.graph import Value
from deepinfer_compile.ir.types import DType, TensorType
from deepinfer_compile.spec.layers import LayerFacts


@dataclass
class Shared:
    """What later layers read of earlier ones in the same step."""

    selected: dict[int, Value]
    candidates: dict[int, Value]
    angles: dict[tuple[bool, int], Value]
    latents: dict[int, Value]


def attention(b: Builder, facts: LayerFacts, shared: Shared, x: Value) -> Value:
    """The sub-layer's output, activation[R,D]."""
    model, prefix = b.spec.model, f"layers.{facts.index}"
    a = model.attention
    b.locate("model.attention", facts.index)
    low = b.fp8_linear(x, f"{prefix}.attn.wq_a", a.q_lora_rank, name=f"{prefix}.q_low")
    q_rank = b.rmsnorm(low, f"{prefix}.attn.q_norm", name=f"{prefix}.q_rank")
    heads = a.num_attention_heads
    flat = b.fp8_linear(
        q_rank, f"{prefix}.attn.wq_b", heads * a.head_dim, heads=heads, name=f"{prefix}.q_flat"
    )
    angles = _angles(b, facts.ratio > 0, 1, shared)
    b.locate("model.attention", facts.index)
    q = b.one(ops.Rope(), flat, angles, name=f"{prefix}.q")
    kv = _window_record(b, facts, x, angles)
    if facts.owns_kv:
        _compress(b, facts, x, shared)
    if facts.owns_index_k:
        _index_keys(b, facts, shared)
    if facts.selects:
        shared.selected[facts.index] = _select(b, facts, x, q_rank, angles, shared)
    o = _attend(b, facts, q, kv, shared)
    return _project(b, facts, o, angles)


def _angles(b: Builder, compressed: bool, ratio: int, shared: Shared) -> Value:
    """Cosines and sines, one table per kind of layer and per position rule (section 3.5)."""
    key = (compressed, ratio)
    if key not in shared.angles:
        b.locate("model.rope", None)
        rope, dim = b.spec.model.rope, b.spec.model.attention.qk_rope_head_dim
        if compressed:
            y = rope.yarn
            op = ops.RopeAngles(
                dim,
                rope.compress_theta,
                ratio,
                y.factor,
                y.beta_fast,
                y.beta_slow,
                y.original_max_position_embeddings,
            )
        else:
            op = ops.RopeAngles(dim, rope.theta)
        name = f"angles.compressed.{ratio}" if compressed else "angles.window"
        shared.angles[key] = b.one(op, b.row_array("position"), name=name)
    return shared.angles[key]


def _window_record(b: Builder, facts: LayerFacts, x: Value, angles: Value) -> Value:
    prefix, head_dim = f"layers.{facts.index}", b.spec.model.attention.head_dim
    raw = b.fp8_linear(x, f"{prefix}.attn.wkv", head_dim, name=f"{prefix}.kv_raw")
    normed = b.rmsnorm(raw, f"{prefix}.attn.kv_norm", name=f"{prefix}.kv_normed")
    turned = b.one(ops.Rope(), normed, angles, name=f"{prefix}.kv")
    return b.one(ops.Quantize(DType.MXFP8), turned, name=f"{prefix}.kv_record")


def _page_table(b: Builder) -> Value:
    shape = (b.dims.request_slots, b.dims.pages_per_request)
    return b.input("page_table", TensorType(DType.I32, shape))


def _pages(b: Builder, source: int, kind: str) -> Value:
    """The current version of a source's compressed pages (`kv`) or index keys (`index`)."""
    ratio = b.spec.model.compression.ratios[source]
    if kind == "kv":
        dtype, channels = DType.NVFP4, b.spec.model.attention.head_dim
    else:
        dtype, channels = DType.MXFP4, b.spec.model.indexer.index_head_dim
    entries = b.dims.page_entries(ratio)
    return b.state(f"layers.{source}.{kind}_pages", dtype, b.dims.pages, entries, channels)


def _store_pages(b: Builder, facts: LayerFacts, kind: str, rows: Value) -> None:
    _pages(b, facts.index, kind)
    slot, position = b.row_array("slot"), b.row_array("position")
    op = ops.PageStore(facts.ratio)
    b.update(f"layers.{facts.index}.{kind}_pages", op, _page_table(b), slot, position, rows)


def _compress(b: Builder, facts: LayerFacts, x: Value, shared: Shared) -> None:
    """Latents of complete groups into KV pages (section 3.7)."""
    prefix, head_dim = f"layers.{facts.index}", b.spec.model.attention.head_dim
    angles = _angles(b, True, facts.ratio, shared)
    b.locate("model.compression", facts.index)
    pooled = _pool(b, facts, x) if facts.ratio > 1 else None
    if pooled is None:
        pooled = b.bf16_linear(
            x,
            f"{prefix}.attn.compressor.wkv",
            head_dim,
            out=b.activation,
            name=f"{prefix}.pooled",
        )
    latent = b.rmsnorm(pooled, f"{prefix}.attn.compressor.norm", name=f"{prefix}.latent")
    turned = b.one(ops.Rope(), latent, angles, name=f"{prefix}.latent_turned")
    entry = b.one(ops.Quantize(DType.NVFP4), turned, name=f"{prefix}.kv_entry")
    _store_pages(b, facts, "kv", entry)
    shared.latents[facts.index] = latent


def _index_keys(b: Builder, facts: LayerFacts, shared: Shared) -> None:
    """Latents of the KV source, this layer's or an earlier one's, into index keys (3.8)."""
    prefix = f"layers.{facts.index}"
    assert facts.kv_source is not None
    latent = shared.latents[facts.kv_source]
    angles = _angles(b, True, facts.ratio, shared)
    b.locate("model.indexer", facts.index)
    width = b.spec.model.indexer.index_head_dim
    raw = b.bf16_linear(
        latent, f"{prefix}.attn.indexer.wk", width, out=b.activation, name=f"{prefix}.index_k_raw"
    )
    normed = b.rmsnorm(raw, f"{prefix}.attn.indexer.k_norm", name=f"{prefix}.index_k_normed")
    key = b.one(ops.Rope(), normed, angles, name=f"{prefix}.index_k")
    record = b.one(ops.Quantize(DType.MXFP4), key, name=f"{prefix}.index_k_record")
    _store_pages(b, facts, "index", record)


def _pool(b: Builder, facts: LayerFacts, x: Value) -> Value:
    """Softmax-pooled groups; raw rows of an incomplete group wait in the tail ring."""
    prefix, head_dim = f"layers.{facts.index}", b.spec.model.attention.head_dim
    state = f"{prefix}.tail"
    old = b.state(state, DType.F32, b.dims.slots, b.dims.tail_ring(facts.ratio), 2, head_dim)
    projected = [
        b.bf16_linear(
            x, f"{prefix}.attn.compressor.{w}", head_dim, out=DType.F32, name=f"{prefix}.{name}"
        )
        for w, name in (("wkv", "pool_value"), ("wgate", "pool_score"))
    ]
    slot, position = b.row_array("slot"), b.row_array("position")
    if b.chunked:
        chunk = ops.ChunkPoolGroup(facts.ratio, b.activation)
        row_start = b.row_array("row_start")
        pooled = b.one(chunk, old, slot, position, row_start, *projected, name=f"{prefix}.pooled")
        b.update(state, ops.RingStore(), slot, position, *projected)
        return pooled
    tail = b.update(state, ops.RingStore(), slot, position, *projected)
    op = ops.PoolGroup(facts.ratio, b.activation)
    return b.one(op, tail, slot, position, name=f"{prefix}.pooled")


def _select(
    b: Builder, facts: LayerFacts, x: Value, q_rank: Value, angles: Value, shared: Shared
) -> Value:
    """The top-k list of an index source, inside its candidate blocks if it has any."""
    prefix, indexer = f"layers.{facts.index}", b.spec.model.indexer
    assert facts.index_k_source is not None
    b.locate("model.indexer", facts.index)
    heads, width = indexer.index_n_heads, indexer.index_head_dim
    flat = b.fp8_linear(
        q_rank,
        f"{prefix}.attn.indexer.wq_b",
        heads * width,
        heads=heads,
        name=f"{prefix}.index_q_flat",
    )
    turned = b.one(ops.Rope(), flat, angles, name=f"{prefix}.index_q")
    query = b.one(ops.Quantize(DType.MXFP4), turned, name=f"{prefix}.index_q_record")
    weight = b.bf16_linear(
        x,
        f"{prefix}.attn.indexer.weights_proj",
        heads,
        out=b.activation,
        name=f"{prefix}.index_weight",
    )
    keys = _pages(b, facts.index_k_source, "index")
    slot, position = b.row_array("slot"), b.row_array("position")
    operands = (query, weight, keys, _page_table(b), slot, position)
    factor = float((width * heads) ** -0.5)  # one power: a power of two stays one
    names = (f"{prefix}.scores", f"{prefix}.selected")
    confined = facts.candidate_source is not None and not facts.selects_candidates
    if confined:
        assert facts.candidate_source is not None
        blocks = shared.candidates[facts.candidate_source]
        size = indexer.candidate_block_size
        op = ops.CandidateScores(facts.ratio, factor, b.activation, size)
        scores = b.one(op, *operands, blocks, name=names[0])
        top_k = ops.CandidateTopK(indexer.index_topk, facts.ratio, size)
        return b.one(top_k, scores, blocks, name=names[1])
    scores = b.one(ops.IndexScores(facts.ratio, factor, b.activation), *operands, name=names[0])
    if facts.selects_candidates:
        top_blocks = ops.TopBlocks(
            indexer.candidate_topk_blocks, indexer.candidate_block_size, facts.ratio
        )
        shared.candidates[facts.index] = b.one(
            top_blocks, scores, position, name=f"{prefix}.candidates"
        )
    return b.one(ops.TopK(indexer.index_topk, facts.ratio), scores, position, name=names[1])


def _attend(b: Builder, facts: LayerFacts, q: Value, kv: Value, shared: Shared) -> Value:
    """Attention over the window and the selected entries; stores the window (section 3.9)."""
    prefix, a = f"layers.{facts.index}", b.spec.model.attention
    b.locate("model.attention", facts.index)
    state = f"{prefix}.window"
    window = b.state(state, DType.MXFP8, b.dims.slots, b.dims.window_ring, a.head_dim)
    sink = b.weight(f"{prefix}.attn.attn_sink", DType.F32, a.num_attention_heads)
    slot, position = b.row_array("slot"), b.row_array("position")
    compressed: tuple[Value, ...] = ()
    if facts.ratio:
        assert facts.kv_source is not None
        assert facts.index_source is not None
        pages = _pages(b, facts.kv_source, "kv")
        compressed = (pages, _page_table(b), shared.selected[facts.index_source])
    shape = (a.sliding_window, a.head_dim**-0.5, facts.ratio)
    name = f"{prefix}.attended"
    if b.chunked:
        row_start = b.row_array("row_start")
        operands = (q, window, slot, position, sink, row_start, kv, *compressed)
        o = b.one(ops.ChunkAttention(*shape), *operands, name=name)
        b.update(state, ops.RingStore(), slot, position, kv)
        return o
    window = b.update(state, ops.RingStore(), slot, position, kv)
    return b.one(
        ops.SparseAttention(*shape), q, window, slot, position, sink, *compressed, name=name
    )


def _project(b: Builder, facts: LayerFacts, o: Value, angles: Value) -> Value:
    """Undo the rotation, project each group, then together (section 3.10)."""
    prefix, a = f"layers.{facts.index}", b.spec.model.attention
    turned = b.one(ops.Rope(inverse=True), o, angles, name=f"{prefix}.attended_turned")
    rank = a.o_groups * a.o_lora_rank
    w, scale = b.fp8_weight(f"{prefix}.attn.wo_a", rank, o.type.width // a.o_groups)
    # The released model multiplies wo_a by unquantised rows: the one FP8 weight that does.
    op = ops.Linear(out=b.activation, groups=a.o_groups)
    low = b.one(op, turned, w, scale, name=f"{prefix}.o_low")
    hidden = b.spec.model.hidden_size
    return b.fp8_linear(low, f"{prefix}.attn.wo_b", hidden, name=f"{prefix}.attn_out")
