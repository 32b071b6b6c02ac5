"""Legal tiny models unlike one another: a few by name, any number by seed.

`random_model(seed)` draws every fact of a model that the rules leave open. Models are named by what
they are for; what a fact is not given, `BASE` says.
"""

from __future__ import annotations

import random
from collections.abc import Mapping

from deepinfer_compile.checkpoint.tokenizer import make_tokenizer
from deepinfer_compile.checkpoint.vocabulary import compress
from deepinfer_compile.spec.engram import bucket_primes, rows
from deepinfer_compile.spec.schema import Model
from tests.checkpoint.models import edited, nano

Facts = Mapping[str, object]

# Both halves without frills; the table sizes and the compressed vocabulary are worked out.
BASE: Facts = {
    "compression.ratios": (0, 2, 2, 1, 1),
    "num_hidden_layers": 5,
    "compression.kv_source_layer_ids": (1, 3),
    "compression.index_source_layer_ids": (1, 3, 4),
    "indexer.candidate_source_layer_id": 3,
    "engram.engram_layer_ids": (1,),
    "dspark.num_nextn_predict_layers": 0,
    "dspark.dspark_target_layer_ids": (),
}

NAMED: Mapping[str, Facts] = {
    # No ratio 2, no Engram, no drafts, one group, an odd number of heads, a window of two.
    "ratio_one_only": {
        "num_hidden_layers": 4,
        "compression.ratios": (1, 1, 0, 1),
        "compression.kv_source_layer_ids": (0,),
        "compression.index_source_layer_ids": (0, 1, 3),
        "indexer.candidate_source_layer_id": 0,
        "indexer.candidate_block_size": 16,
        "indexer.index_n_heads": 3,
        "indexer.index_head_dim": 96,
        "indexer.index_topk": 24,
        "engram.engram_layer_ids": (),
        "attention.num_attention_heads": 3,
        "attention.head_dim": 96,
        "attention.qk_rope_head_dim": 18,
        "attention.o_groups": 1,
        "attention.sliding_window": 2,
        "hyper_connections.hc_mult": 2,
        "hidden_size": 96,
        "vocab_size": 263,
        "max_position_embeddings": 700,
    },
    # No ratio 1: candidates come from a source of ratio 2; Engram everywhere, bigrams only.
    "ratio_two_only": {
        "num_hidden_layers": 5,
        "compression.ratios": (2, 2, 2, 0, 2, 0),
        "compression.kv_source_layer_ids": (0, 2),
        "compression.index_source_layer_ids": (0, 1, 2, 4),
        "indexer.candidate_source_layer_id": 1,
        "indexer.index_topk": 8,
        "engram.engram_layer_ids": (0, 3, 4),
        "engram.engram_max_ngram_size": 2,
        "engram.engram_n_heads": 5,
        "engram.compressed_vocabulary": "tokenizer",
        "dspark.num_nextn_predict_layers": 1,
        "dspark.dspark_target_layer_ids": (1, 4),
        "attention.num_attention_heads": 6,
        "attention.o_groups": 3,
        "attention.o_lora_rank": 32,
        "moe.num_experts_per_tok": 1,
        "moe.n_routed_experts": 4,
        "moe.moe_intermediate_size": 96,
        "moe.swiglu_limit": 0.5,
        "hidden_size": 160,
        "vocab_size": 301,
        "image_routing_bias": True,
    },
    # Windows alone: nothing is compressed, so there are no pages and no selection.
    "windows_only": {
        "num_hidden_layers": 4,
        "compression.ratios": (0, 0, 0, 0),
        "compression.kv_source_layer_ids": (),
        "compression.index_source_layer_ids": (),
        "indexer.candidate_source_layer_id": 0,
        "engram.engram_layer_ids": (3,),
        "engram.engram_max_ngram_size": 3,
        "attention.num_attention_heads": 16,
        "attention.o_groups": 8,
        "attention.o_lora_rank": 4,
        "moe.n_routed_experts": 32,
        "moe.num_experts_per_tok": 6,
        "rms_norm_eps": 1e-6,
    },
    # A large head, every kind of source, a candidate source that nobody follows.
    "many_sources": {
        "num_hidden_layers": 9,
        "compression.ratios": (0, 2, 2, 2, 0, 2, 1, 1, 1, 0, 0, 0),
        "compression.kv_source_layer_ids": (1, 3, 5, 6),
        "compression.index_k_source_layer_ids": (1, 2, 3, 5, 6),
        "compression.index_source_layer_ids": (1, 2, 3, 5, 6),
        "indexer.candidate_source_layer_id": 6,
        "indexer.candidate_topk_blocks": 16,
        "indexer.index_n_heads": 32,
        "indexer.index_topk": 64,
        "engram.engram_layer_ids": (2, 4, 5),
        "engram.compressed_vocabulary": "tokenizer",
        "dspark.num_nextn_predict_layers": 3,
        "dspark.dspark_target_layer_ids": (6, 8),
        "attention.num_attention_heads": 2,
        "attention.head_dim": 512,
        "attention.qk_rope_head_dim": 16,
        "attention.q_lora_rank": 32,
        "attention.sliding_window": 128,
        "hyper_connections.hc_sinkhorn_iters": 3,
        "vocab_size": 401,
    },
}


