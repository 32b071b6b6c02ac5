"""Run an engine's phases on its memory: the host side of the CPU driver.

    fill rows, forward(phase, rows), fill sample rows, sample(rows)

Three allocations of exactly the plan's bytes hold state, io and arena; weights keep the addresses
they were mapped at. Row arrays and results are NumPy views of io memory, by buffer name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np
from numpy.typing import NDArray

from deepinfer_compile.format.plan import EnginePlan, MemoryClass, Phase, Probe
from deepinfer_compile.runtime.arrays import Array, array_of
from deepinfer_compile.runtime.errors import EngineError
from deepinfer_compile.runtime.library import Library
from deepinfer_compile.runtime.memory import address, aligned_bytes
from deepinfer_compile.runtime.tracer import Tracer

Bytes = NDArray[np.uint8]
_RESULTS = ("token", "logprob", "top_token", "top_logprob", "smaller")


@dataclass(frozen=True)
class Samples:
    """Results of the sample phase for R rows; the lists are views, valid until the next step.

    `token` i32[R], `logprob` f32[R], `top_token` i32[R,L], `top_logprob` f32[R,L]: of a list, as
    many entries mean something as its row asked for. -inf is the logprob of what was filtered out.
    `smaller` f32[R] means something where the row's `summed` was set.
    """

    token: NDArray[np.int32]
    logprob: NDArray[np.float32]
    top_token: NDArray[np.int32]
    top_logprob: NDArray[np.float32]
    smaller: NDArray[np.float32]


class Executor:
    """One engine in memory. The caller fills `rows` views before a step and reads them after. A
    `tracer` times the launches of the steps that it wants."""

    def __init__(
        self, plan: EnginePlan, library: Path, weights: Mapping[int, Bytes], threads: int
    ) -> None:
        self.plan = plan
        self._weights = weights
        sizes = {
            MemoryClass.STATE: plan.memory.state,
            MemoryClass.IO: plan.memory.io,
            MemoryClass.ARENA: plan.memory.arena,
        }
        self.memory = {kind: aligned_bytes(size, kind.value) for kind, size in sizes.items()}
        assert {kind: area.nbytes for kind, area in self.memory.items()} == sizes
        self.tracer: Tracer | None = None
        self._index = {phase.name: i for i, phase in enumerate(plan.phases)}
        self._library = Library(library, self._addresses(), threads)
        self.rows = {
            plan.buffers[array.buffer].name: self.view(array.buffer) for array in plan.row_arrays
        }
        self._results = {
            name: self.view(i)
            for i, buffer in enumerate(plan.buffers)
            if (name := buffer.name) in _RESULTS
        }

    def phase(self, name: str) -> Phase:
        return self.plan.phases[self._index[name]]

    def view(self, buffer: int, rows: int | None = None) -> Array:
        """A buffer of state, io or arena as an array; codes and records as bytes."""
        entry = self.plan.buffers[buffer]
        area = self.memory[entry.memory][entry.offset : entry.offset + entry.bytes]
        return array_of(entry, area, rows)

    def forward(self, phase: str, rows: int) -> None:
        """All steps of "prefill" or "decode"."""
        self.run(phase, rows, 0, len(self.phase(phase).steps))

    @property
    def sampled_tokens(self) -> NDArray[np.int32]:
        """Of the newest sample phase, i32[R]: a view, until the next one runs."""
        return cast("NDArray[np.int32]", self._results["token"].reshape(-1))

    def sample(self, rows: int) -> Samples:
        """Run the sampler on the first `rows` sample rows."""
        self.run("sample", rows, 0, len(self.phase("sample").steps))
        return Samples(
            token=self.sampled_tokens[:rows].copy(),
            logprob=self._results["logprob"].reshape(-1)[:rows].astype(np.float32),
            top_token=cast("NDArray[np.int32]", self._results["top_token"][:rows]),
            top_logprob=cast("NDArray[np.float32]", self._results["top_logprob"][:rows]),
            smaller=self._results["smaller"].reshape(-1)[:rows].astype(np.float32),
        )

    def run(self, phase: str, rows: int, first: int, last: int) -> None:
        """Steps [first, last) of a phase."""
        limit = self.phase(phase).max_rows
        if not 1 <= rows <= limit:
            raise EngineError("E022", f"{phase} of {rows} rows: this engine runs 1 to {limit}")
        index = self._index[phase]
        tracer = self.tracer  # another thread's to take away
        if tracer is None or not tracer.wants(phase):
            self._library.run(index, rows, first, last)
        else:
            tracer.run(phase, rows, first, last, lambda i: self._library.run(index, rows, i, i + 1))

    def probe(self, phase: str, name: str) -> Probe:
        """A named value of a phase; E465 when the engine was compiled without it."""
        for probe in self.phase(phase).probes:
            if probe.name == name:
                return probe
        raise EngineError("E465", f"the engine has no probe `{name}` in {phase}")

    def read(self, probe: Probe, rows: int) -> Array:
        """A copy of a probe's value; meaningful when exactly `probe.step` steps have run."""
        return self.view(probe.buffer, rows).copy()

    def inject(self, probe: Probe, rows: int, value: Array) -> None:
        """Replace a probe's value; dtype and shape must be the buffer's."""
        target = self.view(probe.buffer, rows)
        assert (value.dtype, value.shape) == (target.dtype, target.shape), probe.name
        target[...] = value

    def close(self) -> None:
        self._library.close()

    def _addresses(self) -> list[int]:
        places: list[int] = []
        for i, buffer in enumerate(self.plan.buffers):
            if buffer.memory is MemoryClass.WEIGHTS:
                places.append(address(self._weights[i]))
            else:
                places.append(address(self.memory[buffer.memory]) + buffer.offset)
        return places


class Walk:
    """One phase over some rows, run up to one probe after another, then to the end."""

    def __init__(self, executor: Executor, phase: str, rows: int) -> None:
        self._executor = executor
        self._phase = executor.phase(phase)
        self._rows = rows
        self._done = 0

    def to(self, step: int) -> None:
        """Run until `step` steps are done; steps only move forward."""
        assert step >= self._done, f"{self._phase.name}: step {step} was passed"
        if step > self._done:
            self._executor.run(self._phase.name, self._rows, self._done, step)
            self._done = step

    def finish(self) -> None:
        self.to(len(self._phase.steps))
