"""What a pass is, how its rewrites are applied, and the pipeline that runs passes in order.

A fusion proposes, the target disposes: `Refusals` says why the target has no kernel for a node, and
is empty when it has one. A refused fusion leaves its nodes as they are and the reason in their
origin. No pass checks what is checked here: a value that a probe, the caller or another node needs
is never lost, and one that a probe may replace is never read inside the node that defines it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from deepinfer_compile.diagnostics import error
from deepinfer_compile.format.whole_file import write_whole
from deepinfer_compile.ir.graph import Graph, Node, Rewrite
from deepinfer_compile.ir.text import print_graph
from deepinfer_compile.ir.verify import VerifyError, verify

Refusals = Callable[[Node], tuple[str, ...]]
Run = Callable[[Graph, Refusals], Graph]
Match = Callable[[Graph, Node], Iterable[Rewrite]]


@dataclass(frozen=True)
class Pass:
    """`after` are passes that must run before this one; the pipeline's order is checked."""

    name: str
    run: Run
    after: tuple[str, ...] = ()


def run_pipeline(
    graph: Graph, passes: Sequence[Pass], refusals: Refusals, dump: Path | None = None
) -> Graph:
    """The graph after `passes`, verified after each. What a pass made has its name in the origin.

    `dump` is a folder for the text of the graph as it was and after every pass that changed it;
    E502 when it cannot be written.
    """
    _write(graph, dump, "00-build")
    for number, each in enumerate(passes, 1):
        before = graph
        graph = each.run(before, refusals)
        if graph is before:
            continue
        graph = _marked(before, graph, each.name)
        _write(graph, dump, f"{number:02}-{each.name}")
        try:
            verify(graph)
        except VerifyError as broken:
            raise VerifyError(f"after {each.name} of {graph.name}: {broken}") from broken
    return graph


def rewrite_each(match: Match) -> Run:
    """Of the rewrites that `match` proposes for a node, best first, apply the first that keeps the
    graph whole and that the target has a kernel for; until there are none."""

    def run(graph: Graph, refusals: Refusals) -> Graph:
        while True:
            found = _Round(graph, refusals)
            for node in graph.nodes:
                found.consider(node, match(graph, node))
            if not found.changes:
                return graph
            graph = graph.apply(found.changes)

    return run


@dataclass
class _Round:
    """Rewrites that can be applied together: none reads what another one's nodes define."""

    graph: Graph
    refusals: Refusals
    changes: list[tuple[int, Rewrite]] = field(default_factory=list)
    read: set[str] = field(default_factory=set)
    defined: set[str] = field(default_factory=set)

    def consider(self, node: Node, proposals: Iterable[Rewrite]) -> None:
        refused: list[str] = []
        for rewrite in proposals:
            at = place(self.graph, rewrite)
            if at is None:
                continue
            why = self.refusals(rewrite.insert)
            if not why:
                self._add(at, rewrite)
                return
            refused += (f"{rewrite.insert.op.name}: {reason}" for reason in why)
        new = dict.fromkeys(why for why in refused if why not in node.origin.refused)
        if new:
            every = (*node.origin.refused, *new)
            noted = replace(node, origin=replace(node.origin, refused=every))
            self._add(self.graph.position(node), Rewrite((node,), noted))

    def _add(self, at: int, rewrite: Rewrite) -> None:
        read = {value.name for node in rewrite.remove for value in node.inputs}
        defined = {value.name for node in rewrite.remove for value in node.outputs}
        if defined & (self.read | self.defined) or read & self.defined:
            return  # its turn comes in the next round
        self.read |= read
        self.defined |= defined
        self.changes.append((at, rewrite))


def place(graph: Graph, rewrite: Rewrite) -> int | None:
    """The first position where the new node can stand: after what it reads, before who reads it and
    before a state it reads is consumed. None if there is no such position, or a value is missed."""
    gone = {graph.position(node) for node in rewrite.remove}
    kept = {value.name for value in rewrite.insert.outputs}
    needed = {value.name for value in graph.outputs}
    probes = {value.name for value in graph.probes}
    latest = len(graph.nodes)
    for value in (value for node in rewrite.remove for value in node.outputs):
        readers = {graph.position(node) for node in graph.readers_of(value)}
        outside, name = readers - gone, value.name
        if name in probes and readers & gone:
            return None
        if name not in kept and (outside or name in needed or name in probes):
            return None
        latest = min([latest, *outside])
    earliest = min(gone)
    for value in rewrite.insert.inputs:
        earliest = max(earliest, graph.positions.get(value.name, -1) + 1)
        enders = (node for node in graph.readers_of(value) if value in node.consumed)
        latest = min([latest, *(graph.position(node) for node in enders)])
    made = {value.name for node in rewrite.remove for value in node.outputs}
    if any(value.name in made for value in rewrite.insert.inputs):
        return None
    return earliest if earliest <= latest else None


def _marked(before: Graph, after: Graph, name: str) -> Graph:
    """`after`, the pass's name in the origin of every node that is not in `before`."""
    nodes = tuple(
        node if _same(node, before.producers.get(node.outputs[0].name)) else _named(node, name)
        for node in after.nodes
    )
    return replace(after, nodes=nodes)


def _same(node: Node, old: Node | None) -> bool:
    """Whether they differ in nothing but their origin."""
    return node is old or (old is not None and replace(old, origin=node.origin) == node)


def _named(node: Node, name: str) -> Node:
    return replace(node, origin=replace(node.origin, passes=(*node.origin.passes, name)))


def _write(graph: Graph, folder: Path | None, stem: str) -> None:
    if folder is None:
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(folder / f"{stem}.{graph.name}.ir", print_graph(graph))
    except OSError as failure:
        message = f"cannot write the graphs: {failure.strerror or failure}"
        raise error("E502", message, where=str(folder)) from failure
