"""Ready or not: other weights, a wrong constant in a kernel, wrong numbers, and nothing wrong."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
from contextlib import closing

import numpy as np
import pytest
from deepinfer_targets.cpu.isas import X86_64_V3, flags
from deepinfer_targets.cpu.toolchain import FLAGS

from deepinfer_compile.checkpoint.synthetic import write_checkpoint
from deepinfer_compile.format import jsons
from deepinfer_compile.format.oracle import VALUES
from deepinfer_compile.format.plan import MemoryClass
from deepinfer_compile.runtime.errors import NotReady
from deepinfer_compile.runtime.executor import Executor
from deepinfer_compile.runtime.folder import open_folder
from deepinfer_compile.runtime.loader import load_engine
from deepinfer_compile.runtime.oracle import Trial, check_numbers
from deepinfer_compile.runtime.shards import TensorView, read_file
from deepinfer_compile.runtime.weights import WeightSource, load_weights
from deepinfer_compile.spec.load import load_spec
from tests.engines import REPO, golden_engine
from tests.golden_data import golden_root


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """What the nano engine was compiled from."""
    folder = tmp_path_factory.mktemp("oracle") / "checkpoint"
    spec = load_spec(REPO / "examples/v41_nano.yaml", environment={})
    write_checkpoint(spec.model, folder, seed=spec.checkpoint.synthetic)
    return folder


@pytest.fixture
def copy(checkpoint, tmp_path):
    shutil.copytree(checkpoint, tmp_path / "checkpoint")
    return tmp_path / "checkpoint"


def change(folder, name, how):
    """Replace a tensor's bytes by `how` of them."""
    for file in sorted(folder.glob("*.safetensors")):
        content = bytearray(file.read_bytes())
        length = int.from_bytes(content[:8], "little")
        header = json.loads(content[8 : 8 + length])
        if name in header:
            begin, end = (8 + length + at for at in header[name]["data_offsets"])
            content[begin:end] = how(bytes(content[begin:end]))
            file.write_bytes(content)
            return
    raise AssertionError(name)


def refusal(*arguments, **options) -> NotReady:
    with pytest.raises(NotReady) as caught:
        load_engine(*arguments, **options)
    assert caught.value.exit_code == 1
    return caught.value


def library_of(folder):
    return folder.path / folder.manifest.libraries[0].path


def trial_of(engine, weights_from, threads=1):
    """The oracle's prompt on any weights, whatever their fingerprints."""
    folder = open_folder(engine)
    source = WeightSource(weights_from, False, "test")
    weights = load_weights(folder.files, folder.plan, source, "").by_buffer
    executor = Executor(folder.plan, library_of(folder), weights, threads)
    with closing(executor):
        trial = Trial(folder.oracle, executor, read_file(engine / VALUES))
        trial.run()
    return trial


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_a_good_engine_is_ready_with_any_number_of_threads(nano_engine, checkpoint, threads):
    engine = load_engine(nano_engine, checkpoint=checkpoint, threads=threads)
    assert not engine.executor.memory[MemoryClass.STATE].any(), "requests start on fresh state"
    engine.close()
    one, many = trial_of(nano_engine, checkpoint), trial_of(nano_engine, checkpoint, threads)
    assert one.errors.keys() == many.errors.keys()
    for part, errors in one.errors.items():
        assert np.array_equal(np.concatenate(errors), np.concatenate(many.errors[part])), part


@pytest.mark.parametrize("policy", ["f32", "vendor"])
def test_both_policies_are_ready(policy):
    load_engine(golden_engine(policy), checkpoint=golden_root() / "v41_tiny").close()


def test_it_costs_little(nano_engine, checkpoint):
    """A few launches and a few kilobytes: measured 0.08 s on two busy cores."""
    engine = load_engine(nano_engine, checkpoint=checkpoint, threads=1)
    engine.close()
    assert engine.seconds["oracle"] < 0.5
    assert sum(f.stat().st_size for f in (nano_engine / "oracle").iterdir()) < 300_000


SCALES = (
    "layers.3.attn.wq_b.scale",
    "layers.6.ffn.shared_experts.w2.scale",
    "layers.2.engram.embed.scale",
)


