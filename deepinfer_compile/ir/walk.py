"""The reference walker: a graph evaluated node by node with the float64 meaning of its operators.

An oracle for tests and number comparisons, not an engine: it is slow, keeps every value until the
end, and knows nothing of buffers, tiles or devices.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, field

from torch import Tensor

from deepinfer_compile.ir.graph import Graph, Node
from deepinfer_compile.ir.reference import evaluate

_NOTHING: Mapping[str, Tensor] = {}
Visit = Callable[[int, dict[str, Tensor]], None]


@dataclass(frozen=True)
class WalkResult:
    """`states` holds the final version of every state under the state's own name."""

    outputs: dict[str, Tensor]
    states: dict[str, Tensor]
    taps: dict[str, Tensor] = field(default_factory=dict)


def walk(
    graph: Graph,
    feeds: Mapping[str, Tensor],
    weights: Mapping[str, Tensor],
    states: Mapping[str, Tensor],
    taps: Container[str] = (),
    inject: Mapping[str, Tensor] = _NOTHING,
    visit: Visit = lambda step, values: None,
) -> WalkResult:
    """Evaluate `graph`; everything is given and returned by value name, as stored.

    `taps` are values to return besides; `inject` replaces a value after it is computed. `visit` is
    called with the number of nodes that have run, before each and at the end; it may replace any
    of the values there are."""
    values: dict[str, Tensor] = {value.name: feeds[value.name] for value in graph.inputs}
    values |= {weight.value.name: weights[weight.value.name] for weight in graph.weights}
    values |= {value.name: states[value.name] for value in graph.states}
    latest = {value.name: value.name for value in graph.states}
    roots = dict(latest)
    for step, node in enumerate(graph.nodes):
        visit(step, values)
        for name, result in _results(node, values).items():
            values[name] = _injected(name, result, inject)
        for ended, following in zip(node.consumed, node.outputs, strict=False):
            root = roots[ended.name]
            roots[following.name] = root
            latest[root] = following.name
    visit(len(graph.nodes), values)
    return WalkResult(
        outputs={value.name: values[value.name] for value in graph.outputs},
        states={root: values[name] for root, name in latest.items()},
        taps={name: value for name, value in values.items() if name in taps},
    )


def _results(node: Node, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    inputs = [values[value.name] for value in node.inputs]
    types = [value.type for value in node.inputs]
    results = evaluate(node.op, inputs, types)
    return {value.name: result for value, result in zip(node.outputs, results, strict=True)}


def _injected(name: str, result: Tensor, inject: Mapping[str, Tensor]) -> Tensor:
    if name not in inject:
        return result
    other = inject[name]
    fits = other.shape == result.shape and other.dtype is result.dtype
    assert fits, f"%{name} is {result.dtype} {tuple(result.shape)}; injected {tuple(other.shape)}"
    return other
