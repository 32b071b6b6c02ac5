"""Kernels in the order of the least time that their shortest launch takes."""

from __future__ import annotations

from dataclasses import dataclass

from deepinfer_compile.format.manifest import KernelRecord
from deepinfer_compile.format.roofline import bound, seconds
from deepinfer_compile.runtime.folder import EngineFolder
from deepinfer_compile.runtime.launches import launches


@dataclass(frozen=True)
class Timed:
    """A kernel's shortest launch: the fewest rows it is launched for, and the least time."""

    kernel: KernelRecord
    rows: int
    seconds: float
    bound: str


def by_time(folder: EngineFolder) -> list[Timed]:
    """The longest launch first; kernels of one time by name."""
    machine, fewest = folder.manifest.machine, _fewest_rows(folder)
    timed = []
    for kernel in folder.manifest.kernels:
        rows = fewest.get(kernel.name, 1)
        time, limit = seconds(kernel, rows, machine), bound(kernel, rows, machine)
        timed.append(Timed(kernel, rows, time, limit))
    return sorted(timed, key=lambda one: (-one.seconds, one.kernel.name))


def _fewest_rows(folder: EngineFolder) -> dict[str, int]:
    fewest: dict[str, int] = {}
    for phase in folder.plan.phases:
        for launch in launches(folder.plan, phase):
            for choice in launch.choices:
                rows = fewest.get(choice.kernel, choice.least)
                fewest[choice.kernel] = min(rows, choice.least)
    return fewest
