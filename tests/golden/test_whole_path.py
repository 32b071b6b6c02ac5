"""Other topologies on the reviewers' path: checkpoint, config.json, engine, golden writer, checker.

The vectors come from the float64 walker under the same policy. Under `f32` an engine agrees with it
far below the checker's limits. Under `vendor` a bf16 tie or an FP8 code may fall the other way, so
what is judged is one layer at a time and the middle position.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from torch import Tensor

from deepinfer_compile.checkpoint.synthetic import write_checkpoint
from deepinfer_compile.driver import compile_engine, find_target
from deepinfer_compile.runtime.errors import EngineError
from deepinfer_compile.runtime.golden import write_golden
from deepinfer_compile.runtime.loader import load_engine
from deepinfer_compile.spec.hf import from_hf
from deepinfer_compile.spec.schema import Model
from tests.engines import _cached
from tests.golden.golden_sets import divergence, make_vectors
from tests.golden.topologies import NAMED, named_model, random_model
from tests.golden_data import golden_root

FAST = (
    ("ratio_one_only", "f32"),
    ("windows_only", "f32"),
    ("ratio_two_only", "vendor"),
    ("many_sources", "vendor"),
)
SLOW = [(n, p) for n in NAMED for p in ("f32", "vendor") if (n, p) not in FAST]
SEEDS = range(12)
Tensors = dict[str, Tensor]


def engine_of(name: str, checkpoint: Path, policy: str) -> Path:
    """As `--from-hf --probes --numerics` compiles it; kept for named topologies."""
    overrides = ["engine.probes=true", f"engine.numerics={policy}"]
    spec = from_hf(checkpoint, overrides=overrides, environment={})

    def make(out: Path) -> object:
        return compile_engine(spec, find_target("cpu"), out)

    return _cached(f"topology-{name}-{policy}", make)


def candidate(engine: Path, checkpoint: Path, vectors: Path, out: Path) -> None:
    loaded = load_engine(engine, checkpoint=checkpoint, threads=2)
    write_golden(loaded.executor, vectors, out)
    loaded.close()


def check_f32(vectors: Path, out: Path) -> None:
    """The reviewers' own tool; then what it cannot know, that both are the same arithmetic."""
    worst, kl = compared(vectors, out)
    assert max(worst) <= 3e-2, worst
    assert sorted(worst)[-2] <= 2e-3, worst
    stats = json.loads((vectors / "stats.json").read_text())["stats"]["prompt"]
    floor = stats["f32_jiggle_1e-6_vs_f32"]
    assert kl["median"] <= max(1e-7, 5 * floor["median"]), (kl, floor)
    if floor["mean"] > 1e-5:
        return  # chaotic weights: there, the walker itself misses the tool's limits on selections
    tool = [sys.executable, str(golden_root() / "check_golden.py"), str(vectors), str(out)]
    command = [*tool, "--mode", "f32", "--require-all"]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr


def check_vendor(vectors: Path, out: Path) -> None:
    """Rounding noise alone moves free-running logits by a KL of 0.01 here.

    No independent limit is known for these models: these are two to three times what 22 of them
    were seen to reach (3e-2, 1.8e-2), so they find a new defect and prove nothing of the noise.
    """
    worst, kl = compared(vectors, out)
    assert max(worst) <= 6e-2, worst
    assert sorted(worst)[-2] <= 2e-2, worst
    assert kl["median"] <= 5e-2, kl


def compared(vectors: Path, out: Path) -> tuple[list[float], dict[str, float]]:
    """Relative error of every sub-layer given the walker's input, and KL of the prompt's logits."""
    wanted, found = (load_file(at / "golden_teacher.safetensors") for at in (vectors, out))
    worst = [
        float((x.double() - y.double()).norm() / y.double().norm())
        for part in ("attn_out", "ffn_out")
        for x, y in zip(found[part], wanted[part], strict=True)
    ]
    prompt, ours = (load_file(at / "golden_prompt.safetensors") for at in (vectors, out))
    assert prompt.keys() - {"input_ids", "decode.greedy_tokens"} == ours.keys()
    if "prefill.engram_hashes" in prompt:
        assert prompt["prefill.engram_hashes"].equal(ours["prefill.engram_hashes"])
    return worst, divergence(prompt["prefill.logits"], ours["prefill.logits"])


