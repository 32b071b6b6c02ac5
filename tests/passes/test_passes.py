"""Every pass does to a graph exactly what tests/passes/*.test says, and nothing the second time."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from deepinfer_compile.diagnostics import CompileError
from deepinfer_compile.ir import ops
from deepinfer_compile.ir.graph import Graph, Node, Rewrite
from deepinfer_compile.ir.text import parse_graph, print_graph
from deepinfer_compile.ir.verify import VerifyError
from deepinfer_compile.passes import PIPELINE, find_pass, ordered
from deepinfer_compile.passes.base import Pass, place, rewrite_each, run_pipeline
from tests.passes.pass_cases import FOLDER, PassCase, body, parse_cases, show

FILES = sorted(FOLDER.glob("*.test"))
CASES = [case for path in FILES for case in parse_cases(path.read_text(encoding="utf-8"))]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_pass_does_what_is_recorded(case: PassCase) -> None:
    graph = case.graph()
    once = case.fused(graph)
    assert body(once) == case.after
    assert parse_graph(print_graph(once)) == once
    assert case.fused(once) == once


def test_every_pass_has_a_case_where_it_fires_and_one_where_it_must_not() -> None:
    fires = {(case.run[-1], case.before != case.after) for case in CASES}
    assert fires == {(each.name, fired) for each in PIPELINE for fired in (True, False)}
    assert [path.stem for path in FILES] == sorted(each.name.replace("-", "_") for each in PIPELINE)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_files_are_written_as_they_would_be_rewritten(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert "\n".join(map(show, parse_cases(text))) == text


def test_the_order_of_passes_is_checked() -> None:
    first, second = PIPELINE[0], replace(PIPELINE[1], after=(PIPELINE[0].name,))
    assert ordered(first, second) == (first, second)
    with pytest.raises(AssertionError, match=f"{second.name} runs before {first.name}"):
        ordered(second, first)
    with pytest.raises(AssertionError, match="listed twice"):
        ordered(first, first)


def test_an_unknown_pass_lists_those_there_are() -> None:
    with pytest.raises(CompileError, match=r"(?s)E004.*`fuse-all`.*--stop-after.*fuse-swiglu"):
        find_pass("fuse-all", "--stop-after")


def test_a_pass_that_breaks_a_graph_is_named() -> None:
    (case,) = (case for case in CASES if case.name == "fuse_rope_quantize")
    graph = case.graph()
    broken = Pass("drop-all", lambda graph, _: replace(graph, nodes=()))
    with pytest.raises(VerifyError, match="after drop-all of case: %r is used before"):
        run_pipeline(graph, [broken], lambda _: ())


PLACES = """\
graph case
  input %x: bf16[R,64]
  input %angles: f32[R,2,16]
  input %slot: i32[R]
  input %position: i32[R]
  state %ring: !bf16[9,19,64]
  %a: bf16[R,64] = rope %x, %angles
  %ring.1: !bf16[9,19,64] = ring_store %ring, %slot, %position, %a
  %b: bf16[R,64] = rope %a, %angles
  %c: bf16[R,64] = rope %b, %angles
  probe {probe}
  return %c
"""


@pytest.mark.parametrize(
    ("reads", "gives", "probe", "at"),
    [
        ("x", "c", "%x", 2),
        ("x", "b c", "%c", 2),
        ("ring.1", "c", "%x", 2),
        ("ring", "c", "%x", None),  # consumed before %a is there
        ("a x", "b", "%x", None),  # %c is missed
        ("b", "c", "%x", None),  # reads what it defines
        ("x", "b c", "%b", None),  # a host may replace %b before %c is computed
        ("x", "c", "%b", None),  # and read it
    ],
)
def test_a_rewrite_is_placed_where_no_value_is_missed(
    reads: str, gives: str, probe: str, at: int | None
) -> None:
    """%b and %c become one node that also reads %a."""
    graph = parse_graph(PLACES.format(probe=probe))
    by_name = {value.name: value for value in graph.values()}
    inputs, outputs = (
        tuple(by_name[name] for name in names.split()) for names in (f"a {reads}", gives)
    )
    merged = Node(ops.Rope(), inputs, outputs)
    assert place(graph, Rewrite(graph.nodes[2:], merged)) == at


def test_a_rewrite_stands_before_the_first_reader_of_what_it_gives() -> None:
    graph = parse_graph(PLACES.format(probe="%x"))
    a, _, b, c = graph.nodes
    both = Node(ops.Rope(), a.inputs, (*a.outputs, *b.outputs))
    assert place(graph, Rewrite((a, b), both)) == 0
    late = replace(both, inputs=(*a.inputs, *graph.nodes[1].outputs))
    assert place(graph, Rewrite((a, b), late)) is None  # the store reads %a
    assert place(graph, Rewrite((b, c), Node(ops.Rope(), b.inputs, c.outputs))) == 2


def test_the_target_is_asked_only_about_what_could_be_done() -> None:
    asked: list[str] = []

    def propose(graph: Graph, node: Node) -> list[Rewrite]:
        lost = Node(ops.FirstStream(4), graph.inputs[:1], ())
        return [Rewrite((node,), lost), Rewrite((node,), replace(node, op=ops.Rope(inverse=True)))]

    def refusals(node: Node) -> tuple[str, ...]:
        asked.append(node.op.name)
        return ("no",)

    graph = parse_graph(PLACES.format(probe="%x"))
    noted = rewrite_each(propose)(
        replace(graph, nodes=graph.nodes[:1], outputs=graph.nodes[0].outputs), refusals
    )
    assert asked == ["rope", "rope"]  # a second round, to see that nothing is left
    assert noted.nodes[0].origin.refused == ("rope: no",)