def named_model(name: str) -> Model:
    """One of `NAMED`."""
    return _finished({**BASE, **NAMED[name]}, spare=3)


def random_model(seed: int) -> Model:
    """A legal model; the same for the same seed."""
    draw = random.Random(seed)
    facts = {**_layers(draw), **_widths(draw), **_numbers(draw)}
    return _finished({**BASE, **facts}, spare=draw.choice((0, 1, 9)))


def _finished(facts: Facts, spare: int) -> Model:
    """The model with Engram tables of the least size and `spare` rows, and its own vocabulary."""
    identity = {"engram.compressed_vocabulary": "identity"}
    size = facts.get("vocab_size", 256)
    model = edited(
        nano(),
        **{**facts, **identity, "engram.engram_compressed_vocab_size": size},
    )
    if facts.get("engram.compressed_vocabulary") == "tokenizer":
        small = int(compress(make_tokenizer(model), model.vocab_size).max()) + 1
        model = edited(
            model,
            **{
                "engram.compressed_vocabulary": "tokenizer",
                "engram.engram_compressed_vocab_size": small,
            },
        )
    tables = tuple(rows(columns) + spare for columns in bucket_primes(model))
    return edited(model, **{"engram.engram_num_embeddings": tables})


def _layers(draw: random.Random) -> dict[str, object]:
    """Ratios, sources, candidates, Engram layers and taps."""
    windows, twos, ones = draw.choice(
        ((1, 2, 3), (2, 3, 3), (0, 2, 2), (1, 0, 4), (0, 0, 4), (1, 4, 0), (2, 5, 2), (0, 1, 3))
    )
    ratios: list[int] = [0] * windows
    kv: list[int] = []
    index: list[int] = []
    for ratio, count in ((2, twos), (1, ones)):
        for nth in range(count):
            if nth and draw.random() < 0.15:
                ratios.append(0)
            owns = nth == 0 or draw.random() < 0.3
            if owns:
                kv.append(len(ratios))
            if owns or draw.random() < 0.45:
                index.append(len(ratios))
            ratios.append(ratio)
    keys = tuple(i for i in index if i in kv or draw.random() < 0.5)
    layers = len(ratios)
    start = ratios.index(1) if 1 in ratios else None
    early = list(range(layers if start is None else start))
    engram = sorted(draw.sample(early, min(len(early), draw.choice((0, 1, 1, 2, 3)))))
    drafts = draw.choice((0, 0, 1, 2, 3))
    late = list(range(start or 0, layers))
    taps = sorted(draw.sample(late, draw.randint(1, min(3, len(late))))) if drafts else []
    return {
        "num_hidden_layers": layers,
        "compression.ratios": (*ratios, *[0] * drafts),
        "compression.kv_source_layer_ids": tuple(kv),
        "compression.index_k_source_layer_ids": draw.choice((None, keys)),
        "compression.index_source_layer_ids": tuple(index),
        "indexer.candidate_source_layer_id": draw.choice(index) if start is None else start,
        "engram.engram_layer_ids": tuple(engram),
        "dspark.num_nextn_predict_layers": drafts,
        "dspark.dspark_target_layer_ids": tuple(taps),
    }


