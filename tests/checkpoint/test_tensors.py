"""The tensor table against the published totals of DeepSeek-V4.1-Flash and the small models."""

from __future__ import annotations

import time

import pytest

from deepinfer_compile.checkpoint.tensors import (
    StorageDType,
    TensorSpec,
    expected_tensors,
    tensor_groups,
    totals,
)
from deepinfer_compile.spec.load import load_spec
from deepinfer_compile.spec.schema import Model
from tests.checkpoint.models import REPO, edited, nano

# model_v41.md section 1.5, every row.
PUBLISHED = {
    "token embedding": (661_913_600, 1_323_827_200),
    "lm head": (661_913_600, 1_323_827_200),
    "final norm": (5_120, 10_240),
    "attention core": (5_064_696_320, 5_069_721_600),
    "compressors": (18_352_128, 36_704_256),
    "indexers": (43_516_416, 45_130_752),
    "routed experts": (543_581_798_400, 288_777_830_400),
    "shared experts": (1_415_577_600, 1_416_960_000),
    "routers": (78_673_920, 157_409_280),
    "mHC coefficients": (39_323_760, 157_295_040),
    "layer norms": (409_600, 819_200),
    "Engram tables": (196_613_849_600, 202_758_032_400),
    "Engram wkv + q/k weights": (314_654_720, 315_043_840),
    "DSpark attention": (379_852_224, 380_229_120),
    "DSpark routed experts": (13_589_544_960, 7_219_445_760),
    "DSpark shared / router / mHC / norms": (111_115_170, 122_065_800),
    "DSpark main_proj + norms": (78_653_440, 78_740_480),
    "DSpark Markov head": (66_191_360, 132_382_720),
    "DSpark confidence head": (5_376, 10_752),
    "vision tower": (411_842_560, 823_685_120),
    "aligner": (73_410_560, 146_821_120),
    "image delimiters": (15_360, 30_720),
}


@pytest.fixture(scope="module")
def flash() -> Model:
    return load_spec(REPO / "examples/v41_flash.yaml", environment={}).model


def test_totals_are_the_published_rows(flash: Model) -> None:
    rows = totals(flash)
    assert {row.component: (row.parameters, row.bytes) for row in rows} == PUBLISHED
    assert sum(row.parameters for row in rows) == 763_205_315_794
    assert sum(row.bytes for row in rows) == 510_286_023_000
    backbone = sum(row.parameters for row in rows if row.component.backbone)
    assert backbone == 551_566_180_464


def test_the_real_model_is_listed_quickly(flash: Model) -> None:
    start = time.perf_counter()
    rows = totals(flash)
    assert rows
    assert time.perf_counter() - start < 2
    names = [tensor.name for tensor in expected_tensors(flash)]
    assert len(names) == len(set(names)) == 96_085
    assert sum(name.startswith("mtp.") for name in names) == 2_401


def test_shapes_of_the_real_model(flash: Model) -> None:
    """One tensor of each kind that the section 5 table spells out, with the number it has there."""
    shape = {t.name: t.shape for t in expected_tensors(flash)}
    assert shape["layers.0.attn.wo_a.weight"] == (8192, 4096)
    assert shape["layers.0.attn.wo_a.scale"] == (256, 128)
    assert shape["layers.39.ffn.experts.383.w2.weight"] == (5120, 1152)
    assert shape["layers.39.ffn.experts.383.w2.scale"] == (5120, 72)
    assert shape["layers.14.engram.embed.scale"] == (384016682, 8)
    assert shape["mtp.2.confidence_head.proj.weight"] == (1, 5376)
    assert shape["vision.blocks.31.mlp.w1.weight"] == (5632, 1024)
    assert shape["aligner.w1.weight"] == (5120, 9216)
    assert "layers.20.attn.compressor.wgate.weight" not in shape  # ratio 1 pools nothing
    assert "layers.14.attn.compressor.wgate.weight" in shape
    assert "layers.24.attn.indexer.wq_b.weight" in shape
    assert "layers.24.attn.indexer.wk.weight" not in shape  # keys of layer 20


def test_small_models_have_the_documented_parameters() -> None:
    for name, parameters in (("nano", 1_769_524), ("kshape", 223_808_286)):
        model = load_spec(REPO / f"examples/v41_{name}.yaml", environment={}).model
        assert sum(row.parameters for row in totals(model)) == parameters, name


def test_micro_has_the_documented_text_parameters() -> None:
    model = load_spec(REPO / "examples/v41_micro.yaml", environment={}).model
    image = ("vision tower", "aligner", "image delimiters")
    text = sum(row.parameters for row in totals(model) if row.component not in image)
    assert text == 19_326_418


def test_groups_and_tensors_agree() -> None:
    model = nano()
    by_tensor = sum(tensor.nbytes for tensor in expected_tensors(model))
    assert by_tensor == sum(group.copies * group.tensor.nbytes for group in tensor_groups(model))
    assert by_tensor == sum(row.bytes for row in totals(model))


def test_a_model_without_drafts_has_no_draft_tensors() -> None:
    model = edited(
        nano(),
        **{
            "dspark.num_nextn_predict_layers": 0,
            "compression.ratios": (0, 0, 2, 2, 2, 1, 1, 1),
        },
    )
    assert not [t.name for t in expected_tensors(model) if t.name.startswith("mtp.")]


def test_packed_codes_count_twice_and_scales_not_at_all() -> None:
    packed = TensorSpec("w", (4, 16), StorageDType.I8, next(iter(totals(nano()))).component)
    scale = TensorSpec("s", (4, 1), StorageDType.F8_E8M0, packed.component)
    assert (packed.parameters, packed.nbytes) == (128, 64)
    assert (scale.parameters, scale.nbytes) == (0, 4)
