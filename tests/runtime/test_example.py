"""The example scripts run as they say."""

import ast
import json
import re
import subprocess
import sys
from pathlib import Path

from tests import engines

REPO = Path(__file__).parents[2]


def run(script, engine):
    command = [sys.executable, "-W", "error", str(REPO / "examples" / script), str(engine)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)


def test_offline_inference_prints_prompts_and_texts_and_repeats_them(nano_engine):
    first, second = (run("offline_inference.py", nano_engine) for _ in range(2))
    assert first.stderr == ""
    lines = first.stdout.splitlines()
    assert [line.startswith("Prompt: '") for line in lines] == [True] * 3
    assert all(len(line.partition("generated text: ")[2]) > 20 for line in lines)
    assert second.stdout == first.stdout  # its sampling is seeded


def test_deterministic_needs_an_engine_that_was_checked_and_repeats_itself(nano_engine):
    script = str(REPO / "examples" / "deterministic.py")
    command = [sys.executable, "-W", "error", script]
    checked = engines.example_engine(
        "v41_nano",
        "engine.batch_invariant=true",
        "engine.probes=true",
        "engine.max_requests=64",
        "engine.cache_tokens=8192",
    )
    done = subprocess.run([*command, str(checked)], capture_output=True, text=True, check=True)
    *runs, last = done.stdout.splitlines()
    assert (len(runs), last) == (9, "identical")
    assert len({line.partition(": ")[2] for line in runs}) == 1
    refused = subprocess.run([*command, str(nano_engine)], capture_output=True, text=True)
    assert refused.returncode == 1
    assert "batch_invariant=True: the engine was compiled with False" in refused.stderr


def test_structured_output_prints_texts_of_every_form(nano_engine):
    out = run("structured_output.py", nano_engine).stdout.splitlines()
    order, date, total, choice = (
        ast.literal_eval(line.partition("generated text: ")[2]) for line in out
    )
    parsed = json.loads(order)
    assert parsed["item"] in ("tea", "coffee", "cake")
    assert parsed["count"] in range(1, 10)
    assert re.fullmatch(r"20\d\d-\d\d-\d\d", date)
    assert re.fullmatch(r"[0-9+()]+", total)
    assert eval(total, {"__builtins__": {}}) >= 2
    thought, _, answer = choice.rpartition("</think>")
    assert thought
    assert answer in ("yes", "no")
