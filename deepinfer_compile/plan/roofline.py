"""Bytes, operations and the time they need at least: of a kernel's header, of a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from deepinfer_compile.format.plan import EnginePlan
from deepinfer_compile.format.roofline import Machine, bound, bytes_moved, seconds
from deepinfer_compile.ir.graph import Graph
from deepinfer_compile.ir.ops import Cost


def describe(cost: Cost, rows: int, machine: Machine) -> str:
    """One line for a header: bytes, operations and the bound at `rows` rows."""
    micro = seconds(cost, rows, machine) * 1e6
    pool = f" of {quantity(cost.pool_bytes)}B" if cost.pool_bytes else ""
    per_row = quantity(cost.bytes_per_row + cost.picked_per_row)
    return (
        f"{quantity(cost.bytes_fixed)}B + {per_row}B a row{pool}, "
        f"{quantity(cost.flops_per_row)}flop a row; R={rows}: {micro:.3g} us, "
        f"{bound(cost, rows, machine)} bound on {machine.name}"
    )


@dataclass(frozen=True)
class StepBound:
    """The least that a step of `rows` rows costs, its launches one after another."""

    phase: str
    rows: int
    launches: int
    bytes: int
    flops: int
    seconds: float


def step_bounds(
    graphs: Sequence[Graph], plan: EnginePlan, machine: Machine
) -> tuple[StepBound, ...]:
    """For every bucket of every phase; `graphs` are those that `plan` was made from."""
    bounds = []
    for graph, phase in zip(graphs, plan.phases, strict=True):
        costs = [node.op.cost(tuple(v.type for v in node.inputs)) for node in graph.nodes]
        for rows in phase.buckets:
            moved = sum(bytes_moved(cost, rows) for cost in costs)
            flops = sum(rows * cost.flops_per_row for cost in costs)
            least = sum(seconds(cost, rows, machine) for cost in costs)
            bounds.append(StepBound(phase.name, rows, len(costs), moved, flops, least))
    return tuple(bounds)


def quantity(count: int) -> str:
    """Three digits and a decimal prefix, with a space before the unit: `66.0 K`, `512 `."""
    value, prefix = float(count), ""
    for larger in ("K", "M", "G", "T"):
        if value < 1000:
            break
        value, prefix = value / 1000, larger
    digits = f"{value:.3g}" if prefix else str(count)
    return f"{digits} {prefix}"
