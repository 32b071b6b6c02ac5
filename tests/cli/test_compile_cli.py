"""`deepinfer-compile` as a user meets it: messages, exit status, and nothing half-written."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from deepinfer_compile.cli import main
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
        ((NANO, "--target", "cpu", "--seed", 1), 2, "--seed goes with --write-checkpoint"),
        ((NANO, "--fetch"), 2, "names no repository"),
        (("none.yaml", "--target", "cpu"), 2, "no such file"),
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
    assert f"unknown target `{accelerator}`" in err
    assert "environment DEEPINFER_ACCELERATOR" in err
    assert "installed targets: cpu" in err


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
    for number in ("763,205,315,794", "510,286,023,000", "551,566,180,464", "59,904,319,760"):
        assert number in out
    assert "…" not in out


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
    assert {k["rule"] for k in facts["kernels"]} >= {"ChunkAttentionRule", "LinearE4m3Rule"}


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


def test_help_and_version(capsys):
    for argv, says in ((["--help"], "exit status: 0 ok"), (["--version"], "engine schema 1")):
        with pytest.raises(SystemExit) as done:
            main(argv)
        assert done.value.code == 0
        assert says in capsys.readouterr().out


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


def wait_for_partial(folder, process):
    deadline = time.monotonic() + 120
    while not list(folder.glob(".*.partial")):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)


def hear_interrupts():
    """Background jobs of a shell ignore SIGINT, and hand that on to their children."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def test_interrupted_compilation_leaves_nothing(tmp_path):
    command = [*COMMAND, str(NANO), "--target", "cpu", "-o", str(tmp_path / "x.engine")]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=hear_interrupts,
    ) as process:
        wait_for_partial(tmp_path, process)
        process.send_signal(signal.SIGINT)
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
