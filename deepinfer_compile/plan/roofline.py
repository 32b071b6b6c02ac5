"""Bytes, operations and the time they need at least: every number of a kernel's header.

bytes(R) = bytes_fixed + R * bytes_per_row
time(R)  = max(bytes(R) / bandwidth, R * flops_per_row / flops)
"""

from __future__ import annotations

from deepinfer_compile.ir.ops import Cost
from deepinfer_compile.target import Machine


def bytes_moved(cost: Cost, rows: int) -> int:
    return cost.bytes_fixed + rows * cost.bytes_per_row


def seconds(cost: Cost, rows: int, machine: Machine) -> float:
    """The lower bound for a launch of `rows` rows on the whole device."""
    return max(
        bytes_moved(cost, rows) / machine.bandwidth, rows * cost.flops_per_row / machine.flops
    )


def bound(cost: Cost, rows: int, machine: Machine) -> str:
    """What limits the launch: `memory` or `compute`."""
    by_memory = bytes_moved(cost, rows) / machine.bandwidth
    return "memory" if by_memory >= rows * cost.flops_per_row / machine.flops else "compute"


def describe(cost: Cost, machine: Machine) -> str:
    """One line for a header: bytes, operations and the bound at one row."""
    micro = seconds(cost, 1, machine) * 1e6
    return (
        f"{quantity(cost.bytes_fixed)}B + {quantity(cost.bytes_per_row)}B a row, "
        f"{quantity(cost.flops_per_row)}flop a row; R=1: {micro:.3g} us, "
        f"{bound(cost, 1, machine)} bound on {machine.name}"
    )


def quantity(count: int) -> str:
    """Three digits and a decimal prefix, with a space before the unit: `66.0 K`, `512 `."""
    value, prefix = float(count), ""
    for larger in ("K", "M", "G", "T"):
        if value < 1000:
            break
        value, prefix = value / 1000, larger
    digits = f"{value:.3g}" if prefix else str(count)
    return f"{digits} {prefix}"
