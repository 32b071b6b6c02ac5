"""Where a phase can be looked at: between layers, at the values that later layers still read.

    planned graph, semantic graph -> one Place per layer: what ran, its step in each, value names

An engine keeps no probes, but between two launches every value that is still needed lies in its
buffer. The semantic graph says what must be there; fusion may have left a value in one of the two
only, and it is then not looked at.
"""

from __future__ import annotations

from dataclasses import dataclass

from deepinfer_compile.ir.graph import Graph
from deepinfer_compile.ir.types import DType

_COMPARED = (DType.F32, DType.BF16, DType.I32, DType.I64)


@dataclass(frozen=True)
class Place:
    """`values` are new here: what an earlier place has looked at is not repeated."""

    part: str
    planned_step: int
    walked_step: int
    values: tuple[str, ...]


def places(planned: Graph, walked: Graph) -> tuple[Place, ...]:
    """The boundaries that both graphs have, in order; the last is the end of the phase."""
    theirs = dict(_boundaries(walked))
    seen: set[str] = set()
    found = []
    for part, step in _boundaries(planned):
        if part in theirs:
            common = _live(planned, step) & _live(walked, theirs[part]) - seen
            found.append(Place(part, step, theirs[part], tuple(sorted(common))))
            seen |= common
    return tuple(found)


def _boundaries(graph: Graph) -> list[tuple[str, int]]:
    """Each part of the model with the number of nodes that have run when it is done."""
    found = []
    part, layer = "embedding", -1
    for step, node in enumerate(graph.nodes):
        if node.origin.layer is not None and node.origin.layer > layer:
            found.append((part, step))
            layer = node.origin.layer
            part = f"layers.{layer}"
    found.append((part, len(graph.nodes)))
    return [(part, step) for part, step in found if step]


def _live(graph: Graph, step: int) -> set[str]:
    """Values computed by the first `step` nodes that a later one, or the host, reads."""
    made = {
        value.name
        for node in graph.nodes[:step]
        for value in node.outputs
        if not value.type.state and value.type.dtype in _COMPARED
    }
    read = {value.name for node in graph.nodes[step:] for value in node.inputs}
    return made & (read | {value.name for value in graph.outputs})
