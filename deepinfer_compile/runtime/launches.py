"""What a program launches, in order, and how long its values live.

A step's number is its index in plan.json. A value of the arena lives from the first step that
touches it to the last: before and after, its bytes belong to others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from deepinfer_compile.format.plan import Buffer, EnginePlan, MemoryClass, Phase, Step


@dataclass(frozen=True)
class KernelChoice:
    """A kernel, and the rows it is launched for: `least` to `most`."""

    kernel: str
    least: int
    most: int


@dataclass(frozen=True)
class Launch:
    """One step of a phase with its buffers looked up. `choices` ascend in rows."""

    phase: str
    step: int
    choices: tuple[KernelChoice, ...]
    buffers: tuple[Buffer, ...]

    @property
    def kernels(self) -> tuple[str, ...]:
        return tuple(choice.kernel for choice in self.choices)

    @property
    def spelled(self) -> str:
        """Its kernels: `few (1-4 rows) or many (5-64 rows)`, one alone without its rows."""
        if len(self.choices) == 1:
            return self.choices[0].kernel
        return " or ".join(f"{c.kernel} ({c.least}-{c.most} rows)" for c in self.choices)

    @property
    def names(self) -> tuple[str, ...]:
        """Of its buffers, in the order of the kernel's parameters."""
        return tuple(buffer.name for buffer in self.buffers)


@dataclass(frozen=True)
class Life:
    """The first and the last step that touch a buffer of the arena."""

    buffer: Buffer
    first: int
    last: int


def launches(plan: EnginePlan, phase: Phase) -> tuple[Launch, ...]:
    """The steps of a phase."""
    return tuple(
        Launch(phase.name, i, _choices(step), tuple(plan.buffers[n] for n in step.buffers))
        for i, step in enumerate(phase.steps)
    )


def _choices(step: Step) -> tuple[KernelChoice, ...]:
    ends = [variant.most_rows for variant in step.variants]
    begins = [1, *(end + 1 for end in ends)]
    kernels = [variant.kernel for variant in step.variants]
    return tuple(map(KernelChoice, kernels, begins, ends))


def lives(program: Sequence[Launch]) -> tuple[Life, ...]:
    """Every arena buffer that the launches touch, in the order of their first steps."""
    found: dict[str, Life] = {}
    for launch in program:
        for buffer in launch.buffers:
            if buffer.memory is MemoryClass.ARENA:
                first = found[buffer.name].first if buffer.name in found else launch.step
                found[buffer.name] = Life(buffer, first, launch.step)
    return tuple(found.values())
