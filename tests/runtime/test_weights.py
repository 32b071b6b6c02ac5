"""Where weights are looked for, what is checked, and that buffers hold the right bytes."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest

from deepinfer_compile.format.manifest import CheckpointOrigin
from deepinfer_compile.format.recipes import tensor_table_sha256
from deepinfer_compile.runtime.errors import EngineError
from deepinfer_compile.runtime.files import FolderFiles
from deepinfer_compile.runtime.settings import ALL_TOKENS, Drawing, read_settings
from deepinfer_compile.runtime.shards import read_file, read_folder
from deepinfer_compile.runtime.weights import (
    WeightSource,
    find_weights,
    load_weights,
)
from tests.runtime.made import MANIFEST, PLAN, checkpoint_tensors, make_engine, write_safetensors

NOTHING = read_settings({})
EXPERTS = b"".join(bytes([e]) * 32 for e in range(3))


def load(tmp_path, tensors, headers=""):
    engine = make_engine(tmp_path / "e")
    write_safetensors(tmp_path / "ckpt/model.safetensors", tensors)
    source = WeightSource(tmp_path / "ckpt", False, "--checkpoint")
    return load_weights(FolderFiles(engine), PLAN, source, headers)


def content(weights):
    return [weights.by_buffer[i].tobytes() for i in range(3)]


EXPECTED = [bytes(range(64)), EXPERTS, np.arange(3, dtype=np.int32).tobytes()]


def test_a_checkpoint_fills_every_buffer(tmp_path):
    weights = load(tmp_path, checkpoint_tensors())
    assert content(weights) == EXPECTED
    assert (weights.mapped, weights.copied) == (64 + 12, 96)
    assert not weights.by_buffer[0].flags.writeable


def test_a_leading_model_is_dropped(tmp_path):
    tensors = {f"model.{name}": value for name, value in checkpoint_tensors().items()}
    assert content(load(tmp_path, tensors)) == EXPECTED


def test_a_misaligned_tensor_is_copied_not_mapped(tmp_path):
    tensors = {"pad": ("U8", [1], b"x"), **checkpoint_tensors()}
    weights = load(tmp_path, tensors)
    assert content(weights) == EXPECTED
    assert weights.by_buffer[0].__array_interface__["data"][0] % 2 == 0


def test_shards_are_found_through_the_index(tmp_path):
    engine = make_engine(tmp_path / "e")
    tensors = checkpoint_tensors()
    names = list(tensors)
    weight_map = {}
    for number, some in enumerate((names[:2], names[2:])):
        file = f"model-{number}.safetensors"
        write_safetensors(tmp_path / "ckpt" / file, {name: tensors[name] for name in some})
        weight_map |= dict.fromkeys(some, file)
    index = tmp_path / "ckpt/model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    source = WeightSource(tmp_path / "ckpt", False, "--checkpoint")
    assert content(load_weights(FolderFiles(engine), PLAN, source, "")) == EXPECTED


def test_all_tensor_problems_are_reported_together(tmp_path):
    tensors = checkpoint_tensors()
    tensors["embed.weight"] = ("F16", [8, 4], bytes(64))
    tensors["layers.0.experts.1.w1"] = ("I8", [8, 4], bytes(32))
    del tensors["layers.0.experts.2.w1"]
    with pytest.raises(EngineError) as caught:
        load(tmp_path, tensors)
    assert (caught.value.code, caught.value.exit_code) == ("E461", 4)
    assert caught.value.notes == (
        "`embed.weight` is F16 [8, 4], the engine was compiled for BF16 [8, 4]",
        "`layers.0.experts.1.w1` is I8 [8, 4], the engine was compiled for I8 [4, 8]",
        "`layers.0.experts.2.w1` is missing (I8 [4, 8] expected)",
    )
    assert caught.value.where == f"{tmp_path / 'ckpt'} (--checkpoint)"


def test_the_tensor_table_hash_must_match(tmp_path):
    table = tensor_table_sha256(PLAN.weights)
    load(tmp_path, checkpoint_tensors(), headers=table)
    with pytest.raises(EngineError, match="name different checkpoint tensors"):
        load(tmp_path / "again", checkpoint_tensors(), headers=table[::-1])


def test_packed_weights_are_named_by_buffer(tmp_path):
    engine = make_engine(tmp_path / "e")
    packed = {
        "embed.weight": ("BF16", [8, 4], bytes(range(64))),
        "layers.0.w1": ("I8", [3, 4, 8], EXPERTS),
    }
    file = write_safetensors(engine / "weights/model.safetensors", packed)
    weights = load_weights(FolderFiles(engine), PLAN, WeightSource(file, True, "packed"), "")
    assert content(weights) == EXPECTED
    assert weights.copied == 0


def test_packed_weights_of_another_size_are_refused(tmp_path):
    engine = make_engine(tmp_path / "e")
    packed = {
        "embed.weight": ("BF16", [8, 4], bytes(64)),
        "layers.0.w1": ("I8", [2, 4, 8], bytes(64)),
    }
    file = write_safetensors(engine / "weights/model.safetensors", packed)
    with pytest.raises(EngineError, match=r"`layers\.0\.w1` has 64 bytes, the plan says 96"):
        load_weights(FolderFiles(engine), PLAN, WeightSource(file, True, "packed"), "")


def origin(repo="", revision="", packed=False):
    return dataclasses.replace(
        MANIFEST, checkpoint=CheckpointOrigin(repo, revision, "", packed=packed)
    )


def test_sources_are_tried_in_order(tmp_path):
    cache = tmp_path / "hub"
    snapshot = cache / "models--org--name/snapshots/abc"
    snapshot.mkdir(parents=True)
    here = dataclasses.replace(NOTHING, model_dir=tmp_path / "env", hub_cache=cache)
    manifest = origin("org/name", "abc", packed=True)

    def found(**without):
        settings = dataclasses.replace(here, **without)
        return find_weights(tmp_path, manifest, None, settings)

    named = find_weights(tmp_path, manifest, tmp_path / "named", here)
    assert (named.place, named.reason) == (tmp_path / "named", "--checkpoint")
    assert found().reason == "DEEPINFER_HF_MODEL_DIR"
    assert found(model_dir=None).place == tmp_path / "weights/model.safetensors"
    manifest = origin("org/name", "abc")
    assert found(model_dir=None).place == snapshot


def test_packed_random_weights_do_not_follow_the_environment(tmp_path):
    settings = dataclasses.replace(NOTHING, model_dir=tmp_path)
    source = find_weights(tmp_path, origin(packed=True), None, settings)
    assert source.packed


def test_no_weights_is_an_error_with_the_command_that_fetches_them(tmp_path):
    with pytest.raises(EngineError) as caught:
        find_weights(tmp_path, origin("org/name", "abc"), None, NOTHING)
    assert (caught.value.code, caught.value.exit_code) == ("E460", 4)
    assert caught.value.help == "fetch them: hf download org/name --revision abc"
    with pytest.raises(EngineError, match="--checkpoint DIR"):
        find_weights(tmp_path, origin(), None, NOTHING)


def test_a_named_folder_is_refused_not_skipped(tmp_path):
    engine = make_engine(tmp_path / "e")
    with pytest.raises(EngineError, match=r"absent \(--checkpoint\)"):
        load_weights(
            FolderFiles(engine), PLAN, WeightSource(tmp_path / "absent", False, "--checkpoint"), ""
        )


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "the file is empty"),
        (b"\xff" * 16, "header length"),
        ((4).to_bytes(8, "little") + b"{]}}", "not JSON"),
        ((2).to_bytes(8, "little") + b"[]", "not a JSON object"),
    ],
)
def test_damaged_files_are_refused(tmp_path, content, message):
    (tmp_path / "x.safetensors").write_bytes(content)
    with pytest.raises(EngineError, match=message):
        read_file(tmp_path / "x.safetensors")


@pytest.mark.parametrize("offsets", [[0, 65], [-1, 63], [4, 2], [0, 63]])
def test_byte_ranges_must_lie_in_the_file_and_fit_the_shape(tmp_path, offsets):
    header = {"w": {"dtype": "BF16", "shape": [8, 4], "data_offsets": offsets}}
    text = json.dumps(header).encode()
    (tmp_path / "x").write_bytes(len(text).to_bytes(8, "little") + text + bytes(64))
    with pytest.raises(EngineError, match="tensor `w`"):
        read_file(tmp_path / "x")


def test_an_index_may_not_lead_out_of_the_folder(tmp_path):
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"w": "../x.safetensors"}}))
    with pytest.raises(EngineError, match="plain file names"):
        read_folder(tmp_path)


def test_the_environment_is_read_as_hugging_face_does():
    assert read_settings({"HF_HUB_CACHE": "/a", "HF_HOME": "/b"}).hub_cache.as_posix() == "/a"
    assert read_settings({"HF_HOME": "/b"}).hub_cache.as_posix() == "/b/hub"
    assert read_settings({"HOME": "/h"}).hub_cache.as_posix() == "/h/.cache/huggingface/hub"
    assert read_settings({}).hub_cache is None
    assert read_settings({"DEEPINFER_HF_MODEL_DIR": " "}).model_dir is None


def test_what_is_drawn_comes_from_deepinfers_variables():
    assert read_settings({}).drawing == ALL_TOKENS == Drawing((), 0, False)
    given = {
        "DEEPINFER_DECODE_TOKEN_BLACKLIST": " 5, 17,,3 ",
        "DEEPINFER_SAMPLER_FORCE_TOPK": "40",
        "DEEPINFER_COMPUTE_SUM_SMALLER_PROBS": "1",
    }
    assert read_settings(given).drawing == Drawing((5, 17, 3), 40, True)
    for text in ("5,x,-1", "5 7", "²"):
        with pytest.raises(EngineError, match="token ids with commas between, found `"):
            read_settings({"DEEPINFER_DECODE_TOKEN_BLACKLIST": text})
    for text in ("many", "1.5"):
        with pytest.raises(EngineError, match=f"whole number, found `{text}`"):
            read_settings({"DEEPINFER_SAMPLER_FORCE_TOPK": text})
    for name in ("DEEPINFER_SAMPLER_FORCE_TOPK", "DEEPINFER_PROFILE_HTTP_PORT_BASE"):
        for text in ("-1", "9999999999"):
            with pytest.raises(EngineError, match=f"{name}` must be 0 to .* found `{text}`"):
                read_settings({name: text})
    assert read_settings({"DEEPINFER_LOGGING_INTERVAL_STEP": "-1"}).log_interval == 0


def test_threads_come_from_the_environment_or_the_cpus():
    assert read_settings({"OMP_NUM_THREADS": "3,2"}).threads == 3
    assert read_settings({}).threads >= 1
    with pytest.raises(EngineError, match="found `many`"):
        read_settings({"OMP_NUM_THREADS": "many"})
