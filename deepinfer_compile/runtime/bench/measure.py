"""Time an engine: prefill of a prompt, decode at each row count, then the kernels of each.

Every repetition starts from the same state: the requests' contexts were prefilled once and are put
back. One repetition warms up.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from deepinfer_compile.format.manifest import KernelRecord
from deepinfer_compile.format.roofline import bytes_moved
from deepinfer_compile.runtime.bench.ask import Ask
from deepinfer_compile.runtime.bench.work import (
    Launch,
    Request,
    decode_steps,
    make_requests,
    own_pages,
    prefill_steps,
)
from deepinfer_compile.runtime.executor import Executor
from deepinfer_compile.runtime.progress import Meter
from deepinfer_compile.runtime.snapshot import restore_state, save_state

Key = tuple[str, str]  # phase, kernel


@dataclass(frozen=True)
class KernelFigure:
    """All calls of a kernel in one step (of a prompt: in all its chunks), called one at a time.

    `seconds`: of each repetition. `bytes`, `flops`: what its operands say for the rows it ran over;
    states count as at the longest context, experts as if rows shared none until all are read.
    """

    phase: str
    kernel: str
    calls: int
    seconds: tuple[float, ...]
    bytes: int
    flops: int


@dataclass(frozen=True)
class Part:
    """Prefill of `rows` tokens, or a decode step of `rows` requests; the sampler included.

    `seconds`: of each repetition, a step's (decode runs several and takes their mean).
    """

    phase: str
    rows: int
    context: int
    seconds: tuple[float, ...]
    kernels: tuple[KernelFigure, ...]

    @property
    def tokens_per_second(self) -> float:
        return self.rows / median(self.seconds)

    @property
    def apart(self) -> float:
        """Seconds of all kernels, called one at a time."""
        return sum(median(figure.seconds) for figure in self.kernels)


def repetitions(ask: Ask) -> int:
    """How often `measure` adds to its meter."""
    return (1 + len(ask.rows)) * (1 + 2 * ask.runs) + max(ask.rows)


def measure(
    executor: Executor, records: Mapping[str, KernelRecord], ask: Ask, meter: Meter
) -> tuple[Part, ...]:
    """Prefill first, then decode by rows. `records`: of every kernel, by name."""
    plan = executor.plan
    (request,) = make_requests(plan, 1, ask.prompt)
    own_pages(executor, [request])
    steps = prefill_steps(plan, request, ask.prompt)
    clock = _Clock(executor, records, ask.runs, meter)
    parts = [Part("prefill", ask.prompt, 0, *clock.both(steps, steps, _nothing))]

    requests = make_requests(plan, max(ask.rows), ask.context + ask.tokens)
    rewind = _fill(executor, requests, ask.context, meter)
    for rows in ask.rows:
        steps = decode_steps(requests[:rows], ask.context, ask.context + ask.tokens)
        seconds, kernels = clock.both(steps, steps[:1], rewind)
        each = tuple(one / ask.tokens for one in seconds)
        parts.append(Part("decode", rows, ask.context, each, kernels))
    return tuple(parts)


def _nothing() -> None:
    """A prompt starts from no state."""


def _fill(
    executor: Executor, requests: Sequence[Request], context: int, meter: Meter
) -> Callable[[], None]:
    """Prefill every request; returns what puts their states back."""
    own_pages(executor, requests)
    for request in requests:
        for step in prefill_steps(executor.plan, request, context):
            step.run(executor)
        meter.add(context, True)
    saved = [save_state(executor, r.slot, r.pages, context) for r in requests]

    def rewind() -> None:
        for request, snapshot in zip(requests, saved, strict=True):
            restore_state(executor, snapshot, request.slot, request.pages)

    return rewind


@dataclass(frozen=True)
class _Clock:
    executor: Executor
    records: Mapping[str, KernelRecord]
    runs: int
    meter: Meter

    def both(
        self, whole: Sequence[Launch], single: Sequence[Launch], rewind: Callable[[], None]
    ) -> tuple[tuple[float, ...], tuple[KernelFigure, ...]]:
        """Seconds of `whole` in each repetition; figures of the kernels of `single`."""
        seconds = []
        for _ in range(1 + self.runs):
            rewind()
            begin = time.perf_counter()
            for launch in whole:
                launch.run(self.executor)
            seconds.append(time.perf_counter() - begin)
            self._count(whole)
        found: dict[Key, list[float]] = {}
        for _ in range(self.runs):
            rewind()
            for key, spent in self._apart(single).items():
                found.setdefault(key, []).append(spent)
            self._count(single)
        return tuple(seconds[1:]), self._figures(single, found)

    def _count(self, launches: Sequence[Launch]) -> None:
        self.meter.add(sum(launch.rows for launch in launches), True)

    def _apart(self, launches: Sequence[Launch]) -> dict[Key, float]:
        """Seconds of each kernel, every step of the engine called alone."""
        spent: dict[Key, float] = {}
        for launch in launches:
            launch.fill(self.executor)
            for phase, rows in launch.parts():
                for i, step in enumerate(self.executor.phase(phase).steps):
                    begin = time.perf_counter()
                    self.executor.run(phase, rows, i, i + 1)
                    passed = time.perf_counter() - begin
                    key = phase, step.at(rows).kernel
                    spent[key] = spent.get(key, 0.0) + passed
        return spent

    def _figures(
        self, launches: Sequence[Launch], found: Mapping[Key, Sequence[float]]
    ) -> tuple[KernelFigure, ...]:
        """Longest first."""
        costs = {key: _Cost() for key in found}
        for launch in launches:
            for phase, rows in launch.parts():
                for step in self.executor.phase(phase).steps:
                    kernel = step.at(rows).kernel
                    costs[phase, kernel].add(self.records[kernel], rows)
        figures = (
            KernelFigure(*key, cost.calls, tuple(found[key]), cost.bytes, cost.flops)
            for key, cost in costs.items()
        )
        return tuple(sorted(figures, key=lambda f: (-median(f.seconds), f.phase, f.kernel)))


@dataclass
class _Cost:
    """What some launches move and compute, as rooflines count it."""

    calls: int = 0
    bytes: int = 0
    flops: int = 0

    def add(self, record: KernelRecord, rows: int) -> None:
        self.calls += 1
        self.bytes += bytes_moved(record, rows)
        self.flops += rows * record.flops_per_row
