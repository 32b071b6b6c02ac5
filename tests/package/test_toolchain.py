"""The toolchain over a pretended compiler: interrupts stop it, a full scratch disk is named."""

from __future__ import annotations

import pytest
from deepinfer_targets.cpu.toolchain import Gxx

from deepinfer_compile.diagnostics import CompileError

SOURCES = {f"kernels/k{i:02}.cpp": "" for i in range(40)}


def pretend(tmp_path, monkeypatch, script):
    """Make `script` the compiler; the last word of a call is the unit."""
    compiler = tmp_path / "c++"
    compiler.write_text(f"#!/bin/sh\n{script}\n")
    compiler.chmod(0o755)
    monkeypatch.setattr(Gxx, "_compiler", lambda self: str(compiler))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)


def test_after_an_interrupt_no_unit_is_started(tmp_path, monkeypatch):
    log = tmp_path / "log"
    pretend(tmp_path, monkeypatch, f"sleep 0.1; echo unit >> {log}")

    def interrupt(_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Gxx().build(SOURCES, "x86-64-v3", interrupt)
    assert len(log.read_text().splitlines()) < len(SOURCES) / 2
    assert sorted(p.name for p in tmp_path.iterdir()) == ["c++", "log"]


def test_a_full_scratch_disk_is_named_once(tmp_path, monkeypatch):
    pretend(tmp_path, monkeypatch, "echo 'k.o: No space left on device' >&2; exit 1")
    with pytest.raises(CompileError) as refused:
        Gxx().build(SOURCES, "x86-64-v3", lambda unit: None)
    assert refused.value.exit_code == 5
    assert str(refused.value) == "\n".join(
        [
            "error[E501]: cannot compile the kernels: no space left on device",
            f" --> {tmp_path}",
            " = help: free some space there, or set TMPDIR to another folder",
        ]
    )


def test_every_kernel_that_fails_is_reported(tmp_path, monkeypatch):
    pretend(tmp_path, monkeypatch, 'for last; do :; done; echo "$last:1: bad" >&2; exit 1')
    few = dict.fromkeys(list(SOURCES)[:3], "")
    with pytest.raises(CompileError) as refused:
        Gxx().build(few, "x86-64-v3", lambda unit: None)
    assert refused.value.exit_code == 3
    assert [d.where for d in refused.value.diagnostics] == sorted(few)
    assert refused.value.diagnostics[0].notes == ("kernels/k00.cpp:1: bad",)
