"""Graphs and kernels -> `EnginePlan`: buffers, memory classes, steps.

Decisions end here: the emitter spells the plan and the runtime obeys it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from deepinfer_compile.build.dimensions import Dimensions
from deepinfer_compile.format.plan import (
    Buffer,
    EnginePlan,
    Limits,
    Memory,
    MemoryClass,
    Phase,
    Probe,
    RowArray,
    Step,
    Variant,
)
from deepinfer_compile.ir.graph import Graph, Value, Weight
from deepinfer_compile.ir.types import TensorType
from deepinfer_compile.plan.buckets import buckets
from deepinfer_compile.plan.kernels import node_key
from deepinfer_compile.plan.memory import Life, align, place
from deepinfer_compile.plan.rows import ROW_ARRAYS
from deepinfer_compile.plan.states import state_field
from deepinfer_compile.plan.weights import recipes
from deepinfer_compile.spec.load import ModelSpec


@dataclass
class _Layout:
    """Buffers as they are laid out; lives inside `plan_engine` only."""

    spec: ModelSpec
    buffers: list[Buffer] = field(default_factory=list)
    index: dict[str, int] = field(default_factory=dict)
    sizes: dict[MemoryClass, int] = field(default_factory=lambda: dict.fromkeys(MemoryClass, 0))

    def add(self, name: str, type_: TensorType, memory: MemoryClass, rows: int) -> int:
        """A buffer of its own, after the ones of its class."""
        if name not in self.index:
            size = type_.bytes(rows)
            self.put(name, type_, memory, self.sizes[memory], size)
            # Weights have no common base: their class counts bytes, not addresses.
            self.sizes[memory] += size if memory is MemoryClass.WEIGHTS else align(size)
        return self.index[name]

    def put(
        self, name: str, type_: TensorType, memory: MemoryClass, offset: int, size: int
    ) -> None:
        lead = -1 if type_.by_rows else type_.shape[0]
        assert isinstance(lead, int)
        offset = 0 if memory is MemoryClass.WEIGHTS else offset
        shape = (lead, *type_.inner)
        self.index[name] = len(self.buffers)
        self.buffers.append(Buffer(name, type_.dtype.value, shape, memory, offset, size))


def plan_engine(
    spec: ModelSpec,
    target: str,
    graphs: Sequence[Graph],
    chosen: Mapping[str, tuple[Variant, ...]],
) -> EnginePlan:
    """The whole plan. `chosen` are the variants of `select_kernels`."""
    layout = _Layout(spec)
    dims = Dimensions(spec)
    weights = {w.value.name: w for graph in graphs for w in graph.weights}
    states = {s.name: s for graph in graphs for s in graph.states}
    for weight in weights.values():
        layout.add(weight.value.name, weight.value.type, MemoryClass.WEIGHTS, 0)
    for state in states.values():
        layout.add(state.name, state.type, MemoryClass.STATE, 0)
    row_arrays = _row_arrays(layout, graphs, dims)
    phases = tuple(_phase(layout, graph, dims, chosen) for graph in graphs)
    return EnginePlan(
        target=target,
        numerics=spec.engine.numerics.value,
        batch_invariant=spec.engine.batch_invariant,
        limits=_limits(spec, dims),
        memory=Memory(**{memory.value: layout.sizes[memory] for memory in MemoryClass}),
        buffers=tuple(layout.buffers),
        phases=phases,
        row_arrays=row_arrays,
        states=tuple(state_field(spec.model, s, layout.index[s.name]) for s in states.values()),
        weights=recipes(_in_name_order(weights), layout.index),
    )


def _in_name_order(weights: Mapping[str, Weight]) -> tuple[Weight, ...]:
    return tuple(weights[name] for name in sorted(weights))


def _row_arrays(layout: _Layout, graphs: Sequence[Graph], dims: Dimensions) -> tuple[RowArray, ...]:
    """The host's arrays, each as long as the widest phase that reads it."""
    arrays = []
    for name, meaning in ROW_ARRAYS.items():
        readers = [g for g in graphs for v in g.inputs if v.name == name]
        if not readers:
            continue
        type_ = next(v.type for v in readers[0].inputs if v.name == name)
        rows = max(dims.max_rows(graph.name) for graph in readers)
        buffer = layout.add(name, type_, MemoryClass.IO, rows)
        phases = tuple(graph.name for graph in readers)
        arrays.append(RowArray(name, buffer, phases, type_.by_rows, meaning))
    return tuple(arrays)


