"""config.json folders read into the same spec as a YAML file, whatever their topology."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from deepinfer_compile.diagnostics import CompileError
from deepinfer_compile.spec.hf import from_hf
from deepinfer_compile.spec.layers import layer_facts
from deepinfer_compile.spec.load import ModelSpec, load_spec
from tests.spec.error_cases import ROOT

Edit = Callable[[dict[str, dict[str, object]]], None]


def load(folder: Path, edit: Edit = lambda config: None, **settings: object) -> ModelSpec:
    config = json.loads((ROOT / "tests" / "spec" / "flash_config.json").read_text())
    edit(config)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    return from_hf(folder, **{"environment": {}, **settings})


def codes(folder: Path, edit: Edit) -> list[str]:
    with pytest.raises(CompileError) as caught:
        load(folder, edit)
    return [diagnostic.code for diagnostic in caught.value.diagnostics]


def test_released_config_is_the_flash_example(tmp_path: Path) -> None:
    flash = load_spec(ROOT / "examples" / "v41_flash.yaml", environment={})
    assert load(tmp_path).model == flash.model


def test_spans_point_into_the_config(tmp_path: Path) -> None:
    spec = load(tmp_path)
    assert spec.file == f"{tmp_path.name}/config.json"
    for key, text in (
        ("model.rope.yarn.factor", '"factor": 16'),
        ("model.compression.kv_source_layer_ids[3]", "20"),
        ("model.vision.image_token_id", '"image_token_id": 129264'),
        ("model.attention.head_dim", '"head_dim": 512'),
    ):
        span = spec.span(key)
        assert span.source[span.col - 1 :][: span.width] == text
        assert (tmp_path / "config.json").read_text().splitlines()[span.line - 1] == span.source


def test_folder_is_the_checkpoint_whatever_the_environment_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path.parent)
    load(tmp_path)
    environment = {"DEEPINFER_HF_MODEL_DIR": "elsewhere"}
    spec = from_hf(tmp_path.name, environment=environment)
    assert spec.checkpoint.model_dump(exclude_none=True) == {"path": tmp_path.name}


def test_engine_limits_are_modest_and_can_be_set(tmp_path: Path) -> None:
    spec = load(tmp_path)
    assert (spec.engine.max_context, spec.engine.page_size, spec.engine.prefill_chunk) == (
        4096,
        64,
        128,
    )
    spec = load(tmp_path, overrides=["engine.max_context=8192"])
    assert spec.engine.max_context == 8192
    assert spec.sources["engine.max_context"] == "--set engine.max_context=8192"

    def short(config: dict[str, dict[str, object]]) -> None:
        config["text_config"]["max_position_embeddings"] = 1000

    assert load(tmp_path, short).engine.max_context == 1000


def test_text_only_checkpoint_has_no_image_bias(tmp_path: Path) -> None:
    def text_only(config: dict[str, dict[str, object]]) -> None:
        del config["vision_config"]

    model = load(tmp_path, text_only).model
    assert model.vision is None
    assert not model.image_routing_bias


def tiny(config: dict[str, dict[str, object]]) -> None:
    """Another topology: KV sources 1, 3, 4, spare Engram rows, three streams, own index keys."""
    del config["vision_config"], config["image_token_id"]
    config["text_config"] |= {
        "vocab_size": 768,
        "hidden_size": 256,
        "moe_intermediate_size": 64,
        "num_hidden_layers": 8,
        "num_nextn_predict_layers": 2,
        "num_attention_heads": 8,
        "q_lora_rank": 64,
        "o_groups": 2,
        "o_lora_rank": 64,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "compress_ratios": [0, 2, 2, 2, 1, 1, 1, 1, 0, 0],
        "kv_source_layer_ids": [1, 3, 4],
        "index_k_source_layer_ids": [1, 3, 4, 6],
        "index_source_layer_ids": [1, 3, 4, 6],
        "candidate_source_layer_id": 4,
        "candidate_topk_blocks": 64,
        "index_n_heads": 16,
        "index_topk": 64,
        "hc_mult": 3,
        "engram_layer_ids": [1, 3],
        "engram_num_embeddings": [1921, 2153],
        "engram_vocab_size": 300,
        "engram_n_heads": 2,
        "engram_head_dim": 128,
        "engram_compressed_vocab_size": 565,
        "dspark_noise_token_id": 760,
        "dspark_target_layer_ids": [5, 6, 7],
        "dspark_markov_rank": 64,
        "dspark_n_routed_experts": 8,
        "dspark_num_experts_per_tok": 2,
    }


def test_another_topology_loads(tmp_path: Path) -> None:
    model = load(tmp_path, tiny).model
    assert model.engram.engram_num_embeddings == (1921, 2153)
    assert model.hyper_connections.hc_mult == 3
    facts = layer_facts(model)
    modes = ["SWA", "Full", "Reuse", "Full", "Full", "Reuse", "Reindex", "Reuse"]
    assert [fact.mode for fact in facts] == modes
    assert [f.index for f in facts if f.owns_index_k] == [1, 3, 4, 6]


@pytest.mark.parametrize("listed", [True, False])
def test_model_without_engram_or_drafts_loads(tmp_path: Path, listed: bool) -> None:
    def bare(config: dict[str, dict[str, object]]) -> None:
        tiny(config)
        text = config["text_config"]
        for name in [name for name in text if name.startswith(("engram_", "dspark_"))]:
            del text[name]
        text["num_nextn_predict_layers"] = 0
        text["compress_ratios"] = [0, 2, 2, 2, 1, 1, 1, 1]
        if listed:
            text["engram_layer_ids"] = []
        else:
            del text["num_nextn_predict_layers"]

    model = load(tmp_path, bare).model
    assert model.engram.engram_layer_ids == model.dspark.dspark_target_layer_ids == ()
    assert not any(fact.engram for fact in layer_facts(model))


def test_token_ids_may_stand_in_the_text_config(tmp_path: Path) -> None:
    def moved(config: dict[str, dict[str, object]]) -> None:
        config["text_config"]["eos_token_id"] = config.pop("eos_token_id")

    assert load(tmp_path, moved).model.eos_token_id == 1


def test_half_an_engram_is_not_none(tmp_path: Path) -> None:
    def half(config: dict[str, dict[str, object]]) -> None:
        del config["text_config"]["engram_layer_ids"]

    assert codes(tmp_path, half) == ["E104"]


@pytest.mark.parametrize("section", ["text_config", "vision_config", "quantization_config"])
def test_section_of_the_wrong_kind_is_named(tmp_path: Path, section: str) -> None:
    def flat(config: dict[str, object]) -> None:
        config[section] = 3

    assert codes(tmp_path, flat)[0] == "E105"


def test_every_number_of_the_config_matters(tmp_path: Path) -> None:
    """Dropping any key but the known optional ones is noticed."""
    config = json.loads((ROOT / "tests" / "spec" / "flash_config.json").read_text())
    optional = {"model_type", "hidden_act", "attention_bias", "attention_dropout", "type"}
    optional |= {"initializer_range", "tie_word_embeddings"}
    sections = (
        config["text_config"],
        config["text_config"]["rope_scaling"],
        config["quantization_config"],
    )
    for section in sections:
        for name in [name for name in section if name not in optional]:
            value = section.pop(name)
            (tmp_path / "config.json").write_text(json.dumps(config))
            with pytest.raises(CompileError, match=name):
                from_hf(tmp_path, environment={})
            section[name] = value


def test_missing_folder_is_an_error_of_the_spec(tmp_path: Path) -> None:
    with pytest.raises(CompileError, match=r"error\[E101\]: no such folder"):
        from_hf(tmp_path / "nowhere", environment={})


def test_written_checkpoints_say_what_their_layout_does_not_imply(tmp_path: Path) -> None:
    def departing(config: dict[str, dict[str, object]]) -> None:
        tiny(config)
        config["text_config"] |= {
            "image_routing_bias": True,
            "compressed_vocabulary": "identity",
            "engram_compressed_vocab_size": 768,
        }

    model = load(tmp_path, departing).model
    assert model.image_routing_bias
    assert model.engram.compressed_vocabulary == "identity"
