"""Values, nodes and graphs.

A graph is a frozen list of nodes in execution order. State values are linear: a node that updates
a state consumes one version and defines the next, and every read of a version comes before the
node that consumes it, so write order is data flow (`ir/verify.py` enforces it).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
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
    """Where a node came from: the spec line `at`, the layer, the passes that made it."""

    at: str
    layer: int | None = None
    passes: tuple[str, ...] = ()


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
class Graph:
    """One phase of a step. `inputs` are row arrays and tables the runtime writes."""

    name: str
    inputs: tuple[Value, ...]
    weights: tuple[Weight, ...]
    states: tuple[Value, ...]
    nodes: tuple[Node, ...]
    outputs: tuple[Value, ...]

    @cached_property
    def producers(self) -> Mapping[str, Node]:
        """The node that defines each value, by name; graph inputs, weights and states have none."""
        return {value.name: node for node in self.nodes for value in node.outputs}

    def producer(self, value: Value) -> Node | None:
        return self.producers.get(value.name)

    def values(self) -> Iterator[Value]:
        """Every value defined: inputs, weights, states, then node outputs in order."""
        yield from self.inputs
        yield from (weight.value for weight in self.weights)
        yield from self.states
        for node in self.nodes:
            yield from node.outputs
