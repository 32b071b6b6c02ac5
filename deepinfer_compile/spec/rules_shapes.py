"""Rules about sizes: quantisation groups, heads, experts, Engram tables, token ids, rope.

The multiples of 32 of model_v41.md section 10.1 that follow from those checked here (heads times
head_dim, streams times hidden_size, taps times hidden_size) are not checked again.
`rules.py` has the table of codes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from deepinfer_compile.spec.engram import bucket_primes, rows
from deepinfer_compile.spec.schema import CompressedVocabulary, Model
from deepinfer_compile.spec.tree import Problem

_MOST_HASHES = 1024  # the released model has 24; the bound keeps the walk over primes short


def _groups_of_32(model: Model) -> Iterator[Problem]:
    attention = model.attention
    for key, size in (
        ("model.hidden_size", model.hidden_size),
        ("model.attention.head_dim", attention.head_dim),
        ("model.attention.q_lora_rank", attention.q_lora_rank),
        ("model.indexer.index_head_dim", model.indexer.index_head_dim),
        ("model.moe.moe_intermediate_size", model.moe.moe_intermediate_size),
        ("model.engram.engram_head_dim", model.engram.engram_head_dim),
    ):
        if size % 32:
            leaf = key.rpartition(".")[2]
            message = f"`{leaf}` is {size}, but must be a multiple of 32"
            yield Problem("E134", key, message, notes=("quantisation groups are 32 wide",))
    wide = attention.o_groups * attention.o_lora_rank
    if wide % 32:
        message = f"`o_groups` times `o_lora_rank` is {wide}, but must be a multiple of 32"
        yield Problem("E134", "model.attention.o_lora_rank", message)


def _rotated(model: Model) -> Iterator[Problem]:
    rotated = model.attention.qk_rope_head_dim
    key = "model.attention.qk_rope_head_dim"
    if rotated % 2:
        message = f"`qk_rope_head_dim` is {rotated}, but channels turn in pairs"
        yield Problem("E135", key, message)
    for name, size in (
        ("head_dim", model.attention.head_dim),
        ("index_head_dim", model.indexer.index_head_dim),
    ):
        if rotated > size:
            message = f"`qk_rope_head_dim` is {rotated}, more than `{name}`, {size}"
            yield Problem("E135", key, message)


def _output_groups(model: Model) -> Iterator[Problem]:
    heads, groups = model.attention.num_attention_heads, model.attention.o_groups
    if heads % groups:
        message = f"{heads} heads do not divide into {groups} output groups"
        yield Problem("E136", "model.attention.o_groups", message)


def _experts(model: Model) -> Iterator[Problem]:
    pairs = [
        ("model.moe.", "n_routed_experts", model.moe.n_routed_experts),
        ("model.moe.", "num_experts_per_tok", model.moe.num_experts_per_tok),
    ]
    if model.dspark.num_nextn_predict_layers:
        pairs += [
            ("model.dspark.", "dspark_n_routed_experts", model.dspark.dspark_n_routed_experts),
            (
                "model.dspark.",
                "dspark_num_experts_per_tok",
                model.dspark.dspark_num_experts_per_tok,
            ),
        ]
    for (section, all_name, count), (_, few_name, chosen) in zip(
        pairs[::2], pairs[1::2], strict=True
    ):
        if count % 4:
            message = f"`{all_name}` is {count}, but must be a multiple of 4"
            yield Problem("E137", section + all_name, message)
        if chosen > count:
            message = f"`{few_name}` is {chosen}, more than the {count} experts there are"
            yield Problem("E137", section + few_name, message)


def _engram_tables(model: Model) -> Iterator[Problem]:
    engram = model.engram
    layers, tables = engram.engram_layer_ids, engram.engram_num_embeddings
    key = "model.engram.engram_num_embeddings"
    if len(layers) != len(tables):
        message = f"{len(tables)} Engram tables for {len(layers)} Engram layers"
        yield Problem("E131", key, message)
        return
    buckets = (engram.engram_max_ngram_size - 1) * engram.engram_n_heads
    if buckets > _MOST_HASHES:
        message = f"{buckets} hashes per token, more than the {_MOST_HASHES} the compiler takes"
        yield Problem("E131", "model.engram.engram_n_heads", message)
        return
    # A bucket has at least engram_vocab_size rows: if that is too much already, walk no primes.
    least = buckets * engram.engram_vocab_size
    walked = all(size >= least for size in tables)
    primes = bucket_primes(model) if walked else ()
    needs = [rows(columns) for columns in primes] if walked else [least] * len(tables)
    for at, (layer, size, need) in enumerate(zip(layers, tables, needs, strict=True)):
        if size < need:
            message = f"the table of Engram layer {layer} has {size} rows, but hashes reach "
            message += f"{need}" if walked else f"more than {need}"
            yield Problem("E131", f"{key}[{at}]", message)


def _engram_vocabulary(model: Model) -> Iterator[Problem]:
    engram = model.engram
    small, whole = engram.engram_compressed_vocab_size, model.vocab_size
    if not engram.engram_layer_ids:
        return
    key = "model.engram.engram_compressed_vocab_size"
    if small > whole:
        message = f"{small} compressed ids, more than the {whole} tokens they stand for"
        yield Problem("E132", key, message)
    identity = engram.compressed_vocabulary is CompressedVocabulary.IDENTITY
    if identity and small < whole:
        message = f"`compressed_vocabulary: identity` needs {whole} compressed ids, found {small}"
        yield Problem("E132", key, message)


def _token_ids(model: Model) -> Iterator[Problem]:
    ids = [
        ("model.bos_token_id", model.bos_token_id),
        ("model.eos_token_id", model.eos_token_id),
        ("model.pad_token_id", model.pad_token_id),
    ]
    if model.engram.engram_layer_ids:
        ids.append(("model.engram.engram_pad_token_id", model.engram.engram_pad_token_id))
    if model.dspark.num_nextn_predict_layers:
        ids.append(("model.dspark.dspark_noise_token_id", model.dspark.dspark_noise_token_id))
    if model.vision is not None:
        ids.append(("model.vision.image_token_id", model.vision.image_token_id))
    for key, token in ids:
        if token >= model.vocab_size:
            leaf, last = key.rpartition(".")[2], model.vocab_size - 1
            message = f"`{leaf}` is {token}, but the last token is {last}"
            yield Problem("E138", key, message)


def _rope(model: Model) -> Iterator[Problem]:
    for name, base in (("theta", model.rope.theta), ("compress_theta", model.rope.compress_theta)):
        if base <= 1:
            message = f"`{name}` is {base:g}, but a rope base must be greater than 1"
            yield Problem("E139", f"model.rope.{name}", message)
    yarn = model.rope.yarn
    if yarn.beta_fast <= yarn.beta_slow:
        message = f"`beta_fast` is {yarn.beta_fast:g}, not greater than `beta_slow`, "
        yield Problem("E139", "model.rope.yarn.beta_fast", f"{message}{yarn.beta_slow:g}")


def _vision(model: Model) -> Iterator[Problem]:
    vision = model.vision
    if vision is None:
        return
    if vision.hidden_size % vision.num_attention_heads:
        message = f"{vision.num_attention_heads} heads do not divide width {vision.hidden_size}"
        yield Problem("E140", "model.vision.num_attention_heads", message)
    if not model.image_routing_bias:
        message = "a model with `vision` routes images by a bias of their own"
        help = "set image_routing_bias: true, or leave the vision section out"
        yield Problem("E140", "model.vision", message, help=help)


SHAPE_RULES: tuple[Callable[[Model], Iterator[Problem]], ...] = (
    _groups_of_32,
    _rotated,
    _output_groups,
    _experts,
    _engram_tables,
    _engram_vocabulary,
    _token_ids,
    _rope,
    _vision,
)