def _widths(draw: random.Random) -> dict[str, object]:
    """Every dimension; only those that groups of 32 bind are multiples of 32."""
    heads = draw.choice((1, 2, 3, 4, 5, 6, 8, 12, 16))
    groups = draw.choice([g for g in (1, 2, 3, 4, 8) if heads % g == 0])
    head_dim = draw.choice((64, 96, 128, 160, 256, 512))
    index_dim = draw.choice((32, 64, 96, 128))
    experts = draw.choice((4, 8, 12, 16, 32))
    return {
        "hidden_size": draw.choice((32, 64, 96, 128, 160, 256)),
        "vocab_size": draw.randint(251, 420),
        "attention.num_attention_heads": heads,
        "attention.head_dim": head_dim,
        "attention.qk_rope_head_dim": draw.choice(
            [r for r in (2, 16, 20, 24, 32, 48, 64) if r <= min(head_dim, index_dim)]
        ),
        "attention.q_lora_rank": draw.choice((32, 64, 96)),
        "attention.o_groups": groups,
        "attention.o_lora_rank": draw.choice(
            [n for n in (4, 8, 16, 32, 64, 96) if n * groups % 32 == 0]
        ),
        "attention.sliding_window": draw.choice((1, 8, 16, 21, 50, 100, 128)),
        "indexer.index_n_heads": draw.choice((1, 2, 3, 4, 8, 16, 32)),
        "indexer.index_head_dim": index_dim,
        "indexer.index_topk": draw.choice((1, 8, 13, 16, 32, 64)),
        "indexer.candidate_topk_blocks": draw.choice((8, 8, 16)),
        "indexer.candidate_block_size": draw.choice((8, 16)),
        "hyper_connections.hc_mult": draw.choice((2, 4, 4)),
        "moe.moe_intermediate_size": draw.choice((32, 64, 96)),
        "moe.n_routed_experts": experts,
        "moe.num_experts_per_tok": draw.randint(1, min(6, experts)),
        "engram.engram_max_ngram_size": draw.choice((2, 3, 4)),
        "engram.engram_n_heads": draw.randint(1, 8),
        "engram.engram_head_dim": draw.choice((32, 64, 96)),
        "engram.engram_vocab_size": draw.randint(1, 90),
    }


def _numbers(draw: random.Random) -> dict[str, object]:
    """What has no shape."""
    return {
        "max_position_embeddings": draw.choice((512, 700, 5000, 1048576)),
        "rms_norm_eps": draw.choice((1e-20, 1e-6)),
        "image_routing_bias": draw.random() < 0.5,
        "engram.compressed_vocabulary": draw.choice(("identity", "tokenizer")),
        "engram.engram_pad_token_id": 2,
        "hyper_connections.hc_sinkhorn_iters": draw.choice((1, 3, 20)),
        "hyper_connections.hc_eps": draw.choice((1e-6, 1e-3)),
        "moe.swiglu_limit": draw.choice((0.5, 3.0, 10.0)),
        "moe.routed_scaling_factor": draw.choice((1.0, 1.5, 2.5)),
        "rope.theta": draw.choice((10000.0, 500.0)),
        "rope.compress_theta": draw.choice((160000.0, 40000.0)),
        "rope.yarn.factor": draw.choice((1.0, 4.0, 16.0)),
        "rope.yarn.beta_fast": draw.choice((32.0, 8.0)),
        "rope.yarn.beta_slow": draw.choice((1.0, 2.0)),
        "rope.yarn.original_max_position_embeddings": draw.choice((64, 512, 65536)),
    }
