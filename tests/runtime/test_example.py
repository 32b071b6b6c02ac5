"""The example script runs as the README says."""

import subprocess
import sys
from pathlib import Path

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
