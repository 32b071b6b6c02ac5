"""Engines with probes: a phase stopped at every named value, and the logits after it.

    visit_probes(executor, phase, rows, visit)     visit(probe) where reading and replacing are safe

A probe's name is `layers.<layer>.<part>`, or `hidden`, or `logits` in the sample phase.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import cast

import numpy as np
from numpy.typing import NDArray

from deepinfer_compile.format.plan import Probe
from deepinfer_compile.runtime.arrays import Array, bf16_to_f32, f32_to_bf16
from deepinfer_compile.runtime.executor import Executor, Walk

LAYER = re.compile(r"layers\.(\d+)\.(\w+)")
HOW_TO_GET = "compile one: deepinfer-compile SPEC --target cpu --probes -o probes.engine"


def visit_probes(executor: Executor, phase: str, rows: int, visit: Callable[[Probe], None]) -> None:
    """Run a phase over rows that are filled, in order of the probes, to its end."""
    walk = Walk(executor, phase, rows)
    for probe in sorted(executor.phase(phase).probes, key=lambda probe: probe.step):
        walk.to(probe.step)
        visit(probe)
    walk.finish()


def read_logits(executor: Executor, rows: int) -> Array:
    """f32[R, vocabulary] after the forward phase's first R rows."""
    probe = executor.probe("sample", "logits")
    most = executor.phase("sample").max_rows
    pieces = []
    for first in range(0, rows, most):
        count = min(most, rows - first)
        executor.rows["sample_row"][:count] = np.arange(first, first + count, dtype=np.int32)
        Walk(executor, "sample", count).to(probe.step)
        pieces.append(executor.read(probe, count))
    return np.concatenate(pieces)


def floats(value: Array) -> Array:
    """f32 of a float value; bf16 comes as bits."""
    return bf16_to_f32(cast(NDArray[np.uint16], value)) if value.dtype == np.uint16 else value


def as_stored(executor: Executor, probe: Probe, value: Array) -> Array:
    """A float value (bf16 bits, f16 or f32) in the probe's dtype."""
    target = executor.plan.buffers[probe.buffer].dtype
    if value.dtype == np.uint16:
        return value if target == "bf16" else bf16_to_f32(cast(NDArray[np.uint16], value))
    wide = value.astype(np.float32)
    return f32_to_bf16(wide) if target == "bf16" else wide
