"""Engram: hashed n-grams look up table rows that are gated into the streams (section 3.12).

The hash needs token ids only, so all layers' rows are computed before layer 0.
"""

from __future__ import annotations

from deepinfer_compile.build.builder import Builder
from deepinfer_compile.ir import ops
from deepinfer_compile.ir.graph import Value
from deepinfer_compile.ir.types import DType
from deepinfer_compile.spec.engram import bucket_primes, multipliers


def hash_rows(b: Builder) -> dict[int, Value]:
    """Table rows i32[R,columns] of every Engram layer, by layer."""
    config = b.spec.model.engram
    if not config.engram_layer_ids:
        return {}
    b.locate("model.engram")
    slot, position = b.row_array("slot"), b.row_array("position")
    token_map = b.weight("token_map", DType.I32, b.spec.model.vocab_size, source="@token_map")
    ids = b.one(
        ops.MapToken(), b.row_array("token_id"), b.row_array("image"), token_map, name="ngram_id"
    )
    history = b.state("history", DType.I32, b.dims.slots, b.dims.history_ring, 1)
    if not b.chunked:
        history = b.update("history", ops.RingStore(), slot, position, ids)
    rows = {}
    constants = zip(
        config.engram_layer_ids,
        multipliers(b.spec.model),
        bucket_primes(b.spec.model),
        strict=True,
    )
    for layer, odd, primes in constants:
        flat = tuple(p for heads in primes for p in heads)
        name, pad = f"layers.{layer}.engram_rows", config.engram_pad_token_id
        if b.chunked:
            chunk = ops.ChunkEngramHash(odd, flat, pad)
            operands = (history, slot, position, b.row_array("row_start"), ids)
            rows[layer] = b.one(chunk, *operands, name=name)
        else:
            rows[layer] = b.one(ops.EngramHash(odd, flat, pad), history, slot, position, name=name)
    if b.chunked:
        b.update("history", ops.RingStore(), slot, position, ids)
    return rows


def engram(b: Builder, layer: int, x: Value, rows: Value) -> Value:
    """The streams after the gated value of the looked-up rows."""
    config, prefix = b.spec.model.engram, f"layers.{layer}"
    b.locate("model.engram", layer)
    size = config.engram_num_embeddings[config.engram_layer_ids.index(layer)]
    width = config.engram_head_dim
    table = b.weight(f"{prefix}.engram.embed.weight", DType.E4M3, size, width)
    scale = b.weight(f"{prefix}.engram.embed.scale", DType.UE8M0, size, width // 32)
    record = b.one(ops.EngramLookup(), rows, table, scale, name=f"{prefix}.engram_record")
    streams, hidden = x.type.inner
    outputs = (streams + 1) * hidden
    w, block_scale = b.fp8_weight(f"{prefix}.engram.wkv", outputs, record.type.channels)
    op = ops.Linear(out=b.activation)
    kv = b.one(op, record, w, block_scale, name=f"{prefix}.engram_kv")
    return b.one(
        ops.EngramGate(b.spec.model.rms_norm_eps),
        x,
        kv,
        b.weight(f"{prefix}.engram.q_weight", DType.BF16, streams, hidden),
        b.weight(f"{prefix}.engram.k_weight", DType.BF16, streams, hidden),
        b.row_array("image"),
        name=f"{prefix}.engram_streams",
    )
