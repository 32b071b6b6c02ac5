"""What a newcomer ran into: options before the verb, bytes that are no text, a full disk."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

ENGINE = [sys.executable, "-m", "deepinfer_compile.runtime"]


def command(*arguments, **options):
    return subprocess.run(
        [*ENGINE, *map(str, arguments)], capture_output=True, timeout=120, check=False, **options
    )


def test_options_work_before_the_verb_and_after(nano_engine):
    before = command("--json", "verify", nano_engine)
    after = command("verify", nano_engine, "--json")
    for done in (before, after):
        assert done.returncode == 0
        assert json.loads(done.stdout)["ok"] is True
    prompt = ("--prompt", "hi", "--max-tokens", 2)
    assert command("-q", "run", nano_engine, *prompt).stderr == b""
    assert command("run", nano_engine, *prompt, "-q").stderr == b""
    assert command("run", nano_engine, *prompt).stderr != b""


@pytest.mark.parametrize("way", ["stdin", "argument"])
def test_a_prompt_that_is_not_text_is_the_users_mistake(nano_engine, way):
    if way == "stdin":
        done = command("run", nano_engine, "--max-tokens", 2, input=b"a\xff\xfeb")
    else:
        done = subprocess.run(
            [*ENGINE, "run", str(nano_engine), "--prompt", b"a\xff"],
            capture_output=True,
            timeout=120,
            check=False,
        )
    assert done.returncode == 2
    assert b"error[E030]: the prompt is not UTF-8" in done.stderr


@pytest.mark.parametrize("json_flag", [[], ["--json"]])
def test_a_full_disk_behind_stdout_is_status_5(nano_engine, json_flag):
    for program, *rest in (
        ("deepinfer_compile.runtime", "run", nano_engine, "--prompt", "hi", "--max-tokens", 2),
        ("deepinfer_compile", "examples/v41_nano.yaml", "--plan"),
    ):
        with open("/dev/full", "w") as full:
            done = subprocess.run(
                [sys.executable, "-m", program, *map(str, rest), *json_flag],
                stdout=full,
                stderr=subprocess.PIPE,
                text=True,
                timeout=120,
                check=False,
            )
        assert done.returncode == 5, (program, done.stderr)
        assert "No space left on device" in done.stderr
        assert "Traceback" not in done.stderr
