"""What this machine can do at most, measured on the spot, and what the clock sees of a call."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from statistics import median

import numpy as np

from deepinfer_compile.runtime.executor import Executor

COPIED = 256 << 20  # bytes: more than caches hold
SIDE = 1024
_TRIES = 5
_CALLS = 200


@dataclass(frozen=True)
class Ceilings:
    """Bytes a second read and written by a copy, fp32 operations a second of a matrix product;
    seconds of a call of the engine that runs no kernel."""

    bandwidth: float
    flops: float
    call: float


def measure_ceilings(executor: Executor, threads: int) -> Ceilings:
    """On `threads` threads; takes a second or two, and half a gigabyte for that time."""
    return Ceilings(_bandwidth(threads), _flops(threads), call_seconds(executor))


def _bandwidth(threads: int) -> float:
    source, target = np.ones(COPIED, dtype=np.uint8), np.zeros(COPIED, dtype=np.uint8)
    parts = list(zip(np.array_split(source, threads), np.array_split(target, threads), strict=True))
    with ThreadPoolExecutor(threads) as pool:  # NumPy copies without the interpreter's lock

        def copy() -> None:
            list(pool.map(lambda part: np.copyto(part[1], part[0]), parts))

        return 2 * COPIED / _best(copy)


def _flops(threads: int) -> float:
    import torch  # here: --help should not pay for it

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        a, b = (torch.full((SIDE, SIDE), value) for value in (0.5, 0.25))
        return 2 * SIDE**3 / _best(lambda: torch.mm(a, b))
    finally:
        torch.set_num_threads(before)


def _best(run: Callable[[], object]) -> float:
    """Seconds of the fastest of some tries; the first one warms up."""
    seconds = []
    for _ in range(1 + _TRIES):
        begin = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - begin)
    return min(seconds[1:])


def call_seconds(executor: Executor) -> float:
    """Median seconds of an empty range of steps: what a kernel's clock shows besides the kernel."""
    phase, seconds = executor.plan.phases[0].name, []
    for _ in range(_CALLS):
        begin = time.perf_counter()
        executor.run(phase, 1, 0, 0)
        seconds.append(time.perf_counter() - begin)
    return median(seconds)
