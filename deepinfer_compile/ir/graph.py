"""Values, nodes and graphs.

A graph is a frozen list of nodes in execution order. State values are linear: a node that updates
a state consumes one version and defines the next, and every read of a version comes before the
node that consumes it, so write order is data flow (`ir/verify.py` enforces it).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from deepinfer_compile.ir.ops import Op
from deepinfer_compile.ir.types import TensorType


@dataclass(frozen=True)
class Value:
    """A named tensor or state version."""

    name: str
    type: TensorType

    def __str__(self) -> str:
        return f"%{self.name}: {self.type}"


@dataclass(frozen=True)
class Origin:
    """Where a node came from: the spec lines `at`, the layer, the passes that made it.

    `refused` are the fusions the target had no kernel for, each with the pass that proposed it.
    """

    at: str
    layer: int | None = None
    passes: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()

    @property
    def places(self) -> tuple[str, ...]:
        """The spec lines, one by one."""
        return tuple(self.at.split(", "))

    def merged(self, *others: Origin) -> Origin:
        """The origin of a node made of several, in the layer of the first."""
        every = (self, *others)
        at = dict.fromkeys(place for origin in every for place in origin.places if place)
        passes = dict.fromkeys(name for origin in every for name in origin.passes)
        refused = dict.fromkeys(why for origin in every for why in origin.refused)
        return Origin(", ".join(at), self.layer, tuple(passes), tuple(refused))


@dataclass(frozen=True)
class Weight:
    """A parameter and the checkpoint tensor it is read from.

    `{e}` in `source` stands for the expert: the tensors of all experts stacked on the first dim.
    A source that starts with `@` is computed by the compiler (`@token_map`).
    """

    value: Value
    source: str


@dataclass(frozen=True)
class Node:
    op: Op
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    origin: Origin = field(default=Origin(""))

    @property
    def consumed(self) -> tuple[Value, ...]:
        """The state versions this node ends."""
        return tuple(self.inputs[i] for i in self.op.consumes)


@dataclass(frozen=True)
class Rewrite:
    """One node in the place of several. Results of `remove` that `insert` lacks must be unread."""

    remove: tuple[Node, ...]
    insert: Node


@dataclass(frozen=True)
class Graph:
    """One phase of a step. `inputs` are row arrays and tables the runtime writes.

    `probes` are values a debug engine lets its host read and replace as soon as they are defined.
    """

    name: str
    inputs: tuple[Value, ...]
    weights: tuple[Weight, ...]
    states: tuple[Value, ...]
    nodes: tuple[Node, ...]
    outputs: tuple[Value, ...]
    probes: tuple[Value, ...] = ()

    @cached_property
    def producers(self) -> Mapping[str, Node]:
        """The node that defines each value, by name; graph inputs, weights and states have none."""
        return {value.name: node for node in self.nodes for value in node.outputs}

    def producer(self, value: Value) -> Node | None:
        return self.producers.get(value.name)

    @cached_property
    def readers(self) -> Mapping[str, tuple[Node, ...]]:
        """The nodes that read each value, by name, in order."""
        found: dict[str, list[Node]] = {}
        for node in self.nodes:
            for name in dict.fromkeys(value.name for value in node.inputs):
                found.setdefault(name, []).append(node)
        return {name: tuple(nodes) for name, nodes in found.items()}

    @cached_property
    def positions(self) -> Mapping[str, int]:
        """The position of the node that defines each value, by name."""
        return {v.name: i for i, node in enumerate(self.nodes) for v in node.outputs}

    def position(self, node: Node) -> int:
        return self.positions[node.outputs[0].name]

    def readers_of(self, value: Value) -> tuple[Node, ...]:
        return self.readers.get(value.name, ())

    def apply(self, rewrites: Sequence[tuple[int, Rewrite]]) -> Graph:
        """Rewrites that share no node, each with the position its new node is put before."""
        gone = {self.position(node) for _, rewrite in rewrites for node in rewrite.remove}
        inserted: dict[int, list[Node]] = {}
        for at, rewrite in rewrites:
            inserted.setdefault(at, []).append(rewrite.insert)
        nodes: list[Node] = []
        for i, node in enumerate(self.nodes):
            nodes += inserted.get(i, ())
            if i not in gone:
                nodes.append(node)
        return replace(self, nodes=tuple(nodes))

    def values(self) -> Iterator[Value]:
        """Every value defined: inputs, weights, states, then node outputs in order."""
        yield from self.inputs
        yield from (weight.value for weight in self.weights)
        yield from self.states
        for node in self.nodes:
            yield from node.outputs
