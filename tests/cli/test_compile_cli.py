"""`deepinfer-compile` as a user meets it: messages, exit status, and nothing half-written."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from deepinfer_compile import opt
from deepinfer_compile.cli import main
from deepinfer_compile.diagnostics import CompileError
from deepinfer_compile.driver import engine_name
from deepinfer_compile.ir.text import parse_graph
from deepinfer_compile.passes import PIPELINE
from deepinfer_compile.spec.hf import from_hf
from deepinfer_compile.spec.load import load_spec

REPO = Path(__file__).parents[2]
NANO = REPO / "examples" / "v41_nano.yaml"
COMMAND = [sys.executable, "-m", "deepinfer_compile"]


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch):
    for name in os.environ:
        if name.startswith("DEEPINFER_"):
            monkeypatch.delenv(name)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """A small checkpoint in the published layout, its weights in three shards."""
    from deepinfer_compile.checkpoint.synthetic import write_checkpoint

    folder = tmp_path_factory.mktemp("made") / "nano"
    model = load_spec(NANO, environment={}).model
    write_checkpoint(model, folder, seed=1, shard_bytes=700_000)
    assert len(list(folder.glob("*.safetensors"))) >= 3
    return folder


def edited(tmp_path, old, new):
    text = NANO.read_text()
    assert text.count(old) == 1, old
    spec = tmp_path / "case.yaml"
    spec.write_text(text.replace(old, new))
    return spec


def status_of(*argv):
    return main([str(a) for a in argv])


@pytest.mark.parametrize(
    ("old", "new", "code", "says"),
    [
        ("max_rows:", "max_row:", "E", "max_rows"),
        ("max_requests: ", "max_requests: many #", "E", "case.yaml:"),
        ("kv_source_layer_ids: [2, 5]", "kv_source_layer_ids: [1, 5]", "E", "kv_source_layer_ids"),
    ],
)
def test_a_bad_spec_is_refused_with_its_line(tmp_path, capsys, monkeypatch, old, new, code, says):
    monkeypatch.chdir(tmp_path)
    spec = edited(tmp_path, old, new)
    assert status_of(spec.name, "--target", "cpu", "-o", "x.engine") == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"error[{code}")
    assert says in err
    assert " --> case.yaml:" in err
    assert "^" in err
    assert [p.name for p in tmp_path.iterdir()] == ["case.yaml"]


def damaged(checkpoint, tmp_path, damage):
    folder = tmp_path / "model"
    shutil.copytree(checkpoint, folder)
    shard = sorted(folder.glob("*.safetensors"))[1]
    if damage == "missing shard":
        shard.unlink()
    elif damage == "truncated":
        os.truncate(shard, shard.stat().st_size - 100)
    elif damage == "wrong shape":
        data = shard.read_bytes()
        length = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + length])
        name = next(n for n in header if n.endswith("attn.wq_b.weight"))
        header[name]["shape"] = [
            header[name]["shape"][0] // 2,
            header[name]["shape"][1] * 2,
        ]
        text = json.dumps(header).encode()
        shard.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])
    return folder, shard


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        ("missing shard", "error[E403]"),
        ("truncated", "error[E402]"),
        ("wrong shape", "error[E405]"),
    ],
)
def test_a_damaged_checkpoint_is_refused(checkpoint, tmp_path, capsys, damage, says):
    folder, shard = damaged(checkpoint, tmp_path, damage)
    out = tmp_path / "x.engine"
    assert status_of("--from-hf", folder, "--target", "cpu", "-o", out) == 4
    error = capsys.readouterr().err
    assert says in error
    assert shard.name in error or "attn.wq_b.weight" in error
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model"]


def test_command_line_mistakes(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cases = [
        ((), 2, "name a spec, or a checkpoint folder"),
        ((NANO, "--from-hf", tmp_path), 2, "not both"),
        ((NANO,), 2, "no target"),
        ((NANO, "--target", "cuda"), 3, "unknown target `cuda`"),
        ((NANO, "--target", "cpu", "--isa", "mmx"), 3, "no instruction set `mmx`"),
        ((NANO, "--target", "cpu", "--tune", "lock"), 3, "target cpu has nothing to tune"),
        ((NANO, "--target", "cpu", "--tuning", "lock"), 3, "compile without --tuning"),
        ((NANO, "--tune", "lock"), 2, "no target"),
        ((NANO, "--target", "cpu", "--seed", 1), 2, "--seed goes with --write-checkpoint"),
        ((NANO, "--plan", "--pack"), 2, "--pack goes with compiling"),
        ((NANO, "--fetch"), 2, "names no repository"),
        (("none.yaml", "--target", "cpu"), 2, "no such file"),
        (("", "--plan"), 2, "SPEC must not be empty"),
        (("--from-hf", "", "--plan"), 2, "--from-hf must not be empty"),
        ((NANO, "--emit-spec", ""), 2, "--emit-spec must not be empty"),
        (
            (NANO, "--target", "cpu", "-o", "", "--checkpoint", ""),
            2,
            "-o, --checkpoint must not be empty",
        ),
        (("--from-hf", "none", "--plan"), 2, "no such folder: none"),
        ((NANO, "--target", "cpu", "--set", "engine.max_row=1"), 2, "engine.max_rows"),
    ]
    for argv, status, says in cases:
        assert status_of(*argv) == status, argv
        out, err = capsys.readouterr()
        assert out == ""
        assert says in err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("accelerator", ["nvidia", "ascend"])
def test_the_accelerator_variable_names_the_target(capsys, monkeypatch, accelerator):
    monkeypatch.setenv("DEEPINFER_ACCELERATOR", accelerator)
    assert status_of(NANO) == 3
    err = capsys.readouterr().err
    assert f"no installed target serves accelerator `{accelerator}`" in err
    assert "environment DEEPINFER_ACCELERATOR" in err
    assert "installed targets: cpu" in err


def test_an_accelerator_means_the_target_that_declares_it(monkeypatch):
    from deepinfer_compile import driver

    (cpu,) = driver.targets().values()
    board = replace(cpu, name="board", accelerators=("boards",))
    monkeypatch.setattr(driver, "targets", lambda: {"cpu": cpu, "board": board})
    assert driver.find_target_for("boards").name == "board"
    assert driver.find_target_for("cpu").name == "cpu"
    twin = replace(board, name="twin")
    monkeypatch.setattr(driver, "targets", lambda: {"board": board, "twin": twin})
    with pytest.raises(CompileError, match="accelerator `boards` may mean board and twin"):
        driver.find_target_for("boards")


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--frob"], "unrecognized arguments: --frob"),
        (["--seed", "x", "--write-checkpoint", "d"], "at least 0, found `x`"),
        (["--seed", "-1", "--write-checkpoint", "d"], "at least 0, found `-1`"),
        (["--plan", "--check"], "--check: not allowed with argument --plan"),
        (["--plan", "-o", "x"], "-o goes with compiling"),
        (["--check", "--target", "cpu", "--isa", "avx512"], "--isa goes with compiling"),
        (["--tune", "a", "--tuning", "b"], "--tuning goes with compiling"),
        (["--tune", "a", "--check"], "--check: not allowed with argument --tune"),
        (["--write-checkpoint", "d", "--checkpoint", "e"], "--checkpoint goes with compiling"),
        (
            ["--fetch", "--dump-ir", "d"],
            "--dump-ir goes with compiling or --plan or --check or --stop-after",
        ),
        (["--stop-after", "fuse-swiglu"], "--stop-after needs --dump-ir, a folder for the graphs"),
        (["--plan", "--seed", "1"], "--seed goes with --write-checkpoint"),
        (["--plan", "--numerics", "foo"], "invalid choice: 'foo' (choose from"),
    ],
)
def test_options_that_do_not_go_together(tmp_path, capsys, monkeypatch, argv, says):
    """Refused, never ignored; and reported like everything else."""
    monkeypatch.chdir(tmp_path)
    assert status_of(NANO, *argv) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error[E001]: ")
    assert says in err
    assert status_of(NANO, *argv, "--json") == 2
    out, err = capsys.readouterr()
    assert err == ""
    report = json.loads(out)
    assert report["schema"] == 1
    assert says in report["errors"][0]["message"]
    assert list(tmp_path.iterdir()) == []


def test_errors_are_one_json_object_too(tmp_path, capsys):
    spec = edited(tmp_path, "max_rows:", "max_row:")
    assert status_of(spec, "--target", "cpu", "--json") == 2
    out, err = capsys.readouterr()
    assert err == ""
    report = json.loads(out)
    assert report["schema"] == 1
    assert report["errors"][0]["span"]["line"] > 1
    assert report["errors"][0]["code"].startswith("E1")


def test_plan_reproduces_the_published_totals_quickly(capsys):
    begin = time.monotonic()
    assert status_of(REPO / "examples/v41_flash.yaml", "--plan", "--json") == 0
    assert time.monotonic() - begin < 10
    facts = json.loads(capsys.readouterr().out)
    assert facts["model"]["parameters"] == 763_205_315_794
    assert facts["model"]["bytes"] == 510_286_023_000
    assert facts["model"]["tensors"] == 96_085
    assert facts["caches"]["bytes_per_token"] == 890


def test_plan_for_a_person_loses_no_digit(capsys, monkeypatch):
    monkeypatch.setenv("DEEPINFER_HF_MODEL_DIR", "")
    spec = REPO / "examples/v41_flash.yaml"
    assert status_of(spec, "--plan", "--target", "cpu") == 0
    out = capsys.readouterr().out
    for number in ("763,205,315,794", "510,286,023,000", "551,566,180,464", "60,253,497,616"):
        assert number in out
    assert "…" not in out


@pytest.mark.parametrize(("columns", "no_color"), [("20", ""), ("120", "1")])
def test_tables_are_plain_text_of_80_columns_whatever_the_terminal(
    capsys, monkeypatch, columns, no_color
):
    spec = REPO / "examples/v41_flash.yaml"
    monkeypatch.setenv("COLUMNS", columns)
    monkeypatch.setenv("NO_COLOR", no_color)
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert status_of(spec, "--plan", "--target", "cpu", "-q") == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert "\x1b" not in out
    assert max(len(line) for line in out.splitlines()) <= 80
    rows = {tuple(line.split()) for line in out.splitlines()}
    assert ("total", "763,205,315,794", "510,286,023,000", "475.241") in rows
    assert ("window", "40", "request", "128", "67,584") in rows
    assert "193 slots, 524,289 pages of 128 tokens\n" in out
    assert "prefix reuse: from 128 tokens on in steps of 128, 128 snapshots\n" in out
    assert "kv_pages, index_pages  visible length follows from the position\n" in out


def test_settings_from_the_environment_show_their_source(capsys, monkeypatch):
    monkeypatch.setenv("DEEPINFER_USE_NEXTN_DECODE", "0")
    assert status_of(NANO, "--plan") == 0
    assert "engine.draft_len is set by environment DEEPINFER_USE_NEXTN_DECODE" in (
        capsys.readouterr().out
    )


def test_check_lists_a_rule_for_every_kernel(capsys):
    assert status_of(NANO, "--check", "--target", "cpu", "--json") == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["ok"] is True
    assert {k["rule"] for k in facts["kernels"]} >= {"RopeAttentionRule", "LinearE4m3Rule"}


def test_check_for_a_person_shows_the_rules_that_refused(capsys):
    assert status_of(NANO, "--check", "--target", "cpu") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["rule", "uses", "kernel"]
    at = next(i for i, line in enumerate(lines) if line.startswith("LinearBf16Rule"))
    assert lines[at + 1] == "  refused by LinearE4m3Rule: weight is bf16, needs e4m3"


def test_graphs_are_written_for_whoever_asks(tmp_path, capsys):
    assert status_of(NANO, "--plan", "--dump-ir", tmp_path / "ir") == 0
    names = sorted(p.name for p in (tmp_path / "ir").iterdir())
    assert names == [f"00-build.{phase}.ir" for phase in ("decode", "prefill", "sample")]
    assert status_of(NANO, "--check", "--target", "cpu", "--dump-ir", tmp_path / "all") == 0
    stems = [f"{n:02}-{each.name}" for n, each in enumerate(PIPELINE, 1)]
    expected = {f"{stem}.{phase}.ir" for stem in stems for phase in ("decode", "prefill")}
    assert {p.name for p in (tmp_path / "all").iterdir()} == {*names, *expected}
    (tmp_path / "file").write_text("mine")
    assert status_of(NANO, "--plan", "--dump-ir", tmp_path / "file") == 5
    assert "error[E502]: cannot write the graphs" in capsys.readouterr().err


def test_passes_stop_where_they_are_told(tmp_path, capsys):
    stop = ["--target", "cpu", "--stop-after", "fuse-rope-attention", "--dump-ir", tmp_path / "ir"]
    assert status_of(NANO, *stop) == 0
    out = f"stopped after fuse-rope-attention; the graphs are in {tmp_path / 'ir'}\n"
    assert capsys.readouterr().out == out
    last = max(p.name for p in (tmp_path / "ir").iterdir() if "decode" in p.name)
    assert last == "03-fuse-rope-attention.decode.ir"
    graph = parse_graph((tmp_path / "ir" / last).read_text())
    assert {"rope_attention", "swiglu"} <= {node.op.name for node in graph.nodes}
    assert status_of(NANO, *stop[:3], "fuse-all", *stop[4:]) == 2
    assert "error[E004]: there is no pass `fuse-all`" in capsys.readouterr().err
    assert not list(tmp_path.glob("*.engine"))


def test_a_dump_is_an_input_of_opt(tmp_path, capsys):
    """The first graph through all passes is the last graph; one pass at a time is a line of it."""
    assert status_of(NANO, "--check", "--target", "cpu", "--dump-ir", tmp_path) == 0
    built, *_, last = sorted(p for p in tmp_path.iterdir() if "decode" in p.name)
    capsys.readouterr()
    assert opt.main([str(built), "--target", "cpu"]) == 0
    assert capsys.readouterr().out == last.read_text()
    assert opt.main([str(built), "-p", "fuse-swiglu", "-p", "fuse-rope-quantize"]) == 0
    graph = parse_graph(capsys.readouterr().out)
    assert {node.op.name for node in graph.nodes} >= {"expert_swiglu", "rope_quantize", "rmsnorm"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("graph g\n  input %x: f32[R,4]\n", "error[E190]: the graph ends without `return`"),
        (
            "graph g\n  input %x: i32[R]\n  %y: i32[R] = first_stream %x {streams=4}\n  return\n",
            "error[E197]: the graph is not well formed: results should be",
        ),
        ("\xff", "error[E190]: expected `graph`, found `\xff`"),
    ],
)
def test_opt_says_what_is_wrong_with_a_text(tmp_path, capsys, text, message):
    (tmp_path / "x.ir").write_text(text)
    assert opt.main([str(tmp_path / "x.ir")]) == 2
    assert message in capsys.readouterr().err


def test_opt_names_what_it_does_not_know(tmp_path, capsys):
    assert opt.main([str(tmp_path / "none.ir")]) == 5
    assert opt.main([str(tmp_path / "none.ir"), "-p", "fuse-all"]) == 2
    assert opt.main([str(tmp_path / "none.ir"), "--target", "abacus"]) == 3
    shown = capsys.readouterr().err
    assert all(f"error[{code}]" in shown for code in ("E502", "E004", "E201"))


def test_a_spec_that_cannot_be_written_keeps_the_old_one(tmp_path, capsys, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    out = tmp_path / "all.yaml"
    out.write_text("mine")
    monkeypatch.setattr(Path, "replace", full)
    assert status_of(NANO, "--emit-spec", out) == 5
    assert "cannot write the spec: No space left on device" in capsys.readouterr().err
    assert [p.name for p in tmp_path.iterdir()] == ["all.yaml"]
    assert out.read_text() == "mine"


def test_a_file_in_the_way_of_a_spec_is_named(tmp_path, capsys):
    (tmp_path / "file").write_text("mine")
    assert status_of(NANO, "--emit-spec", tmp_path / "file" / "x") == 5
    assert f"--> {tmp_path / 'file' / 'x'}" in capsys.readouterr().err


def test_emitted_spec_says_the_same(tmp_path, capsys):
    out = tmp_path / "all.yaml"
    assert status_of(NANO, "--set", "engine.max_requests=3", "--emit-spec", out) == 0
    again = load_spec(out, environment={})
    assert again == load_spec(NANO, overrides=["engine.max_requests=3"], environment={})
    assert capsys.readouterr().out == f"wrote {out}\n"


def test_write_checkpoint_reads_back_from_hf(tmp_path, capsys):
    folder = tmp_path / "made"
    assert status_of(NANO, "--write-checkpoint", folder, "--seed", 5, "-q") == 0
    assert status_of("--from-hf", folder, "--plan", "--json") == 0
    out = capsys.readouterr().out
    facts = json.loads(out[out.index("{") :])
    stored = sum(f.stat().st_size for f in folder.glob("*.safetensors"))
    assert 0 < stored - facts["model"]["bytes"] < 200_000  # the headers


def test_output_that_is_no_engine_is_left_alone(tmp_path, capsys):
    out = tmp_path / "mine"
    out.mkdir()
    (out / "precious").write_text("data")
    assert status_of(NANO, "--target", "cpu", "-o", out) == 5
    assert "is no engine" in capsys.readouterr().err
    assert (out / "precious").read_text() == "data"


def test_output_that_cannot_be_written_is_refused(tmp_path, capsys):
    """Not a matter of permissions, which a test run as root would not notice."""
    (tmp_path / "file").write_text("mine")
    out = tmp_path / "file" / "x.engine"
    assert status_of(NANO, "--target", "cpu", "-o", out) == 5
    err = capsys.readouterr().err
    assert "error[E502]: cannot write the engine: Not a directory" in err
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_a_failing_disk_is_5_and_no_bug(capsys, monkeypatch):
    def failing(*_, **__):
        raise PermissionError(13, "Permission denied", "/x/model.safetensors")

    monkeypatch.setattr("deepinfer_compile.driver.build", failing)
    assert status_of(NANO, "--plan") == 5
    err = capsys.readouterr().err
    assert err == (
        "error[E502]: cannot read or write: Permission denied\n --> /x/model.safetensors\n"
    )


def test_an_engine_is_called_after_the_spec_or_the_checkpoint(checkpoint, tmp_path):
    assert engine_name(load_spec(NANO, environment={})) == "v41_nano"
    assert engine_name(from_hf(checkpoint, environment={})) == "nano"


def test_help_and_version(capsys):
    versions = r"deepinfer-compile \S+, Python 3\.\S+, torch 2\S+, triton .*, engine schema 4\n"
    for argv, says in ((["--help"], "(?s).*exit status: 0 ok.*"), (["--version"], versions)):
        with pytest.raises(SystemExit) as done:
            main(argv)
        assert done.value.code == 0
        out, err = capsys.readouterr()
        assert err == ""
        assert re.fullmatch(says, out)


def test_the_module_is_the_command():
    done = subprocess.run([*COMMAND, "--help"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("usage: deepinfer-compile ")


def test_our_bug_is_status_70_and_asks_for_a_report(capsys, monkeypatch):
    def broken(*_, **__):
        raise RuntimeError("boom")

    monkeypatch.setattr("deepinfer_compile.spec.load.load_spec", broken)
    assert status_of(NANO, "--plan") == 70
    err = capsys.readouterr().err
    assert "internal error: RuntimeError: boom" in err
    assert "Traceback" not in err
    assert status_of(NANO, "--plan", "--debug") == 70
    assert "Traceback" in capsys.readouterr().err


def test_a_closed_pipe_is_silent():
    run = f"{sys.executable} -m deepinfer_compile {NANO} --plan --json | head -c 10"
    done = subprocess.run(run, shell=True, capture_output=True, text=True, timeout=120, check=False)
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("command", "status"),
    [
        ("{nano} --plan >&-", 0),
        ("none.yaml --plan --json >&- 2>&-", 2),
        ("none.yaml 2>/dev/full", 2),
    ],
)
def test_closed_and_full_streams_do_not_change_the_status(command, status):
    run = f"{sys.executable} -m deepinfer_compile {command.format(nano=NANO)}"
    done = subprocess.run(run, shell=True, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (status, "", "")


def wait_for_partial(folder, process):
    deadline = time.monotonic() + 120
    while not list(folder.glob(".*.partial")):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)


def hear_interrupts():
    """Background jobs of a shell ignore SIGINT, and hand that on to their children."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_interrupted_compilation_leaves_nothing(tmp_path, stop):
    command = [*COMMAND, str(NANO), "--target", "cpu", "-o", str(tmp_path / "x.engine")]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=hear_interrupts,
    ) as process:
        wait_for_partial(tmp_path, process)
        process.send_signal(stop)
        process.communicate(timeout=120)
    assert process.returncode == 130
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_leaves_nothing(tmp_path):
    """On a file system of half a megabyte of its own, in a mount namespace of its own."""
    disk = tmp_path / "disk"
    disk.mkdir()
    compile_here = (
        f"{sys.executable} -m deepinfer_compile {NANO} --target cpu -q -o {disk}/x.engine"
    )
    script = (
        f"mount -t tmpfs -o size=512k none {disk} || exit 99; "
        f"{compile_here}; status=$?; ls -A {disk}; exit $status"
    )
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", script],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    if done.returncode == 99 or "unshare failed" in done.stderr:
        pytest.skip("waits for a machine that lets a test mount a file system")
    assert done.returncode == 5, done.stderr
    assert "error[E501]: the disk ran full while the engine was written" in done.stderr
    assert done.stdout == ""
