"""The toolchain: what it compiles for what, and what it says when a compiler fails."""

from __future__ import annotations

import pytest
from deepinfer_targets.cpu.isas import AVX512, X86_64_V3, flags, native
from deepinfer_targets.cpu.toolchain import Gxx
from deepinfer_targets.cpu.units import units_of

from deepinfer_compile.diagnostics import CompileError
from deepinfer_compile.runtime.machine import cpu_features

SOURCES = {f"kernels/k{i:02}.cpp": "" for i in range(40)}
ISAS = (X86_64_V3,)


def pretend(tmp_path, monkeypatch, script):
    """A toolchain whose compiler writes its output, empty, and then does `script`."""
    compiler = tmp_path / "c++"
    machine = 'case "$*" in -dumpmachine) echo x86_64-linux-gnu; exit;; esac'
    write = 'before=; for word; do [ "$before" != -o ] || : > "$word"; before=$word; done'
    compiler.write_text(f"#!/bin/sh\n{machine}\n{write}\n{script}\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    return Gxx(cxx=str(compiler))


def test_after_an_interrupt_no_unit_is_started(tmp_path, monkeypatch):
    log = tmp_path / "log"
    gxx = pretend(tmp_path, monkeypatch, f"sleep 0.1; echo unit >> {log}")

    def interrupt(_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        gxx.build(SOURCES, ISAS, interrupt)
    assert len(log.read_text().splitlines()) < len(SOURCES) / 2
    assert sorted(p.name for p in tmp_path.iterdir()) == ["c++", "log"]


def test_a_full_scratch_disk_is_named_once(tmp_path, monkeypatch):
    gxx = pretend(tmp_path, monkeypatch, "echo 'k.o: No space left on device' >&2; exit 1")
    with pytest.raises(CompileError) as refused:
        gxx.build(SOURCES, ISAS, lambda unit: None)
    assert refused.value.exit_code == 5
    assert str(refused.value) == "\n".join(
        [
            "error[E501]: cannot compile the kernels: no space left on device",
            f" --> {tmp_path}",
            " = help: free some space there, or set TMPDIR to another folder",
        ]
    )


def test_every_kernel_that_fails_is_reported(tmp_path, monkeypatch):
    gxx = pretend(tmp_path, monkeypatch, 'for last; do :; done; echo "$last:1: bad" >&2; exit 1')
    few = dict.fromkeys(list(SOURCES)[:3], "")
    with pytest.raises(CompileError) as refused:
        gxx.build(few, ISAS, lambda unit: None)
    assert refused.value.exit_code == 3
    assert [d.where for d in refused.value.diagnostics] == sorted(few)
    assert refused.value.diagnostics[0].notes == ("kernels/k00.cpp:1: bad",)


KERNELS = {
    "kernels/add__a.cpp": '#include "types.h"\n#include "wide.h"\nint a;\n',
    "kernels/add__b.cpp": '#include "types.h"\nint b;\n',
    "kernels/copy__a.cpp": '#include "types.h"\nint c;\n',
    "kernels/types.h": "",
    "kernels/wide.h": '#include "wider.h"\n',
    "kernels/wider.h": "#ifdef __AVX512F__\n#endif\n",
}


def test_kernels_of_an_operator_are_one_unit():
    add, copy = units_of(KERNELS)
    assert (add.path, add.sources) == (
        "kernels/add.unit.cpp",
        ("kernels/add__a.cpp", "kernels/add__b.cpp"),
    )
    assert add.text.splitlines()[:2] == ['#include "types.h"', '#include "wide.h"']
    assert add.text.count("#include") == 4
    assert (copy.path, copy.text) == ("kernels/copy__a.cpp", KERNELS["kernels/copy__a.cpp"])


def test_an_instruction_set_shares_what_does_not_ask_for_it(tmp_path, monkeypatch):
    log = tmp_path / "log"
    gxx = pretend(tmp_path, monkeypatch, f'echo "$@" >> {log}')
    heard: list[str] = []
    libraries = gxx.build(KERNELS, (X86_64_V3, AVX512), heard.append)
    names = [binary.path for binary in libraries]
    assert names == ["kernels/engine.x86-64-v3.so", "kernels/engine.avx512.so"]
    calls = log.read_text().splitlines()
    compiled = sorted((c.split()[-1], "-mavx512f" in c) for c in calls if " -c " in c)
    assert compiled == [
        ("kernels/add.unit.cpp", False),
        ("kernels/add.unit.cpp", True),
        ("kernels/copy__a.cpp", False),
    ]
    assert sorted(heard) == sorted(path for path in KERNELS if path.endswith(".cpp"))
    linked = [c.split() for c in calls if " -shared " in c]
    assert all("kernels/copy__a.cpp.x86-64-v3.o" in objects for objects in linked)


def test_native_is_what_the_compiler_finds_and_we_know():
    base = {"__LZCNT__", "__AVX2__", "__BMI__", "__BMI2__", "__F16C__", "__FMA__", "__MOVBE__"}
    assert native(frozenset(base | {"__znver9__", "__SHA__"})).features == X86_64_V3.features
    more = native(frozenset(base | {"__AVX512F__", "__AVX512VNNI__", "__AVX512FP16__"}))
    assert more.features == (*X86_64_V3.features, "avx512f", "avx512_vnni")
    assert flags(more) == ("-march=x86-64-v3", "-mavx512f", "-mavx512vnni")
    with pytest.raises(CompileError) as refused:
        native(frozenset(base - {"__LZCNT__", "__FMA__"}))
    assert refused.value.exit_code == 3
    assert "it lacks abm, fma" in str(refused.value)


def test_native_of_this_machine_runs_here():
    assert cpu_features().issuperset(Gxx().native().features)


def test_a_compiler_for_another_machine_is_named(tmp_path):
    compiler = tmp_path / "c++"
    compiler.write_text("#!/bin/sh\necho arm64-apple-darwin23.6.0\n")
    compiler.chmod(0o755)
    with pytest.raises(CompileError) as refused:
        Gxx(cxx=str(compiler)).build(SOURCES, ISAS, lambda unit: None)
    assert refused.value.exit_code == 3
    assert "compiles for arm64-apple-darwin23.6.0; engines for cpu run on x86_64 Linux" in (
        str(refused.value)
    )


@pytest.mark.parametrize("cxx", ["no-such-compiler", "no-such-compiler -m64"])
def test_a_missing_compiler_is_named(cxx):
    with pytest.raises(CompileError) as refused:
        Gxx(cxx=cxx).versions()
    assert refused.value.exit_code == 3
    assert f"no C++ compiler found: `{cxx}`" in str(refused.value)
