"""The tensors a checkpoint of a model holds: names, shapes, dtypes and what they belong to.

    Model -> TensorGroup (one per pattern) -> TensorSpec (one per tensor)

This is model_v41.md section 5 as code. Experts differ in their number only, so a group stands for
all of them: the real model is 1,879 groups and 96,085 tensors, and sums over it take milliseconds.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from math import prod

from deepinfer_compile.spec.layers import LayerFacts, layer_facts
from deepinfer_compile.spec.schema import Model, Vision

BLOCK = 32  # FP8 weights carry one scale per 32 x 32 block, FP4 weights and tables one per 1 x 32

NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")  # layer, expert or stage in a tensor's name


class StorageDType(StrEnum):
    """Safetensors' own dtype names. Checkpoints use the first five; the others can be read."""

    F8_E4M3 = "F8_E4M3"
    F8_E8M0 = "F8_E8M0"
    I8 = "I8"  # two E2M1 codes per byte, the even channel in the low nibble
    BF16 = "BF16"
    F32 = "F32"
    BOOL = "BOOL"
    U8 = "U8"
    F8_E5M2 = "F8_E5M2"
    I16 = "I16"
    U16 = "U16"
    F16 = "F16"
    I32 = "I32"
    U32 = "U32"
    I64 = "I64"
    U64 = "U64"
    F64 = "F64"

    @property
    def itemsize(self) -> int:
        match self:
            case (
                StorageDType.F8_E4M3
                | StorageDType.F8_E8M0
                | StorageDType.F8_E5M2
                | StorageDType.I8
                | StorageDType.U8
                | StorageDType.BOOL
            ):
                return 1
            case StorageDType.BF16 | StorageDType.F16 | StorageDType.I16 | StorageDType.U16:
                return 2
            case StorageDType.F32 | StorageDType.I32 | StorageDType.U32:
                return 4
            case StorageDType.F64 | StorageDType.I64 | StorageDType.U64:
                return 8