@pytest.mark.parametrize("name", SCALES)
def test_one_changed_bit_of_a_scale_tensor_is_named(nano_engine, copy, name):
    change(copy, name, lambda data: bytes([data[0] ^ 1]) + data[1:])
    error = refusal(nano_engine, checkpoint=copy)
    assert error.code == "E470"
    assert error.notes == (f"`{name}`: other bytes than the engine was compiled from",)
    command = [sys.executable, "-m", "deepinfer_compile.runtime", "run", str(nano_engine)]
    command += ["--prompt", "x", "--checkpoint", str(copy), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert name in json.loads(done.stdout)["error"]["notes"][0]


def test_a_changed_expert_names_its_layer(nano_engine, copy):
    change(copy, "layers.4.ffn.experts.5.w1.scale", lambda data: data[:-1] + b"\0")
    (note,) = refusal(nano_engine, checkpoint=copy).notes
    assert "layers.4.ffn.experts.0.w1.scale` ... `layers.4.ffn.experts.7.w1.scale`" in note


def test_another_checkpoint_of_the_same_shapes_is_refused(nano_engine, tmp_path):
    spec = load_spec(REPO / "examples/v41_nano.yaml", environment={})
    write_checkpoint(spec.model, tmp_path / "other", seed=99)
    error = refusal(nano_engine, checkpoint=tmp_path / "other")
    assert error.code == "E470"
    assert len(error.notes) == 21  # twenty, and how many more


@pytest.mark.parametrize(
    ("name", "layers"), [(SCALES[0], [3]), (SCALES[1], [6]), (SCALES[2], [2, 3, 4])]
)
def test_the_numbers_alone_name_the_layer_of_a_wrong_scale(nano_engine, copy, name, layers):
    """And no later one, unless it reads that layer's cache, as 3 and 4 read that of 2: each layer
    starts from the reference's values."""
    change(copy, name, lambda data: bytes(min(byte + 1, 254) for byte in data))
    problems = trial_of(nano_engine, copy).problems()
    assert [problem.partition(":")[0] for problem in problems] == [
        f"layers.{layer}, {phase}" for phase in ("prefill", "decode") for layer in layers
    ]


WRONG = [  # kernel, what stands there, what is put there, what must be named
    (
        "topk_gate__",
        "SCALE = 1.5f",
        "SCALE = 1.4f",
        r"layers.0, prefill: off by .*, 0.005 allowed",
    ),
    ("rope_attention__bf16.*_mxfp8__h4", "SCALE = 0.125f", "SCALE = 0.14f", "layers.0, decode"),
    ("chunk_rope_attention__.*_nvfp4__.*p32", "SCALE = 0.125f", "SCALE = 0.14f", "prefill"),
    ("rope_angles__f32__d32_t10000", r"1\.0+e\+00f", "1.02f", "layers.0, prefill"),
    ("mhc_expand_enter__", r"RMS_EPS = [-.e\d]+f", "RMS_EPS = 0.5f", "layers.7, decode"),
    ("rmsnorm_rope_quantize__bf16_mxfp8", r"EPS = [-.e\d]+f", "EPS = 0.1f", "layers.0, prefill"),
    ("sample__", r"log\(total\)", "log(1.01 * total)", "log probabilities, sample"),
]


@pytest.mark.parametrize(("kernel", "right", "wrong", "named"), WRONG, ids=[w[0] for w in WRONG])
def test_a_wrong_constant_in_a_kernel_is_not_ready(
    nano_engine, tmp_path, kernel, right, wrong, named
):
    """The kernel is compiled with another constant and put before the engine's own."""
    sources = nano_engine / "kernels"
    (source, *_) = (p for p in sorted(sources.glob("*.cpp")) if re.match(kernel, p.name))
    text, count = re.subn(right, wrong, source.read_text())
    assert count, source
    (tmp_path / source.name).write_text(text)
    command = ["g++", *FLAGS, *flags(X86_64_V3), "-O1", "-shared", f"-I{sources}"]
    library = tmp_path / "wrong.so"
    subprocess.run([*command, "-o", str(library), str(tmp_path / source.name)], check=True)
    command = [sys.executable, "-m", "deepinfer_compile.runtime", "run", str(nano_engine)]
    done = subprocess.run(
        [*command, "--prompt", "x", "--max-tokens", "1"],
        env={**os.environ, "LD_PRELOAD": str(library)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (1, ""), done.stderr
    assert done.stderr.startswith("error[E471]: the engine is not ready")
    assert re.search(named, done.stderr), done.stderr


def test_every_part_is_judged(nano_engine, checkpoint):
    """Were the reference's numbers of one part 3 % others, that part is named, and no other one."""
    folder = open_folder(nano_engine)
    source = WeightSource(checkpoint, False, "test")
    weights = load_weights(folder.files, folder.plan, source, "").by_buffer
    stored = read_file(nano_engine / VALUES)
    parts = [
        (phase, point) for phase in folder.oracle.points for point in folder.oracle.points[phase]
    ]
    assert len(parts) == 2 * (1 + 8)
    with closing(Executor(folder.plan, library_of(folder), weights, 1)) as executor:
        for phase, point in parts:
            names = {f"/{folder.plan.buffers[number].name}" for number in point.buffers}
            changed = {
                name: moved(view) if name[name.index("/") :] in names else view
                for name, view in stored.items()
            }
            trial = Trial(folder.oracle, executor, changed)
            trial.run()
            assert any(p.startswith(f"{point.part}, {phase}:") for p in trial.problems())


def moved(view: TensorView) -> TensorView:
    """bf16 values 3 % larger; integers as they are."""
    if view.dtype != "BF16":
        return view
    floats = (view.data.view(np.uint16).astype(np.uint32) << 16).view(np.float32) * np.float32(1.03)
    bits = (floats.view(np.uint32) >> 16).astype(np.uint16)
    return dataclasses.replace(view, data=bits.view(np.uint8))


def test_a_nan_is_no_agreement(nano_engine, copy):
    change(copy, SCALES[0], lambda data: b"\xff" * len(data))
    assert any("layers.3, prefill: off by nan" in p for p in trial_of(nano_engine, copy).problems())


def test_an_engine_without_a_prompt_says_so(nano_engine, checkpoint):
    """And asks nothing but the weights."""
    folder = open_folder(nano_engine)
    oracle = dataclasses.replace(folder.oracle, tokens=())
    assert oracle.runs == ()
    check_numbers(oracle, None, folder.files)
    assert jsons.load(type(oracle), jsons.dump(oracle)) == oracle
