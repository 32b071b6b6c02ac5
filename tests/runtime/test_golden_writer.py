"""The golden writer over a pretended model: chunks, layers, shapes and dtypes end up right."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from deepinfer_compile.format.plan import Phase, Probe
from deepinfer_compile.runtime.errors import EngineError
from deepinfer_compile.runtime.golden import write_golden
from deepinfer_compile.runtime.loader import load_engine
from tests.runtime.made import write_safetensors
from tests.runtime.pretend import PLAN, next_token, pretend_engine

MIXED, LOGPROB = 15, 11
PROMPT = [(i * 37) % 250 + 2 for i in range(20)]  # three chunks of at most eight
FORCED = [3, 200, 17]


def probed_plan(dtype, *names):
    """`PLAN` with probes of these names over the value between its two steps."""
    buffers = list(PLAN.buffers)
    buffers[MIXED] = replace(buffers[MIXED], dtype=dtype)
    probes = tuple(Probe(name, MIXED, 1) for name in names)
    prefill, decode, sample = PLAN.phases
    phases = (
        replace(prefill, probes=probes),
        decode,
        Phase("sample", sample.buckets, sample.steps, (Probe("logits", LOGPROB, 1),)),
    )
    return replace(PLAN, buffers=tuple(buffers), phases=phases)


def written(tmp_path, plan):
    engine = load_engine(pretend_engine(tmp_path / "e", plan), threads=1)
    paths = write_golden(engine.executor, tmp_path / "vectors", tmp_path / "out/deep")
    engine.close()
    return {path.name: load_file(path) for path in paths}


def vectors(tmp_path, tag, tensors):
    (tmp_path / "vectors").mkdir(exist_ok=True)
    save_file(tensors, tmp_path / f"vectors/golden_{tag}.safetensors")


def logits(known):
    return [next_token(known[: i + 1])[1] for i in range(len(known))]


def test_a_prompt_gives_logits_of_every_position_and_forced_decode(tmp_path):
    vectors(
        tmp_path,
        "short",
        {
            "input_ids": np.array(PROMPT, dtype=np.int32),
            "prefill.logits": np.zeros((20, 1), dtype=np.float16),
            "decode.greedy_tokens": np.array(FORCED, dtype=np.int32),
            "decode.logits": np.zeros((3, 1), dtype=np.float32),
            "prefill.router_idx": np.zeros((2, 20, 1), dtype=np.int32),
            "prefill.engram_hashes": np.zeros((20, 1, 1), dtype=np.int32),
        },
    )
    names = ("layers.10.experts", "layers.9.experts", "layers.2.engram_rows", "hidden")
    found = written(tmp_path, probed_plan("i32", *names))["golden_short.safetensors"]
    wanted = np.array(logits(PROMPT + FORCED))
    assert found["prefill.logits"].dtype == np.float16
    assert np.array_equal(found["prefill.logits"].ravel(), wanted[:20])
    assert np.array_equal(found["decode.logits"].ravel(), wanted[20:])
    assert found["prefill.router_idx"].shape == (2, 20, 1)
    assert len(np.unique(found["prefill.router_idx"])) == 20, "every row has its own value"
    assert found["prefill.engram_hashes"].shape == (20, 1, 1)
    assert np.array_equal(
        found["prefill.engram_hashes"].ravel(), found["prefill.router_idx"][1].ravel()
    )


def test_layers_are_ordered_by_number_and_inputs_are_forced(tmp_path):
    forced = np.arange(2 * 20, dtype=np.float32).reshape(2, 20, 1) + 1
    vectors(
        tmp_path,
        "teacher",
        {
            "input_ids": np.array(PROMPT, dtype=np.int32),
            "pre_mix_in": forced,
            "h_in": np.zeros((0, 20, 1), dtype=np.float32),
            "attn_out": np.zeros((2, 20, 1), dtype=np.float16),
            "ffn_out": np.zeros((1, 20, 1), dtype=np.float32),
        },
    )
    parts = ("layers.0.pre", "layers.0.attn_out", "layers.1.pre", "layers.1.attn_out")
    names = (*parts, "layers.1.ffn_out", "layers.2.pre")
    found = written(tmp_path, probed_plan("f32", *names))["golden_teacher.safetensors"]
    assert np.array_equal(found["attn_out"], forced.astype(np.float16))
    assert np.array_equal(found["ffn_out"], forced[1:])


def test_selections_take_the_golden_width_and_candidates_become_a_mask(tmp_path):
    from deepinfer_compile.runtime.golden import Golden, _sets, _Taps
    from deepinfer_compile.runtime.shards import read_file

    golden = {
        "prefill.topk_idxs": ("I16", [2, 2, 3], bytes(24)),
        "prefill.candidate_blocks": ("BOOL", [2, 4], bytes(8)),
    }
    file = write_safetensors(tmp_path / "golden_x.safetensors", golden)
    taps = _Taps()
    taps.add("layers.3.selected", np.array([[4, -1, -1, -1]], dtype=np.int32))
    taps.add("layers.3.selected", np.array([[0, 4, 5, -1]], dtype=np.int32))
    taps.add("layers.1.selected", np.array([[7, 8], [1, -1]], dtype=np.int32))
    taps.add("layers.3.candidates", np.array([[0, -1], [1, 3]], dtype=np.int32))
    found = _sets(Golden(file, read_file(file)), taps, 2)
    assert found["prefill.topk_idxs"].dtype == np.int16
    assert found["prefill.topk_idxs"].tolist() == [
        [[7, 8, -1], [1, -1, -1]],
        [[4, -1, -1], [0, 4, 5]],
    ]
    assert found["prefill.candidate_blocks"].tolist() == [
        [True, False, False, False],
        [False, True, False, True],
    ]


def test_an_engine_without_probes_is_refused_with_the_command(tmp_path):
    prefill, *rest = PLAN.phases
    plan = replace(PLAN, phases=(replace(prefill, probes=()), *rest))
    with pytest.raises(EngineError, match="--probes") as caught:
        written(tmp_path, plan)
    assert (caught.value.code, caught.value.exit_code) == ("E465", 4)


def test_a_folder_without_vectors_and_a_file_without_logits_are_refused(tmp_path):
    plan = probed_plan("i32", "hidden")
    with pytest.raises(EngineError, match="no golden_"):
        written(tmp_path, plan)
    vectors(tmp_path, "bare", {"x": np.zeros(1, dtype=np.int32)})
    with pytest.raises(EngineError, match="no usable `input_ids`"):
        write_again(tmp_path)


def write_again(tmp_path):
    engine = load_engine(tmp_path / "e", threads=1)
    return write_golden(engine.executor, tmp_path / "vectors", tmp_path / "out")