class Component(StrEnum):
    """The rows of the parameter table (model_v41.md section 1.5), in its order."""

    EMBEDDING = "token embedding"
    HEAD = "lm head"
    FINAL_NORM = "final norm"
    ATTENTION = "attention core"
    COMPRESSORS = "compressors"
    INDEXERS = "indexers"
    ROUTED_EXPERTS = "routed experts"
    SHARED_EXPERTS = "shared experts"
    ROUTERS = "routers"
    HYPER_CONNECTIONS = "mHC coefficients"
    LAYER_NORMS = "layer norms"
    ENGRAM_TABLES = "Engram tables"
    ENGRAM_PROJECTIONS = "Engram wkv + q/k weights"
    DSPARK_ATTENTION = "DSpark attention"
    DSPARK_ROUTED_EXPERTS = "DSpark routed experts"
    DSPARK_REST = "DSpark shared / router / mHC / norms"
    DSPARK_MAIN = "DSpark main_proj + norms"
    DSPARK_MARKOV = "DSpark Markov head"
    DSPARK_CONFIDENCE = "DSpark confidence head"
    VISION = "vision tower"
    ALIGNER = "aligner"
    DELIMITERS = "image delimiters"

    @property
    def backbone(self) -> bool:
        """Counted in the backbone subtotal."""
        return list(Component).index(self) <= list(Component).index(Component.LAYER_NORMS)


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of the checkpoint."""

    name: str
    shape: tuple[int, ...]
    dtype: StorageDType
    component: Component

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    @property
    def parameters(self) -> int:
        """Logical weights: a packed byte is two, a scale is none."""
        match self.dtype:
            case StorageDType.F8_E8M0:
                return 0
            case StorageDType.I8:
                return 2 * prod(self.shape)
            case _:
                return prod(self.shape)


@dataclass(frozen=True)
class TensorGroup:
    """`copies` tensors that differ in the number at `{}` of their name, or one without a number."""

    tensor: TensorSpec
    copies: int = 1

    def tensors(self) -> Iterator[TensorSpec]:
        t = self.tensor
        if "{}" not in t.name:
            yield t
            return
        for copy in range(self.copies):
            yield TensorSpec(t.name.format(copy), t.shape, t.dtype, t.component)


@dataclass(frozen=True)
class ComponentTotal:
    """Logical weights and stored bytes (scales included) of one row of the parameter table."""

    component: Component
    parameters: int
    bytes: int


@dataclass(frozen=True)
class _Components:
    """Where the tensors of a block are counted: the drafter has fewer rows than the backbone."""

    attention: Component
    experts: Component
    shared: Component
    router: Component
    hyper: Component
    norms: Component


_BACKBONE = _Components(
    attention=Component.ATTENTION,
    experts=Component.ROUTED_EXPERTS,
    shared=Component.SHARED_EXPERTS,
    router=Component.ROUTERS,
    hyper=Component.HYPER_CONNECTIONS,
    norms=Component.LAYER_NORMS,
)
_DRAFT = _Components(
    attention=Component.DSPARK_ATTENTION,
    experts=Component.DSPARK_ROUTED_EXPERTS,
    shared=Component.DSPARK_REST,
    router=Component.DSPARK_REST,
    hyper=Component.DSPARK_REST,
    norms=Component.DSPARK_REST,
)


def expected_tensors(model: Model) -> Iterator[TensorSpec]:
    """Every tensor of the checkpoint, in the order of model_v41.md section 5."""
    for group in tensor_groups(model):
        yield from group.tensors()


def name_pattern(name: str) -> str:
    """The name with `{}` for each of its numbers: the same for all layers and experts."""
    return NUMBER.sub("{}", name)


def totals(model: Model) -> tuple[ComponentTotal, ...]:
    """The parameter table: one row per component that the model has."""
    parameters: dict[Component, int] = {}
    size: dict[Component, int] = {}
    for group in tensor_groups(model):
        component = group.tensor.component
        parameters[component] = (
            parameters.get(component, 0) + group.copies * group.tensor.parameters
        )
        size[component] = size.get(component, 0) + group.copies * group.tensor.nbytes
    return tuple(ComponentTotal(c, parameters[c], size[c]) for c in Component if c in size)


def tensor_groups(model: Model) -> Iterator[TensorGroup]:
    """The same tensors as `expected_tensors`, experts gathered."""
    d, vocab = model.hidden_size, model.vocab_size
    yield _bf16("embed.weight", Component.EMBEDDING, vocab, d)
    yield _bf16("head.weight", Component.HEAD, vocab, d)
    yield _bf16("norm.weight", Component.FINAL_NORM, d)
    if model.vision is not None:
        for name in ("image_start", "image_end", "image_newline"):
            yield _bf16(name, Component.DELIMITERS, d)
    for facts in layer_facts(model):
        prefix = f"layers.{facts.index}"
        yield from _block(prefix, model, model.moe.n_routed_experts, _BACKBONE)
        yield from _compression(f"{prefix}.attn", model, facts)
        if facts.engram:
            yield from _engram(f"{prefix}.engram", model, facts.index)
    for stage in range(model.dspark.num_nextn_predict_layers):
        yield from _draft_stage(stage, model)
    if model.vision is not None:
        yield from _vision(model, model.vision)


def _block(prefix: str, model: Model, experts: int, rows: _Components) -> Iterator[TensorGroup]:
    """What every layer has, drafts included."""
    d = model.hidden_size
    for name in ("attn_norm", "ffn_norm"):
        yield _bf16(f"{prefix}.{name}.weight", rows.norms, d)
    yield from _attention(f"{prefix}.attn", model, rows.attention)
    yield from _moe(f"{prefix}.ffn", model, experts, rows)
    streams = model.hyper_connections.hc_mult
    coefficients = (2 + streams) * streams  # pre, post, and the stream mixing matrix
    for unit in ("attn", "ffn"):
        yield _f32(f"{prefix}.hc_{unit}_fn", rows.hyper, coefficients, streams * d)
        yield _f32(f"{prefix}.hc_{unit}_base", rows.hyper, coefficients)
        yield _f32(f"{prefix}.hc_{unit}_scale", rows.hyper, 3)


def _attention(prefix: str, model: Model, row: Component) -> Iterator[TensorGroup]:
    a, d = model.attention, model.hidden_size
    heads_width = a.num_attention_heads * a.head_dim
    low_rank = a.o_groups * a.o_lora_rank
    yield from _fp8(f"{prefix}.wq_a", row, a.q_lora_rank, d)
    yield _bf16(f"{prefix}.q_norm.weight", row, a.q_lora_rank)
    yield from _fp8(f"{prefix}.wq_b", row, heads_width, a.q_lora_rank)
    yield from _fp8(f"{prefix}.wkv", row, a.head_dim, d)
    yield _bf16(f"{prefix}.kv_norm.weight", row, a.head_dim)
    yield _f32(f"{prefix}.attn_sink", row, a.num_attention_heads)
    yield from _fp8(f"{prefix}.wo_a", row, low_rank, heads_width // a.o_groups)
    yield from _fp8(f"{prefix}.wo_b", row, d, low_rank)


def _compression(prefix: str, model: Model, facts: LayerFacts) -> Iterator[TensorGroup]:
    """Compressor and indexer, as far as the layer owns them."""
    d, hd, ix = model.hidden_size, model.attention.head_dim, model.indexer
    if facts.owns_kv:
        yield _bf16(f"{prefix}.compressor.wkv.weight", Component.COMPRESSORS, hd, d)
        if facts.ratio > 1:  # a group of one token needs no pooling weights
            yield _bf16(f"{prefix}.compressor.wgate.weight", Component.COMPRESSORS, hd, d)
        yield _bf16(f"{prefix}.compressor.norm.weight", Component.COMPRESSORS, hd)
    if facts.selects:
        queries = ix.index_n_heads * ix.index_head_dim
        rank = model.attention.q_lora_rank
        yield from _fp8(f"{prefix}.indexer.wq_b", Component.INDEXERS, queries, rank)
        weights = f"{prefix}.indexer.weights_proj.weight"
        yield _bf16(weights, Component.INDEXERS, ix.index_n_heads, d)
    if facts.owns_index_k:
        yield _bf16(f"{prefix}.indexer.wk.weight", Component.INDEXERS, ix.index_head_dim, hd)
        yield _bf16(f"{prefix}.indexer.k_norm.weight", Component.INDEXERS, ix.index_head_dim)


def _moe(prefix: str, model: Model, experts: int, rows: _Components) -> Iterator[TensorGroup]:
    d, inner = model.hidden_size, model.moe.moe_intermediate_size
    yield _bf16(f"{prefix}.gate.weight", rows.router, experts, d)
    yield _f32(f"{prefix}.gate.bias", rows.router, experts)
    if model.image_routing_bias:
        # Draft layers have it too, although drafts are text: without it the published counts miss.
        yield _f32(f"{prefix}.gate.bias_vl", rows.router, experts)
    for name, out, fan_in in (("w1", inner, d), ("w2", d, inner), ("w3", inner, d)):
        yield from _fp4(f"{prefix}.experts.{{}}.{name}", rows.experts, out, fan_in, experts)
    inner *= model.moe.n_shared_experts
    for name, out, fan_in in (("w1", inner, d), ("w2", d, inner), ("w3", inner, d)):
        yield from _fp8(f"{prefix}.shared_experts.{name}", rows.shared, out, fan_in)


def _engram(prefix: str, model: Model, layer: int) -> Iterator[TensorGroup]:
    e, d, streams = model.engram, model.hidden_size, model.hyper_connections.hc_mult
    entries = e.engram_num_embeddings[e.engram_layer_ids.index(layer)]
    yield _group(
        f"{prefix}.embed.weight",
        StorageDType.F8_E4M3,
        Component.ENGRAM_TABLES,
        entries,
        e.engram_head_dim,
    )
    yield _group(
        f"{prefix}.embed.scale",
        StorageDType.F8_E8M0,
        Component.ENGRAM_TABLES,
        entries,
        _blocks(e.engram_head_dim),
    )
    gathered = (e.engram_max_ngram_size - 1) * e.engram_n_heads * e.engram_head_dim
    row = Component.ENGRAM_PROJECTIONS
    yield from _fp8(f"{prefix}.wkv", row, (streams + 1) * d, gathered)
    yield _bf16(f"{prefix}.q_weight", row, streams, d)
    yield _bf16(f"{prefix}.k_weight", row, streams, d)


def _draft_stage(stage: int, model: Model) -> Iterator[TensorGroup]:
    """A window-only layer; the first stage reads the taps, the last one proposes tokens."""
    prefix, d, ds = f"mtp.{stage}", model.hidden_size, model.dspark
    yield from _block(prefix, model, ds.dspark_n_routed_experts, _DRAFT)
    if stage == 0:
        taps = len(ds.dspark_target_layer_ids) * d
        yield from _fp8(f"{prefix}.main_proj", Component.DSPARK_MAIN, d, taps)
        yield _bf16(f"{prefix}.main_norm.weight", Component.DSPARK_MAIN, d)
    if stage == ds.num_nextn_predict_layers - 1:
        rank, row = ds.dspark_markov_rank, Component.DSPARK_MARKOV
        yield _bf16(f"{prefix}.norm.weight", Component.DSPARK_MAIN, d)
        yield _bf16(f"{prefix}.markov_head.embed.weight", row, model.vocab_size, rank)
        yield _bf16(f"{prefix}.markov_head.head.weight", row, model.vocab_size, rank)
        confidence = f"{prefix}.confidence_head.proj.weight"
        yield _bf16(confidence, Component.DSPARK_CONFIDENCE, 1, d + rank)


def _vision(model: Model, v: Vision) -> Iterator[TensorGroup]:
    d, width, row = model.hidden_size, v.hidden_size, Component.VISION
    yield _bf16("vision.patch_embed.proj.weight", row, width, 3 * v.patch_size**2)
    yield _bf16("vision.patch_embed.proj.bias", row, width)
    for block in range(v.num_hidden_layers):
        prefix = f"vision.blocks.{block}"
        yield _bf16(f"{prefix}.norm1.weight", row, width)
        yield _bf16(f"{prefix}.norm2.weight", row, width)
        yield _bf16(f"{prefix}.attn.wqkv.weight", row, 3 * width, width)
        yield _bf16(f"{prefix}.attn.wqkv.bias", row, 3 * width)
        yield _bf16(f"{prefix}.attn.wo.weight", row, width, width)
        yield _bf16(f"{prefix}.attn.wo.bias", row, width)
        yield _bf16(f"{prefix}.mlp.w1.weight", row, 2 * v.intermediate_size, width)
        yield _bf16(f"{prefix}.mlp.w2.weight", row, width, v.intermediate_size)
    yield _bf16("vision.norm.weight", row, width)
    gathered = width * v.downsample_ratio**2
    for name, fan_in in (("w1", gathered), ("w2", d)):
        yield _bf16(f"aligner.{name}.weight", Component.ALIGNER, d, fan_in)
        yield _bf16(f"aligner.{name}.bias", Component.ALIGNER, d)


def _blocks(size: int) -> int:
    return -(-size // BLOCK)


def _group(
    name: str, dtype: StorageDType, component: Component, *shape: int, copies: int = 1
) -> TensorGroup:
    return TensorGroup(TensorSpec(name, shape, dtype, component), copies)


def _bf16(name: str, component: Component, *shape: int) -> TensorGroup:
    return _group(name, StorageDType.BF16, component, *shape)


def _f32(name: str, component: Component, *shape: int) -> TensorGroup:
    return _group(name, StorageDType.F32, component, *shape)


def _fp8(prefix: str, component: Component, out: int, fan_in: int) -> Iterator[TensorGroup]:
    yield _group(f"{prefix}.weight", StorageDType.F8_E4M3, component, out, fan_in)
    scale = (_blocks(out), _blocks(fan_in))
    yield _group(f"{prefix}.scale", StorageDType.F8_E8M0, component, *scale)


def _fp4(
    prefix: str, component: Component, out: int, fan_in: int, experts: int
) -> Iterator[TensorGroup]:
    packed = (out, fan_in // 2)
    yield _group(f"{prefix}.weight", StorageDType.I8, component, *packed, copies=experts)
    scale = (out, _blocks(fan_in))
    yield _group(f"{prefix}.scale", StorageDType.F8_E8M0, component, *scale, copies=experts)
