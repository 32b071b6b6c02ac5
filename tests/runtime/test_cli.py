"""The command line without a loaded engine: help, versions, refusals, exit statuses."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from deepinfer_compile.runtime import cli
from tests.runtime.made import edit_manifest, make_engine


def run(capsys, *arguments):
    status = cli.main([str(a) for a in arguments])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_help_lists_what_works_and_nothing_else(capsys):
    with pytest.raises(SystemExit) as exited:
        cli.main(["--help"])
    text = capsys.readouterr().out
    assert exited.value.code == 0
    shown = ("run", "inspect", "verify", "explain", "diff", "report", "finish", "golden")
    for verb in (*shown, "bench", "numdiff", "examples:", "exit status: 0 ok"):
        assert verb in text
    assert "serve" not in text


def test_version_names_ours_python_torch_and_schema(capsys):
    with pytest.raises(SystemExit):
        cli.main(["--version"])
    text = capsys.readouterr().out
    assert text.startswith("deepinfer-engine 0.1.0 (Python 3.")
    assert "torch 2." in text
    assert "schema 4" in text


@pytest.mark.parametrize("verb", ["serve"])
def test_verbs_to_come_say_not_yet(capsys, verb):
    status, out, err = run(capsys, verb, "x.engine", "--flag")
    assert (status, out) == (2, "")
    assert f"`{verb}` is not yet built" in err


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["fly"],
        ["run"],
        ["run", "e", "--max-tokens", "x"],
        ["golden", "e"],
        ["inspect", ""],
        ["report", "e", "-o", ""],
        ["bench", "e", "--csv", ""],
        ["verify", "e", "--js"],  # a part of --json, which a failure would not answer in
    ],
)
def test_mistakes_on_the_command_line_are_2(capsys, arguments):
    status, out, err = run(capsys, *arguments)
    assert (status, out) == (2, "")
    assert err.startswith("error[E020]: ")
    assert "Traceback" not in err


def test_errors_are_one_json_object_too(capsys, tmp_path):
    status, out, err = run(capsys, "run", tmp_path, "--prompt", "x", "--json")
    answer = json.loads(out)
    assert (status, err, answer["schema"]) == (4, "", 1)
    assert answer["error"]["code"] == "E450"


def test_verify_says_yes_and_no(capsys, tmp_path):
    engine = make_engine(tmp_path / "e")
    status, out, err = run(capsys, "verify", engine)
    assert (status, err) == (0, "")
    assert out.startswith("ok: 4 files, ")
    (engine / "plan.json").write_text("{}")
    status, out, err = run(capsys, "verify", engine)
    assert (status, out) == (1, "")
    assert "plan.json: sha256 differs" in err
    status, out, _ = run(capsys, "verify", engine, "--json")
    answer = json.loads(out)
    assert (status, answer["ok"], answer["error"]["code"]) == (1, False, "E452")
    edit_manifest(engine, schema=5)
    assert run(capsys, "verify", engine)[0] == 1
    assert run(capsys, "verify", tmp_path / "absent")[0] == 4


def test_inspect_reads_a_folder_it_could_never_run(capsys, tmp_path):
    engine = make_engine(tmp_path / "e")
    status, out, err = run(capsys, "inspect", engine)
    assert (status, err) == (0, "")
    for text in ("x86-64-v3", "max_context 64", "arena 128", "prefill 8"):
        assert text in " ".join(out.split())
    status, out, _ = run(capsys, "inspect", engine, "--json")
    answer = json.loads(out)
    assert (status, answer["limits"]["max_context"], answer["memory"]["io"]) == (0, 64, 64)


def test_an_engine_with_its_libraries_is_complete(capsys, tmp_path):
    engine = make_engine(tmp_path / "e")
    said = "complete: nothing to finish (kernels/engine.so)\n"
    assert run(capsys, "finish", engine) == (0, said, "")
    status, out, _ = run(capsys, "finish", engine, "--json")
    assert (status, json.loads(out)["libraries"]) == (0, ["kernels/engine.so"])


def test_an_engine_without_a_library_cannot_be_finished_here(capsys, tmp_path):
    engine = make_engine(tmp_path / "e")
    files = json.loads((engine / "manifest.json").read_text())["files"]
    del files["kernels/engine.so"]
    (engine / "kernels/engine.so").unlink()
    edit_manifest(engine, libraries=[], files=files)
    status, out, err = run(capsys, "finish", engine)
    assert (status, out) == (3, "")
    assert err.startswith("error[E244]: the engine has no library, ")
    assert "knows no toolchain for target cpu\n" in err


def test_our_own_bugs_are_70_and_show_a_traceback_only_with_debug(capsys, monkeypatch):
    def broken(_):
        raise KeyError("oops")

    monkeypatch.setitem(cli.verbs.VERBS, "verify", broken)
    status, _, err = run(capsys, "verify", "e")
    assert status == 70
    assert "KeyError: 'oops'" in err
    assert "Traceback" not in err
    assert "Traceback" in run(capsys, "verify", "e", "--debug")[2]


def test_a_failing_disk_is_5(capsys, monkeypatch):
    def failing(_):
        raise PermissionError(13, "Permission denied", "/x/manifest.json")

    monkeypatch.setitem(cli.verbs.VERBS, "verify", failing)
    status, _, err = run(capsys, "verify", "e")
    assert status == 5
    assert err == "error[E552]: Permission denied\n  --> /x/manifest.json\n"


def test_an_interrupt_is_130(capsys, monkeypatch):
    def interrupted(_):
        raise KeyboardInterrupt

    monkeypatch.setitem(cli.verbs.VERBS, "verify", interrupted)
    assert run(capsys, "verify", "e") == (130, "", "")


def test_a_closed_pipe_is_silent(tmp_path):
    engine = make_engine(tmp_path / "e")
    command = f"{sys.executable} -m deepinfer_compile.runtime inspect {engine} --json"
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {command} | true"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("command", "status"),
    [("inspect {engine} >&-", 0), ("inspect {engine} --json >&-", 0), ("verify no 2>/dev/full", 4)],
)
def test_closed_and_full_streams_do_not_change_the_status(tmp_path, command, status):
    engine = make_engine(tmp_path / "e")
    run = f"{sys.executable} -m deepinfer_compile.runtime {command.format(engine=engine)}"
    done = subprocess.run(run, shell=True, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (status, "", "")
