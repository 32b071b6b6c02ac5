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


def _define(value: Value, seen: _Seen, where: str) -> None:
    _expect(value.name not in seen.values, f"%{value.name} is defined twice, again in: {where}")
    seen.values[value.name] = value


def _read(value: Value, seen: _Seen, where: str) -> None:
    known = seen.values.get(value.name)
    _expect(known is not None, f"%{value.name} is used before it is defined, in: {where}")
    _expect(known == value, f"{value} was defined as {known}, in: {where}")
    ender = seen.ended.get(value.name)
    if ender is not None:
        raise VerifyError(
            f"%{value.name} is read after it was consumed, in: {where}\n"
            f"  consumed by: {print_node(ender)}"
        )


def _verify_node(node: Node, seen: _Seen) -> None:
    where = print_node(node)
    for value in node.inputs:
        _read(value, seen, where)
    _verify_types(node, where)
    _verify_states(node, where)
    for value in node.consumed:
        seen.ended[value.name] = node
    for value in node.outputs:
        _define(value, seen, where)


def _verify_types(node: Node, where: str) -> None:
    """`infer` is the operator's own check; a wrong number of operands fails to unpack there."""
    try:
        inferred = node.op.infer(tuple(value.type for value in node.inputs))
    except (AssertionError, ValueError, IndexError, TypeError) as problem:
        raise VerifyError(f"operands do not fit: {problem}, in: {where}") from problem
    declared = tuple(value.type for value in node.outputs)
    shown = ", ".join(map(str, inferred))
    _expect(inferred == declared, f"results should be {shown}, in: {where}")


def _verify_states(node: Node, where: str) -> None:
    consumed = node.consumed
    for version, following in zip(consumed, node.outputs, strict=False):
        _expect(version.type.state, f"%{version.name} is consumed but no state, in: {where}")
        kept = version.type == following.type
        _expect(kept, f"%{version.name} and its next version differ in type, in: {where}")
    for value in node.outputs[len(consumed) :]:
        _expect(not value.type.state, f"%{value.name} is a state from nowhere, in: {where}")
    for version in consumed:
        once = node.inputs.count(version) == 1
        _expect(once, f"%{version.name} is read and consumed at once, in: {where}")
