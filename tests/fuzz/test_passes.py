"""Whatever the graph: every pass keeps it well formed, keeps its meaning, and is done in one go.

A failure prints a case to paste into tests/passes.
"""

from __future__ import annotations

from collections import Counter
from functools import partial

import pytest
import torch
from deepinfer_targets.cpu import TARGET
from hypothesis import HealthCheck, Phase, given, note, settings
from hypothesis import strategies as st

from deepinfer_compile.driver import fuse
from deepinfer_compile.ir.graph import Graph
from deepinfer_compile.ir.text import parse_graph, print_graph
from deepinfer_compile.ir.verify import verify
from deepinfer_compile.ir.walk import WalkResult, walk
from deepinfer_compile.passes import PIPELINE
from tests.fuzz.graphs import data_for, graphs, replaceable
from tests.passes.pass_cases import PassCase, body, show

# The same graphs every time, on any machine; `make slow` draws others.
fixed = partial(settings, deadline=None, database=None, derandomize=True)
drawn = partial(settings, deadline=None, database=None)
QUIET = [HealthCheck.too_slow, HealthCheck.data_too_large]


def as_case(graph: Graph, name: str) -> str:
    """The text of a golden case for pass `name`."""
    inputs = ", ".join(map(str, (*graph.inputs, *graph.states)))
    return show(PassCase("found_by_fuzzing", [name], "", f"({inputs})", body(graph)))


def meaning(graph: Graph, seed: int) -> WalkResult:
    """Everything that can be seen from outside, with other numbers at every probe."""
    feeds = {value.name: data_for(value, seed) for value in graph.inputs}
    states = {value.name: data_for(value, seed) for value in graph.states}
    probes = [value.name for value in graph.probes]
    inject = {v.name: data_for(v, seed) for v in graph.probes if replaceable(v)}
    return walk(graph, feeds, {}, states, taps=probes, inject=inject)


def assert_same_meaning(graph: Graph, before: Graph, seed: int) -> None:
    got, expect = meaning(graph, seed), meaning(before, seed)
    for side in ("outputs", "states", "taps"):
        a, b = getattr(got, side), getattr(expect, side)
        assert a.keys() == b.keys(), side
        for name, tensor in a.items():
            same = torch.equal(tensor.view(torch.uint8), b[name].view(torch.uint8))
            assert same, f"%{name} has another value"


def check(graph: Graph, for_cpu: bool, seed: int) -> None:
    target = TARGET if for_cpu else None
    verify(graph)
    assert parse_graph(print_graph(graph)) == graph
    for each in PIPELINE:
        note(as_case(graph, each.name))
        (after,) = fuse([graph], target, [each])
        verify(after)
        assert parse_graph(print_graph(after)) == after
        assert fuse([after], target, [each]) == (after,), "a second run changes something"
        if after.nodes != graph.nodes:
            assert_same_meaning(after, graph, seed)
        if target is not None:
            semantic = {node.outputs[0].name for node in graph.nodes}
            for node in after.nodes:
                rule, _ = target.choose(node)
                fresh = each.name in node.origin.passes
                assert rule is not None or not fresh, f"no kernel for {node}"
                assert node.outputs[0].name in semantic or fresh
        graph = after


@fixed(max_examples=80, suppress_health_check=QUIET)
@given(graphs(most=8), st.booleans(), st.integers(0, 7))
def test_passes_keep_any_graph_whole(graph: Graph, for_cpu: bool, seed: int) -> None:
    check(graph, for_cpu, seed)


@pytest.mark.slow
@drawn(max_examples=1000, suppress_health_check=QUIET)
@given(graphs(most=24), st.booleans(), st.integers(0, 1000))
def test_passes_keep_larger_graphs_whole(graph: Graph, for_cpu: bool, seed: int) -> None:
    check(graph, for_cpu, seed)


def test_the_graphs_drawn_give_every_pass_something_to_do() -> None:
    made: Counter[str] = Counter()

    @fixed(max_examples=200, suppress_health_check=QUIET, phases=[Phase.generate])
    @given(graphs(most=8))
    def count(graph: Graph) -> None:
        (after,) = fuse([graph], None, PIPELINE)
        made.update(name for node in after.nodes for name in node.origin.passes)

    count()
    assert made.keys() == {each.name for each in PIPELINE}, made
