"""The least time a launch can take, from what its operands say and what the hardware can do.

bytes(R) = bytes_fixed + R * bytes_per_row + min(R * picked_per_row, pool_bytes)
time(R)  = max(bytes(R) / bandwidth, R * flops_per_row / flops)

States count as at the longest context. At a known position a row's operations are those of
`fixed_flops_per_row` and, for each `PerEntry`, of the entries that it works on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from deepinfer_compile.format.entries import PerEntry


@dataclass(frozen=True)
class Machine:
    """Numbers of the hardware that rules and rooflines use.

    `bandwidth` in bytes per second, `flops` in fp32 operations per second, of the whole device.
    """

    name: str
    bandwidth: float
    flops: float


class Work(Protocol):
    """What a launch of R rows moves and computes. `flops_per_row` includes `most_flops` of each of
    `per_entry`."""

    @property
    def bytes_fixed(self) -> int: ...
    @property
    def bytes_per_row(self) -> int: ...
    @property
    def flops_per_row(self) -> int: ...
    @property
    def picked_per_row(self) -> int: ...
    @property
    def pool_bytes(self) -> int: ...
    @property
    def per_entry(self) -> tuple[PerEntry, ...]: ...


def fixed_flops_per_row(work: Work) -> int:
    """Those that do not depend on the row's position."""
    return work.flops_per_row - sum(part.most_flops for part in work.per_entry)


def bytes_moved(work: Work, rows: int) -> int:
    picked = min(rows * work.picked_per_row, work.pool_bytes)
    return work.bytes_fixed + rows * work.bytes_per_row + picked


def seconds(work: Work, rows: int, machine: Machine) -> float:
    """The lower bound for a launch of `rows` rows on the whole device."""
    return max(
        bytes_moved(work, rows) / machine.bandwidth, rows * work.flops_per_row / machine.flops
    )


def bound(work: Work, rows: int, machine: Machine) -> str:
    """What limits the launch: `memory` or `compute`."""
    by_memory = bytes_moved(work, rows) / machine.bandwidth
    return "memory" if by_memory >= rows * work.flops_per_row / machine.flops else "compute"
