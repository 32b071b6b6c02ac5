"""The examples say what the tables say, and open with the commands that use them."""

from __future__ import annotations

import pytest

from deepinfer_compile.spec.load import ModelSpec, load_spec
from tests.spec.error_cases import ROOT

EXAMPLES = sorted((ROOT / "examples").glob("*.yaml"))

# model_v41.md section 10.2, in the table's order.
TINY = {
    "v41_nano": {
        "sizes": (256, 64, 8, 1024),
        "attention": (4, 64, 32, 64, 2, 32, 16),
        "ratios": [0, 0, 2, 2, 2, 1, 1, 1, 0, 0],
        "sources": ((2, 5), (2, 5, 7)),
        "indexer": (5, 8, 8, 4, 32, 16),
        "moe": (8, 2, 1, 64),
        "engram": ((1, 2), 67, 4, 2, 32, (462, 630), 256, 2),
        "dspark": (2, 3, 255, (5, 6, 7), 32, 4, 2),
        "yarn": (4, 64),
        "page_size": 64,
    },
    "v41_micro": {
        "sizes": (512, 128, 12, 2048),
        "attention": (8, 128, 64, 128, 4, 64, 32),
        "ratios": [0, 0] + [2] * 5 + [1] * 5 + [0] * 3,
        "sources": ((2, 5, 7), (2, 5, 7, 9, 11)),
        "indexer": (7, 8, 8, 8, 64, 32),
        "moe": (16, 4, 1, 128),
        "engram": ((1, 5), 251, 4, 4, 128, (3376, 4284), 512, 2),
        "dspark": (3, 5, 511, (9, 10, 11), 64, 8, 2),
        "yarn": (4, 64),
        "page_size": 64,
    },
    "v41_kshape": {
        "sizes": (512, 256, 10, 8192),
        "attention": (64, 512, 64, 128, 8, 128, 128),
        "ratios": [0, 0] + [2] * 4 + [1] * 4 + [0] * 3,
        "sources": ((2, 4, 6), (2, 4, 6, 8)),
        "indexer": (6, 128, 8, 32, 128, 512),
        "moe": (32, 6, 1, 256),
        "engram": ((1, 4), 1009, 4, 8, 256, (25874, 30058), 512, 2),
        "dspark": (3, 5, 511, (7, 8, 9), 64, 16, 3),
        "yarn": (16, 512),
        "page_size": 256,
    },
    # Section 1.2.
    "v41_flash": {
        "sizes": (129280, 5120, 40, 1048576),
        "attention": (64, 512, 64, 1280, 8, 1024, 128),
        "ratios": [0, 0] + [2] * 18 + [1] * 20 + [0] * 3,
        "sources": ((2, 8, 14, 20), (2, 8, 14, 20, 24, 28, 32, 36)),
        "indexer": (20, 2048, 8, 32, 128, 512),
        "moe": (384, 6, 1, 2304),
        "engram": ((1, 14), 16000000, 4, 8, 256, (384006168, 384016682), 99092, 2),
        "dspark": (3, 5, 128799, (37, 38, 39), 256, 128, 3),
        "yarn": (16, 65536),
        "page_size": 128,
    },
}


def example(name: str) -> ModelSpec:
    return load_spec(ROOT / "examples" / f"{name}.yaml", environment={})


def table_of(spec: ModelSpec) -> dict[str, object]:
    m, a, i, e, d = (
        spec.model,
        spec.model.attention,
        spec.model.indexer,
        spec.model.engram,
        spec.model.dspark,
    )
    return {
        "sizes": (m.vocab_size, m.hidden_size, m.num_hidden_layers, m.max_position_embeddings),
        "attention": (
            *(a.num_attention_heads, a.head_dim, a.qk_rope_head_dim, a.q_lora_rank),
            *(a.o_groups, a.o_lora_rank, a.sliding_window),
        ),
        "ratios": list(m.compression.ratios),
        "sources": (m.compression.kv_source_layer_ids, m.compression.index_source_layer_ids),
        "indexer": (
            *(i.candidate_source_layer_id, i.candidate_topk_blocks, i.candidate_block_size),
            *(i.index_n_heads, i.index_head_dim, i.index_topk),
        ),
        "moe": (
            *(m.moe.n_routed_experts, m.moe.num_experts_per_tok, m.moe.n_shared_experts),
            m.moe.moe_intermediate_size,
        ),
        "engram": (
            *(e.engram_layer_ids, e.engram_vocab_size, e.engram_max_ngram_size),
            *(e.engram_n_heads, e.engram_head_dim, e.engram_num_embeddings),
            *(e.engram_compressed_vocab_size, e.engram_pad_token_id),
        ),
        "dspark": (
            *(d.num_nextn_predict_layers, d.dspark_block_size, d.dspark_noise_token_id),
            *(d.dspark_target_layer_ids, d.dspark_markov_rank),
            *(d.dspark_n_routed_experts, d.dspark_num_experts_per_tok),
        ),
        "yarn": (m.rope.yarn.factor, m.rope.yarn.original_max_position_embeddings),
        "page_size": spec.engine.page_size,
    }


@pytest.mark.parametrize("name", TINY)
def test_example_matches_its_table(name: str) -> None:
    spec = example(name)
    assert table_of(spec) == TINY[name]
    model = spec.model
    common = (
        *(model.rms_norm_eps, model.rope.theta, model.rope.compress_theta),
        *(model.rope.yarn.beta_fast, model.rope.yarn.beta_slow),
        *(model.hyper_connections.hc_mult, model.hyper_connections.hc_sinkhorn_iters),
        *(model.hyper_connections.hc_eps, model.moe.swiglu_limit, model.moe.routed_scaling_factor),
        *(model.bos_token_id, model.eos_token_id, model.pad_token_id, model.image_routing_bias),
    )
    assert common == (1e-20, 1e4, 1.6e5, 32, 1, 4, 20, 1e-6, 10, 1.5, 0, 1, 2, True)


def test_flash_names_the_release_and_its_tower() -> None:
    spec = example("v41_flash")
    assert spec.checkpoint.model_dump(exclude_none=True) == {
        "repo": "deepseek-ai/DeepSeek-V4.1-Flash",
        "revision": "dba1be0a40aa45a94ad051997016db3960a90277",
    }
    assert spec.model.vision is not None
    assert spec.model.vision.model_dump() == {
        "num_hidden_layers": 32,
        "hidden_size": 1024,
        "num_attention_heads": 16,
        "intermediate_size": 2816,
        "patch_size": 14,
        "rope_theta": 10000.0,
        "downsample_ratio": 3,
        "max_image_tokens": 1024,
        "min_pixels": 544**2,
        "max_wh_ratio": None,
        "image_token_id": 129264,
    }
    engine = spec.engine
    limits = (engine.max_context, engine.max_requests, engine.max_rows, engine.prefill_chunk)
    assert limits == (1048576, 64, 64, 512)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example_opens_with_its_commands(path: object) -> None:
    head = [line for line in path.read_text().splitlines()[:5] if line.startswith("#")]
    short = path.stem.removeprefix("v41_")
    assert f"#   deepinfer-compile examples/{path.name} --target cpu -o {short}.engine" in head
    assert any(
        line.startswith(f"#   deepinfer-engine run {short}.engine --prompt") for line in head
    )
    assert max(map(len, path.read_text().splitlines())) <= 100
