"""Which rule serves each node, and the kernels that come of it, one for each row class.

Nodes whose plans share a name share a kernel. All nodes without a rule are reported together.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

from deepinfer_compile.diagnostics import CompileError, Diagnostic
from deepinfer_compile.format.plan import Extent, Variant
from deepinfer_compile.ir.graph import Graph, Node
from deepinfer_compile.ir.ops import Cost
from deepinfer_compile.target import KernelPlan, KernelRule, RowClass, Target

T = TypeVar("T")


@dataclass(frozen=True)
class Kernel:
    """A kernel and where it came from. `spec`, `layers` and `passes` cover all its uses.

    It writes through the parameters `consumed` and its last `results` parameters. `cost` is that
    of the first of `shapes`; all work on equally many entries. `rows` is the row class it is for.
    """

    plan: KernelPlan
    rule: str
    rows: RowClass
    refusals: tuple[str, ...]
    consumed: tuple[int, ...]
    results: int
    shapes: tuple[str, ...]
    launches: tuple[Extent, ...]
    cost: Cost
    spec: tuple[str, ...]
    layers: tuple[int, ...]
    passes: tuple[str, ...]
    uses: int

    @property
    def symbol(self) -> str:
        return str(self.plan.name)


def select_kernels(
    graphs: Iterable[Graph], target: Target, max_rows: Mapping[str, int]
) -> tuple[dict[str, Kernel], dict[str, tuple[Variant, ...]]]:
    """Kernels by symbol, and every node's variants by `phase/first output`. `max_rows` by phase.

    CompileError E203 lists every operator that no rule of `target` takes, and why.
    """
    kernels: dict[str, Kernel] = {}
    chosen: dict[str, tuple[Variant, ...]] = {}
    problems: dict[str, Diagnostic] = {}
    for graph in graphs:
        limit = max_rows[graph.name]
        for node in graph.nodes:
            made = _choose(node, target, limit)
            if isinstance(made, Diagnostic):
                problems.setdefault(made.message, made)
                continue
            for kernel in made:
                before = kernels.get(kernel.symbol)
                kernels[kernel.symbol] = _joined(before, kernel) if before else kernel
            chosen[node_key(graph, node)] = tuple(
                Variant(k.symbol, k.plan.items, min(k.rows.most or limit, limit)) for k in made
            )
    if problems:
        raise CompileError(problems.values())
    return dict(sorted(kernels.items())), chosen


def node_key(graph: Graph, node: Node) -> str:
    return f"{graph.name}/{node.outputs[0].name}"


def _choose(node: Node, target: Target, max_rows: int) -> tuple[Kernel, ...] | Diagnostic:
    """A kernel for each row class, or why there is none."""
    rule, refusals = target.choose(node)
    if rule is not None:
        return tuple(
            _kernel(node, rule.plan(node, target.machine, rows), rule, rows, refusals)
            for rows in rule.row_classes(max_rows)
        )
    operands = ", ".join(str(value.type) for value in node.inputs)
    return Diagnostic(
        "E203",
        f"no kernel for `{node.op.name}` of ({operands}) on target {target.name}",
        where=node.origin.at,
        notes=tuple(f"tried {line}" for line in refusals) or ("no rule serves this operator",),
        help="change the dimension a rule refuses, or compile for another target",
    )


def _kernel(
    node: Node, plan: KernelPlan, rule: KernelRule, rows: RowClass, refusals: tuple[str, ...]
) -> Kernel:
    fresh = node.outputs[len(node.op.consumes) :]
    operands = ", ".join(str(value.type) for value in node.inputs)
    results = ", ".join(str(value.type) for value in fresh) or "the state"
    return Kernel(
        plan=plan,
        rule=type(rule).__name__,
        rows=rows,
        refusals=(*refusals, *node.origin.refused),
        consumed=node.op.consumes,
        results=len(fresh),
        shapes=(f"{operands} -> {results}",),
        launches=(plan.items,),
        cost=node.op.cost(tuple(value.type for value in node.inputs)),
        spec=node.origin.places,
        layers=() if node.origin.layer is None else (node.origin.layer,),
        passes=node.origin.passes,
        uses=1,
    )


def _joined(first: Kernel, other: Kernel) -> Kernel:
    assert first.plan == other.plan, f"two kernels are called {first.symbol}: {first}, {other}"
    assert first.cost.per_entry == other.cost.per_entry, f"work of {first.symbol}: {first}, {other}"
    return replace(
        first,
        refusals=_union(first.refusals, other.refusals),
        shapes=_union(first.shapes, other.shapes),
        launches=_union(first.launches, other.launches),
        spec=_union(first.spec, other.spec),
        layers=tuple(sorted({*first.layers, *other.layers})),
        passes=_union(first.passes, other.passes),
        uses=first.uses + 1,
    )


def _union(first: tuple[T, ...], other: tuple[T, ...]) -> tuple[T, ...]:
    return (*first, *(item for item in other if item not in first))