def _phase(
    layout: _Layout,
    graph: Graph,
    dims: Dimensions,
    chosen: Mapping[str, tuple[Variant, ...]],
) -> Phase:
    rows = dims.max_rows(graph.name)
    names = _place_values(layout, graph, rows, dims)
    steps = []
    for node in graph.nodes:
        fresh = node.outputs[len(node.op.consumes) :]
        operands = tuple(layout.index[names[v.name]] for v in (*node.inputs, *fresh))
        steps.append(Step(chosen[node_key(graph, node)], operands))
    probes = tuple(
        Probe(value.name, layout.index[names[value.name]], graph.positions[value.name] + 1)
        for value in graph.probes
    )
    ends = {variant.most_rows for step in steps for variant in step.variants}
    return Phase(graph.name, buckets(graph.name, rows, ends), tuple(steps), probes)


def _place_values(layout: _Layout, graph: Graph, rows: int, dims: Dimensions) -> dict[str, str]:
    """Buffers for the graph's values; returns each value's buffer name.

    Results the host or another phase reads, and probes, keep bytes of their own; a new version of
    a state is the state; the rest goes to the arena.
    """
    names = {value.name: value.name for value in graph.inputs}
    names |= {weight.value.name: weight.value.name for weight in graph.weights}
    names |= {value.name: value.name for value in graph.states}
    kept = {value.name for value in graph.outputs}
    probes = {value.name for value in graph.probes}
    for value in graph.inputs:
        layout.add(value.name, value.type, MemoryClass.IO, rows)
    lives: list[tuple[Life, Value]] = []
    last_use = _last_uses(graph)
    for number, node in enumerate(graph.nodes):
        for i, value in enumerate(node.outputs):
            if i < len(node.op.consumes):
                names[value.name] = names[node.inputs[node.op.consumes[i]].name]
            elif value.name in kept:
                names[value.name] = value.name
                own = dims.hidden_rows if value.name == "hidden" else rows
                layout.add(value.name, value.type, MemoryClass.IO, own)
            else:
                names[value.name] = f"{graph.name}:{value.name}"
                if value.name in probes:
                    layout.add(names[value.name], value.type, MemoryClass.IO, rows)
                    continue
                last = last_use.get(value.name, number)
                life = Life(names[value.name], value.type.bytes(rows), number, last)
                lives.append((life, value))
    offsets, total = place([life for life, _ in lives])
    for life, value in lives:
        layout.put(life.name, value.type, MemoryClass.ARENA, offsets[life.name], life.bytes)
    layout.sizes[MemoryClass.ARENA] = max(layout.sizes[MemoryClass.ARENA], total)
    return names


def _last_uses(graph: Graph) -> dict[str, int]:
    """The last step that reads each value."""
    return {v.name: number for number, node in enumerate(graph.nodes) for v in node.inputs}


def _limits(spec: ModelSpec, dims: Dimensions) -> Limits:
    engine, model = spec.engine, spec.model
    return Limits(
        max_requests=engine.max_requests,
        max_rows=engine.max_rows,
        max_context=engine.max_context,
        page_size=engine.page_size,
        prefill_chunk=engine.prefill_chunk,
        slots=dims.slots,
        snapshots=dims.snapshots,
        pages=dims.pages,
        vocab_size=model.vocab_size,
        bos_token_id=model.bos_token_id,
        eos_token_id=model.eos_token_id,
    )
