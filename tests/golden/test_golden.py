"""The released model's golden vectors through compiled engines, judged by their own checker."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from deepinfer_compile.driver import compile_engine, find_target
from deepinfer_compile.runtime.errors import NotReady
from deepinfer_compile.runtime.loader import load_engine
from deepinfer_compile.spec.hf import from_hf
from tests.engines import golden_engine
from tests.golden_data import golden_root
from tests.runtime.made import edit_manifest


def judged(engine: Path, out: Path, mode: str) -> subprocess.CompletedProcess[str]:
    """`deepinfer-engine golden`, then check_golden.py on what it wrote."""
    root = golden_root()
    vectors = root / "v41_tiny"
    command = [sys.executable, "-m", "deepinfer_compile.runtime", "golden", str(engine)]
    command += ["--checkpoint", str(vectors), "--vectors", str(vectors), "-o", str(out)]
    subprocess.run(command, check=True, capture_output=True, timeout=300)
    checker = [sys.executable, str(root / "check_golden.py"), str(vectors), str(out)]
    return subprocess.run(
        [*checker, "--mode", mode, "--require-all"],
        check=False,
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.mark.parametrize(("policy", "mode"), [("f32", "f32"), ("vendor", "fp8")])
def test_golden_vectors_pass(tmp_path, policy, mode):
    verdict = judged(golden_engine(policy), tmp_path / "candidate", mode)
    assert verdict.returncode == 0, verdict.stdout
    passed, _, total = verdict.stdout.splitlines()[-1].split(" ")[0].partition("/")
    assert passed == total
    assert int(total) >= 32


def _ask_nothing(engine):
    """Take the prompt out of the engine's oracle, in the manifest's name."""
    file = engine / "oracle/oracle.json"
    nothing = {"tokens": [], "prefilled": 0, "next_tokens": [], "logprobs": []}
    file.write_text(json.dumps(json.loads(file.read_text()) | nothing))
    files = json.loads((engine / "manifest.json").read_text())["files"]
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    edit_manifest(engine, files=files | {"oracle/oracle.json": digest})


def test_a_constant_changed_in_a_template_changes_the_engine(tmp_path):
    """The kernels that run are the ones generated: with `post` without its factor 2 the engine is
    not ready, and one that is not asked before fails the golden set."""
    target = find_target("cpu")
    templates = tmp_path / "templates"
    shutil.copytree(target.templates, templates)
    changed = templates / "cpu" / "common" / "mhc.h.jinja"
    text = changed.read_text()
    assert text.count("2.0f * sigmoid") == 1
    changed.write_text(text.replace("2.0f * sigmoid", "1.0f * sigmoid"))

    overrides = ["engine.numerics=f32", "engine.probes=true"]
    spec = from_hf(golden_root() / "v41_tiny", overrides=overrides, environment={})
    engine = tmp_path / "changed.engine"
    compile_engine(spec, dataclasses.replace(target, templates=templates), engine)
    with pytest.raises(NotReady, match=r"layers\.0, prefill"):
        load_engine(engine, checkpoint=golden_root() / "v41_tiny")
    _ask_nothing(engine)
    verdict = judged(engine, tmp_path / "candidate", "f32")
    assert verdict.returncode == 1
    assert "FAIL teacher ffn_out" in verdict.stdout
    assert "FAIL short prefill.logits" in verdict.stdout