def whole_path(name: str, model: Model, policy: str, folder: Path) -> None:
    checkpoint, vectors, out = (folder / part for part in ("checkpoint", "vectors", "candidate"))
    write_checkpoint(model, checkpoint, seed=3, shard_bytes=1 << 20)
    assert from_hf(checkpoint, environment={}).model == model
    make_vectors(checkpoint, vectors, policy, seed=4)
    candidate(engine_of(name, checkpoint, policy), checkpoint, vectors, out)
    check: Callable[[Path, Path], None] = check_f32 if policy == "f32" else check_vendor
    check(vectors, out)


@pytest.mark.parametrize(("name", "policy"), FAST)
def test_engine_passes_the_walkers_vectors(tmp_path, name, policy):
    whole_path(name, named_model(name), policy, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "policy"), SLOW)
def test_other_policies_pass(tmp_path, name, policy):
    whole_path(name, named_model(name), policy, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["f32", "vendor"])
@pytest.mark.parametrize("seed", SEEDS)
def test_random_models_pass(tmp_path, seed, policy):
    whole_path(f"seed{seed}", random_model(seed), policy, tmp_path)


@pytest.fixture(scope="module")
def windows(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """Engine, checkpoint and vectors of the quickest topology."""
    folder = tmp_path_factory.mktemp("windows")
    checkpoint, vectors = folder / "checkpoint", folder / "vectors"
    write_checkpoint(named_model("windows_only"), checkpoint, seed=3, shard_bytes=1 << 20)
    make_vectors(checkpoint, vectors, "f32", seed=4)
    return engine_of("windows_only", checkpoint, "f32"), checkpoint, vectors


def test_the_loose_form_of_golden_files(tmp_path, windows):
    """Logits at every second position only, no decode, one teacher tensor, other tags."""
    engine, checkpoint, vectors = windows
    prompt = load_file(vectors / "golden_prompt.safetensors")
    teacher = load_file(vectors / "golden_teacher.safetensors")
    folder = tmp_path / "vectors"
    folder.mkdir()
    sparse = {"prefill.logits_even": prompt["prefill.logits"][::2].contiguous()}
    save_file({**sparse, "input_ids": prompt["input_ids"].long()}, folder / "golden_v2.safetensors")
    only = {name: teacher[name] for name in ("input_ids", "h_in", "pre_mix_in")}
    half = {**only, "ffn_out": teacher["ffn_out"].bfloat16()}
    save_file(half, folder / "golden_layers.safetensors")
    candidate(engine, checkpoint, folder, tmp_path / "out")
    found = load_file(tmp_path / "out" / "golden_v2.safetensors")
    assert found.keys() == {"prefill.logits"}
    assert divergence(prompt["prefill.logits"], found["prefill.logits"])["mean"] < 1e-9
    layers = load_file(tmp_path / "out" / "golden_layers.safetensors")
    assert layers.keys() == {"ffn_out"}
    assert (layers["ffn_out"] - teacher["ffn_out"]).norm() < 1e-4 * teacher["ffn_out"].norm()


def test_a_prompt_past_the_engines_positions_is_refused(tmp_path, windows):
    """Its page table ends there: it must not run into other requests' pages."""
    engine, checkpoint, vectors = windows
    prompt = load_file(vectors / "golden_prompt.safetensors")
    many = prompt["input_ids"].repeat(15)
    folder = tmp_path / "vectors"
    folder.mkdir()
    save_file({"input_ids": many}, folder / "golden_huge.safetensors")
    with pytest.raises(EngineError, match="needs 4350 positions, this engine holds 1024") as caught:
        candidate(engine, checkpoint, folder, tmp_path / "out")
    assert caught.value.code == "E022"
    assert "engine.max_context=4350" in str(caught.value)


def test_names_with_a_leading_model_are_the_same_checkpoint(tmp_path, windows):
    """One file, no index, `model.` before every name."""
    _, checkpoint, vectors = windows
    renamed = tmp_path / "renamed"
    renamed.mkdir()
    for file in ("config.json", "tokenizer.json"):
        shutil.copyfile(checkpoint / file, renamed / file)
    tensors = {
        f"model.{n}": t for f in checkpoint.glob("*.safetensors") for n, t in load_file(f).items()
    }
    save_file(tensors, renamed / "model.safetensors")
    spec = from_hf(renamed, overrides=["engine.probes=true", "engine.numerics=f32"], environment={})
    prefixed = compile_engine(spec, find_target("cpu"), tmp_path / "x.engine")
    candidate(prefixed, renamed, vectors, tmp_path / "out")
    check_f32(vectors, tmp_path / "out")
