"""The example scripts run as they say."""

import subprocess
import sys
from pathlib import Path

from tests import engines

REPO = Path(__file__).parents[2]


def test_offline_inference_prints_prompts_and_texts_and_repeats_them(nano_engine):
    script = str(REPO / "examples" / "offline_inference.py")
    command = [sys.executable, "-W", "error", script, str(nano_engine)]
    first, second = (
        subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
        for _ in range(2)
    )
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
