"""The spec as frozen values: what a YAML file may say, and nothing about how it is read.

Field names are the real config's wherever it has one (model_v41.md section 1), grouped by the part
of the model they describe. Cross-field rules live in `spec/rules.py`.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

Positive = Annotated[int, Field(gt=0)]
Count = Annotated[int, Field(gt=0, lt=2**31)]  # kernels count rows, pages and positions in 32 bits
NonNegative = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class Section(BaseModel):
    """A mapping in the YAML: immutable, and closed to keys it does not know."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Yarn(Section):
    """YaRN frequency interpolation of compressed layers (no magnitude scale)."""

    factor: PositiveFloat
    beta_fast: PositiveFloat
    beta_slow: PositiveFloat
    original_max_position_embeddings: Positive


class Rope(Section):
    """`theta` turns window-only layers; `compress_theta` with `yarn` turns compressed ones."""

    theta: PositiveFloat
    compress_theta: PositiveFloat
    yarn: Yarn


class Attention(Section):
    """Shared-KV attention: one `head_dim` vector per token is key and value of every head."""

    num_attention_heads: Positive
    num_key_value_heads: Literal[1]
    head_dim: Positive
    qk_rope_head_dim: Positive
    q_lora_rank: Positive
    o_lora_rank: Positive
    o_groups: Positive
    sliding_window: Positive


class Compression(Section):
    """Which layers hold compressed KV. `ratios` covers the backbone, then the draft layers (0)."""

    ratios: tuple[NonNegative, ...]
    kv_source_layer_ids: tuple[NonNegative, ...]
    index_k_source_layer_ids: tuple[NonNegative, ...] | None = None
    index_source_layer_ids: tuple[NonNegative, ...]


class Indexer(Section):
    """Top-k selection of compressed entries, and the candidate blocks that bound it."""

    index_n_heads: Positive
    index_head_dim: Positive
    index_topk: Positive
    candidate_source_layer_id: NonNegative
    candidate_topk_blocks: Positive
    candidate_block_size: Positive


class HyperConnections(Section):
    """Residual streams (mHC), shifted: a sub-layer's `pre` is used by the next sub-layer."""

    hc_mult: Positive
    hc_sinkhorn_iters: Positive
    hc_eps: PositiveFloat


class Moe(Section):
    """Routed FP4 experts and one shared FP8 expert."""

    moe_intermediate_size: Positive
    n_routed_experts: Positive
    n_shared_experts: Literal[1]
    num_experts_per_tok: Positive
    scoring_func: Literal["sqrtsoftplus"]
    topk_method: Literal["noaux_tc"]
    norm_topk_prob: Literal[True]
    routed_scaling_factor: PositiveFloat
    swiglu_limit: PositiveFloat


class CompressedVocabulary(StrEnum):
    """Where the token map of Engram comes from: tokenizer.json (section 3.12 a), or token = id."""

    TOKENIZER = "tokenizer"
    IDENTITY = "identity"


class Engram(Section):
    """Hashed n-gram tables, added to the streams before `engram_layer_ids`."""

    engram_layer_ids: tuple[NonNegative, ...]
    engram_num_embeddings: tuple[Positive, ...]
    engram_max_ngram_size: Annotated[int, Field(ge=2)]
    engram_vocab_size: Positive
    engram_n_heads: Positive
    engram_head_dim: Positive
    engram_pad_token_id: NonNegative
    engram_compressed_vocab_size: Positive
    compressed_vocabulary: CompressedVocabulary = CompressedVocabulary.TOKENIZER


class Dspark(Section):
    """The drafter: `num_nextn_predict_layers` extra layers after the backbone."""

    num_nextn_predict_layers: NonNegative
    dspark_block_size: Positive
    dspark_noise_token_id: NonNegative
    dspark_target_layer_ids: tuple[NonNegative, ...]
    dspark_markov_rank: Positive
    dspark_n_routed_experts: Positive
    dspark_num_experts_per_tok: Positive


class Vision(Section):
    """The image tower: in the plan and the checkpoint; not compiled yet."""

    num_hidden_layers: Positive
    hidden_size: Positive
    num_attention_heads: Positive
    intermediate_size: Positive
    patch_size: Positive
    rope_theta: PositiveFloat
    downsample_ratio: Positive
    max_image_tokens: Positive
    min_pixels: Positive
    max_wh_ratio: PositiveFloat | None = None
    image_token_id: NonNegative


class Quantization(Section):
    """The published checkpoint format; the only one the kernels read."""

    quant_method: Literal["fp8"]
    activation_scheme: Literal["dynamic"]
    weight_block_size: tuple[Literal[32], Literal[32]]
    scale_fmt: Literal["ue8m0"]
    expert_dtype: Literal["fp4"]


class Model(Section):
    """Every number of the real config (model_v41.md section 1)."""

    architecture: Literal["deepseek_v41"]
    vocab_size: Positive
    hidden_size: Positive
    num_hidden_layers: Positive
    max_position_embeddings: Positive
    rms_norm_eps: PositiveFloat
    initializer_range: PositiveFloat = 0.02
    hidden_act: Literal["silu"] = "silu"
    attention_bias: Literal[False] = False
    attention_dropout: Annotated[float, Field(ge=0, le=0)] = 0.0
    tie_word_embeddings: Literal[False] = False
    bos_token_id: NonNegative
    eos_token_id: NonNegative
    pad_token_id: NonNegative
    image_routing_bias: bool = False  # `gate.bias_vl` is in the checkpoint
    attention: Attention
    rope: Rope
    compression: Compression
    indexer: Indexer
    hyper_connections: HyperConnections
    moe: Moe
    engram: Engram
    dspark: Dspark
    vision: Vision | None = None
    quantization: Quantization


class Checkpoint(Section):
    """Where the weights are: exactly one of a hub repository, a folder, or a seed to make them."""

    repo: str | None = None
    revision: str | None = None
    path: str | None = None
    synthetic: NonNegative | None = None


class Numerics(StrEnum):
    """Rounding policies of design.md section 8."""

    F32 = "f32"
    VENDOR = "vendor"
    PRODUCTION = "production"


class Verify(StrEnum):
    FIXED = "fixed"
    CONFIDENCE = "confidence"


class Placement(StrEnum):
    DEVICE = "device"
    HOST = "host"
    DISK = "disk"


class KvFormat(StrEnum):
    """`v41`: FP8 window records, FP4 compressed records, FP4 index keys (section 4)."""

    V41 = "v41"


class Parallel(Section):
    dp: Positive = 1
    cp: Positive = 1
    ep: Positive = 1
    redundant: NonNegative = 0


class EngineSettings(Section):
    """What the engine must hold. `spec/rules.py` refuses settings that have no implementation."""

    max_requests: Count = 8
    max_rows: Count = 64
    max_context: Annotated[Count, Field(ge=2)]  # a token of a prompt and one of its answer
    cache_tokens: Positive | None = None
    prefix_snapshots: NonNegative | None = None
    page_size: Count = 64
    prefill_chunk: Count = 128
    draft_len: NonNegative = 0
    verify: Verify = Verify.FIXED
    kv_format: KvFormat = KvFormat.V41
    batch_invariant: bool = False
    bounded_replay: bool = False
    engram: Placement = Placement.DEVICE
    experts: Placement = Placement.DEVICE
    parallel: Parallel = Parallel()
    numerics: Numerics = Numerics.VENDOR
    probes: bool = False


class Document(Section):
    """A whole spec file."""

    model: Model
    checkpoint: Checkpoint
    engine: EngineSettings
