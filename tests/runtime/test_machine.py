"""Which library of an engine this machine runs, and what it is told when it runs none."""

from __future__ import annotations

import dataclasses
import platform
from pathlib import Path

import pytest

from deepinfer_compile.format.manifest import Library
from deepinfer_compile.runtime.errors import EngineError
from deepinfer_compile.runtime.machine import choose_library, cpu_features
from deepinfer_compile.runtime.settings import usable_cpus
from tests.runtime.made import MANIFEST

OLD = Library("kernels/engine.old.so", "old", ("avx2", "fma"))
NEW = Library("kernels/engine.new.so", "new", ("avx2", "fma", "avx512f"))
BOTH = dataclasses.replace(MANIFEST, libraries=(OLD, NEW))


@pytest.mark.parametrize(
    ("features", "chosen"),
    [({"avx2", "fma", "sse2"}, OLD), ({"avx2", "fma", "avx512f", "amx_tile"}, NEW)],
)
def test_the_last_library_that_the_cpu_runs_is_chosen(tmp_path, features, chosen):
    assert choose_library(tmp_path, BOTH, frozenset(features)) == chosen


def test_a_mismatch_names_both(tmp_path):
    with pytest.raises(EngineError) as caught:
        choose_library(tmp_path, BOTH, frozenset({"avx2"}))
    assert (caught.value.code, caught.value.exit_code) == ("E241", 3)
    here = f"this is {platform.machine()} {platform.system()}"
    assert caught.value.message.startswith(f"the engine's code needs a CPU with old or new; {here}")
    assert caught.value.notes == (
        "old needs: avx2, fma",
        "this CPU lacks: fma",
        "new needs: avx2, fma, avx512f",
        "this CPU lacks: fma, avx512f",
    )


def test_arm64_and_macos_are_named(tmp_path, monkeypatch):
    monkeypatch.setattr("platform.machine", lambda: "arm64")
    monkeypatch.setattr("platform.system", lambda: "Darwin")
    monkeypatch.setattr("deepinfer_compile.runtime.machine._CPU_FLAGS", tmp_path / "none")
    assert cpu_features() == frozenset()
    with pytest.raises(EngineError) as caught:
        choose_library(tmp_path, MANIFEST, cpu_features())
    assert caught.value.message == (
        "the engine's code needs a CPU with x86-64-v3; this is arm64 Darwin"
    )


def test_a_system_without_affinity_counts_its_cpus(monkeypatch):
    monkeypatch.delattr("os.sched_getaffinity")
    monkeypatch.setattr("os.cpu_count", lambda: 12)
    monkeypatch.setattr("deepinfer_compile.runtime.settings._CPU_QUOTA", Path("/none"))
    assert usable_cpus() == 12


def test_this_machine_has_flags():
    assert "sse2" in cpu_features()
