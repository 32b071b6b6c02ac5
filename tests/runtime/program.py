"""An engine's program as engine.py, which is Python, tells it: an oracle for readers of plans."""

from __future__ import annotations

import json
from pathlib import Path

Steps = list[tuple[str, list[str]]]


def launched(engine: Path, phase: str, rows: int) -> Steps:
    """(kernel, buffers) of every step, in order, when `rows` rows run."""
    steps: Steps = []
    told: dict[str, object] = {}
    exec((engine / "engine.py").read_text(encoding="utf-8"), told)
    program = told[phase]
    assert callable(program)
    program(lambda kernel, items, *buffers: steps.append((kernel, list(buffers))), rows)
    return steps


def buckets(engine: Path) -> dict[str, list[int]]:
    """Of every phase."""
    plan = json.loads((engine / "plan.json").read_text(encoding="utf-8"))
    return {phase["name"]: phase["buckets"] for phase in plan["phases"]}
