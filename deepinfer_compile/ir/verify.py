"""What "well formed" means: names, types, order, and linear state.

`R` leads or is absent by construction of `TensorType`. A state has one live version at a time: a
node that consumes a version defines the next one as its first result (its i-th consumed operand, as
its i-th), and nothing reads a version once it is consumed.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from deepinfer_compile.ir.graph import Graph, Node, Value
from deepinfer_compile.ir.text import print_node


class VerifyError(AssertionError):
    """A broken invariant of a graph: a mistake of the compiler, not of its user."""


@dataclass
class _Seen:
    """What the nodes so far define, and which state versions they ended, by whom."""

    values: dict[str, Value] = field(default_factory=dict)
    ended: dict[str, Node] = field(default_factory=dict)


def verify(graph: Graph) -> None:
    """Raise `VerifyError`, naming the node, unless the graph is well formed."""
    seen = _Seen()
    for value in graph.inputs:
        _expect(not value.type.state, f"input {value} is typed as a state")
        _define(value, seen, graph.name)
    for weight in graph.weights:
        fixed = not (weight.value.type.by_rows or weight.value.type.state)
        _expect(fixed, f"weight {weight.value} has rows, or is typed as a state")
        _expect(bool(weight.source), f"weight {weight.value} has no source")
        _define(weight.value, seen, graph.name)
    for value in graph.states:
        _expect(value.type.state, f"state {value} is not typed as one")
        _expect(not value.type.by_rows, f"state {value} has rows")
        _define(value, seen, graph.name)
    for node in graph.nodes:
        _verify_node(node, seen)
    for value in graph.probes:
        known = seen.values.get(value.name)
        _expect(known == value, f"probe {value} was defined as {known}")
    for value in graph.outputs:
        _read(value, seen, f"return of {graph.name}")


def _expect(holds: bool, what: str) -> None:
    if not holds:
        raise VerifyError(what)


def _define(value: Value, seen: _Seen, where: Node | str) -> None:
    if value.name in seen.values:
        raise VerifyError(f"%{value.name} is defined twice, again in: {_shown(where)}")
    seen.values[value.name] = value


def _shown(where: Node | str) -> str:
    """Texts are made for mistakes only: a large graph has thousands of nodes."""
    return where if isinstance(where, str) else print_node(where)


def _read(value: Value, seen: _Seen, where: Node | str) -> None:
    known = seen.values.get(value.name)
    if known is None:
        raise VerifyError(f"%{value.name} is used before it is defined, in: {_shown(where)}")
    if known != value:
        raise VerifyError(f"{value} was defined as {known}, in: {_shown(where)}")
    ender = seen.ended.get(value.name)
    if ender is not None:
        raise VerifyError(
            f"%{value.name} is read after it was consumed, in: {_shown(where)}\n"
            f"  consumed by: {print_node(ender)}"
        )


def _verify_node(node: Node, seen: _Seen) -> None:
    for value in node.inputs:
        _read(value, seen, node)
    _verify_types(node)
    _verify_states(node)
    for value in node.consumed:
        seen.ended[value.name] = node
    for value in node.outputs:
        _define(value, seen, node)


def _verify_types(node: Node) -> None:
    """`infer` is the operator's own check; a wrong number of operands fails to unpack there."""
    try:
        inferred = node.op.infer(tuple(value.type for value in node.inputs))
    except (AssertionError, ValueError, IndexError, TypeError) as problem:
        raise VerifyError(f"operands do not fit: {problem}, in: {print_node(node)}") from problem
    if inferred != tuple(value.type for value in node.outputs):
        shown = ", ".join(map(str, inferred))
        raise VerifyError(f"results should be {shown}, in: {print_node(node)}")


def _verify_states(node: Node) -> None:
    problem = _state_problem(node)
    if problem:
        raise VerifyError(f"{problem}, in: {print_node(node)}")


def _state_problem(node: Node) -> str | None:
    consumed = node.consumed
    for version, following in zip(consumed, node.outputs, strict=False):
        if not version.type.state:
            return f"%{version.name} is consumed but no state"
        if version.type != following.type:
            return f"%{version.name} and its next version differ in type"
    for value in node.outputs[len(consumed) :]:
        if value.type.state:
            return f"%{value.name} is a state from nowhere"
    for version in consumed:
        if node.inputs.count(version) != 1:
            return f"%{version.name} is read and consumed at once"
    return None
