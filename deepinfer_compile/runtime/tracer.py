"""The launches of the next steps, each with its times: what a profile is made of.

An executor that has a tracer launches the kernels of a step one at a time; the bits are the same.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter_ns

SAMPLE = "sample"


@dataclass(frozen=True)
class Traced:
    """Launch number `launch` of a phase over `rows` rows in step `step`; times in nanoseconds."""

    step: int
    phase: str
    launch: int
    rows: int
    began: int
    ended: int


class Tracer:
    """Takes `steps` steps, a forward phase and its sample phase each, from whenever the next one
    begins. The device's thread runs them; others wait for `begun` and `done`, or `cancel`."""

    def __init__(self, steps: int, clock: Callable[[], int] = perf_counter_ns) -> None:
        self.begun = threading.Event()
        self.done = threading.Event()
        self.cancelled = False
        self._steps = steps
        self._clock = clock
        self._gate = threading.Lock()  # between the last step and giving up
        self._taken = 0
        self._launches: list[Traced] = []

    @property
    def launches(self) -> tuple[Traced, ...]:
        """All of them, once `done`."""
        assert self.done.is_set()
        assert not self.cancelled
        return tuple(self._launches)

    def wait(self, event: threading.Event, seconds: float) -> bool:
        """For `begun` or `done`; False after so long, or when it was cancelled."""
        return event.wait(seconds) and not self.cancelled

    def cancel(self) -> bool:
        """Take no more, and wait no longer; False when it is done already."""
        with self._gate:
            self.cancelled = self.cancelled or not self.done.is_set()
            self.begun.set()
            self.done.set()
            return self.cancelled

    def wants(self, phase: str) -> bool:
        """Whether the phase that is about to run is part of the trace."""
        with self._gate:
            if self.done.is_set():
                return False
            if phase == SAMPLE:
                return self._taken > 0
            if self._taken == self._steps:  # the last one sampled nothing
                self.done.set()
                return False
            self._taken += 1
            self.begun.set()
            return True

    def run(
        self, phase: str, rows: int, first: int, last: int, launch: Callable[[int], None]
    ) -> None:
        """Launch numbers first..last-1 of a phase that it wants."""
        for number in range(first, last):
            began = self._clock()
            launch(number)
            one = Traced(self._taken - 1, phase, number, rows, began, self._clock())
            self._launches.append(one)
        with self._gate:
            if phase == SAMPLE and self._taken == self._steps:
                self.done.set()
