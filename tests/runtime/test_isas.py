"""An engine holds a library per instruction set, and all of them give the same bits."""

from __future__ import annotations

import dataclasses

import pytest

from deepinfer_compile.runtime.folder import open_folder
from deepinfer_compile.runtime.loader import start
from deepinfer_compile.runtime.machine import cpu_features
from tests.runtime.drive import Solo
from tests.runtime.test_exactness import prompt_of


def test_the_default_engine_holds_a_baseline_and_avx512(nano_engine):
    libraries = open_folder(nano_engine).manifest.libraries
    assert [library.isa for library in libraries] == ["x86-64-v3", "avx512"]
    narrow, wide = (nano_engine / library.path for library in libraries)
    assert narrow.read_bytes() != wide.read_bytes()
    assert set(libraries[0].features) < set(libraries[1].features)


def test_every_library_gives_the_same_tokens_and_state(nano_engine):
    folder = open_folder(nano_engine)
    runnable = [b for b in folder.manifest.libraries if cpu_features().issuperset(b.features)]
    if len(runnable) < 2:
        pytest.skip("waits for a CPU with AVX-512; tests/kernels/test_wide.py emulates it")
    outcomes = []
    for library in runnable:
        manifest = dataclasses.replace(folder.manifest, libraries=(library,))
        engine = start(dataclasses.replace(folder, manifest=manifest))
        assert engine.isa == library.isa
        solo = Solo(engine.executor, prompt_of(200)).feed([7, 1, 96, 96])
        tokens = solo.generate(12, 96)
        outcomes.append((tokens, solo.logprobs, solo.save()))
        engine.close()
    assert outcomes[0] == outcomes[1]
