"""A written-out spec reads back equal, holds every setting, and says what each is for."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepinfer_compile.spec.emit import emit_spec
from deepinfer_compile.spec.hf import from_hf
from deepinfer_compile.spec.load import ModelSpec, assemble, load_spec
from deepinfer_compile.spec.schema import Checkpoint
from deepinfer_compile.spec.tree import parse_tree, parse_value
from deepinfer_compile.spec.validate import schema_paths
from tests.spec.error_cases import ROOT

EXAMPLES = sorted((ROOT / "examples").glob("*.yaml"))
NANO = load_spec(ROOT / "examples" / "v41_nano.yaml", environment={})


def again(text: str) -> ModelSpec:
    return assemble(parse_tree(text, "again.yaml"), environment={})


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_written_spec_reads_back_equal_and_stays_the_same(path: Path) -> None:
    spec = load_spec(path, environment={})
    text = emit_spec(spec)
    assert again(text) == spec
    assert emit_spec(again(text)) == text
    assert max(map(len, text.splitlines())) <= 100


def test_written_config_needs_no_checkpoint_folder(tmp_path: Path) -> None:
    config = (ROOT / "tests" / "spec" / "flash_config.json").read_text()
    (tmp_path / "config.json").write_text(config)
    spec = from_hf(tmp_path, environment={}, overrides=["engine.max_rows=16"])
    assert again(emit_spec(spec)) == spec


def test_every_setting_is_written_in_the_order_of_the_schema() -> None:
    spec = load_spec(ROOT / "examples" / "v41_flash.yaml", environment={})
    written = [key for key in again(emit_spec(spec)).spans if key and "[" not in key]
    unsaid = {
        "model.compression.index_k_source_layer_ids",
        "model.vision.max_wh_ratio",
        "checkpoint.path",
        "checkpoint.synthetic",
        "engine.cache_tokens",
        "engine.prefix_snapshots",
    }
    assert written == [key for key in schema_paths() if key not in unsaid]


@given(st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=30))
def test_any_folder_name_survives(name: str) -> None:
    spec = ModelSpec(NANO.model, Checkpoint(path=name), NANO.engine, {}, "")
    (line,) = [line for line in emit_spec(spec).split("\n") if line.startswith("  path: ")]
    assert parse_value(line.removeprefix("  path: ")) == name
