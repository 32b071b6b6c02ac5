"""Where a phase can be looked at: between layers, at the values that later launches still read.

    planned graph, semantic graph -> one Place per layer: what ran, its step in each, value names

An engine keeps no probes, but between two launches every value that is still needed lies in its
buffer. The semantic graph says what must be there: its step is the one that has made all of them,
since a fused kernel at the end of a layer may have begun the next one.
"""

from __future__ import annotations

from dataclasses import dataclass

from deepinfer_compile.ir.graph import Graph


@dataclass(frozen=True)
class Place:
    """`values` are new here: what an earlier place has looked at is not repeated."""

    part: str
    planned_step: int
    walked_step: int
    values: tuple[str, ...]


def places(planned: Graph, walked: Graph) -> tuple[Place, ...]:
    """The boundaries between layers, in order; the last is the end of the phase."""
    made = {
        value.name: step + 1 for step, node in enumerate(walked.nodes) for value in node.outputs
    }
    seen: set[str] = set()
    found = []
    for part, step in _boundaries(planned):
        new = (_live(planned, step) & made.keys()) - seen
        if new:
            found.append(Place(part, step, max(made[name] for name in new), tuple(sorted(new))))
            seen |= new
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
        value.name for node in graph.nodes[:step] for value in node.outputs if not value.type.state
    }
    read = {value.name for node in graph.nodes[step:] for value in node.inputs}
    return made & (read | {value.name for value in graph.outputs})
