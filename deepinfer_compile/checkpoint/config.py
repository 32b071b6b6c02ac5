"""A model as the config.json of its checkpoint, in the published nested layout.

Two facts have no key in the published layout: `image_routing_bias` of a model without an image
tower, and `compressed_vocabulary: identity`. They are written only where they depart from what the
published layout implies.
"""

from __future__ import annotations

from deepinfer_compile.spec.schema import CompressedVocabulary, Model


def hf_config(model: Model) -> dict[str, object]:
    """config.json as a JSON object."""
    config: dict[str, object] = {
        "architectures": ["DeepseekV41ForCausalLM"],
        "model_type": model.architecture,
        "dtype": "bfloat16",
        "bos_token_id": model.bos_token_id,
        "eos_token_id": model.eos_token_id,
        "pad_token_id": model.pad_token_id,
        "quantization_config": model.quantization.model_dump(mode="json"),
        "text_config": _text_config(model),
    }
    if model.vision is not None:
        vision = model.vision.model_dump(mode="json")
        config["image_token_id"] = vision.pop("image_token_id")
        config["vision_config"] = vision
    return config


def _text_config(model: Model) -> dict[str, object]:
    compression = model.compression.model_dump(mode="json", exclude_none=True)
    engram = model.engram.model_dump(mode="json", exclude={"compressed_vocabulary"})
    text: dict[str, object] = {
        "model_type": f"{model.architecture}_text",
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden_size,
        "num_hidden_layers": model.num_hidden_layers,
        "max_position_embeddings": model.max_position_embeddings,
        "rms_norm_eps": model.rms_norm_eps,
        "initializer_range": model.initializer_range,
        "hidden_act": model.hidden_act,
        "attention_bias": model.attention_bias,
        "attention_dropout": model.attention_dropout,
        "tie_word_embeddings": model.tie_word_embeddings,
        **model.attention.model_dump(mode="json"),
        "rope_theta": model.rope.theta,
        "compress_rope_theta": model.rope.compress_theta,
        "rope_scaling": {"type": "yarn", **model.rope.yarn.model_dump(mode="json")},
        "compress_ratios": compression.pop("ratios"),
        **compression,
        **model.indexer.model_dump(mode="json"),
        **model.hyper_connections.model_dump(mode="json"),
        **model.moe.model_dump(mode="json"),
        **engram,
        **model.dspark.model_dump(mode="json"),
    }
    if model.engram.compressed_vocabulary is CompressedVocabulary.IDENTITY:
        text["compressed_vocabulary"] = CompressedVocabulary.IDENTITY.value
    if model.image_routing_bias != (model.vision is not None):
        text["image_routing_bias"] = model.image_routing_bias
    return text
