"""What `--plan` and `--check` show: facts for a program, and the same as tables for a person."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from deepinfer_compile.build.dimensions import Dimensions
from deepinfer_compile.checkpoint.tensors import tensor_groups, totals
from deepinfer_compile.format.plan import EnginePlan, Lifetime, StateField
from deepinfer_compile.ir.graph import Graph
from deepinfer_compile.plan.kernels import Kernel
from deepinfer_compile.plan.states import state_field
from deepinfer_compile.spec.load import ModelSpec

Facts = dict[str, object]


def components(spec: ModelSpec) -> Facts:
    """Parameters and checkpoint bytes of every component (model_v41.md section 1.5)."""
    rows = totals(spec.model)
    return {
        "components": [
            {"name": row.component.value, "parameters": row.parameters, "bytes": row.bytes}
            for row in rows
        ],
        "backbone_parameters": sum(r.parameters for r in rows if r.component.backbone),
        "parameters": sum(row.parameters for row in rows),
        "bytes": sum(row.bytes for row in rows),
        "tensors": sum(group.copies for group in tensor_groups(spec.model)),
    }


def contract(spec: ModelSpec, graphs: tuple[Graph, ...]) -> tuple[StateField, ...]:
    """The state contract's rows, without buffers: what any target must hold."""
    states = {state.name: state for graph in graphs for state in graph.states}
    return tuple(state_field(spec.model, state, -1) for state in states.values())


def state_facts(spec: ModelSpec, states: tuple[StateField, ...]) -> Facts:
    """Bytes of the caches: per token of context, per request, and in all."""
    dims, page = Dimensions(spec), spec.engine.page_size
    paged = sum(s.bytes for s in states if s.lifetime is Lifetime.PAGED)
    slot = sum(s.bytes for s in states if s.lifetime is Lifetime.SLOT)
    return {
        "bytes_per_token": paged / page,
        "bytes_per_request": slot,
        "slots": dims.slots,
        "pages": dims.pages,
        "page_tokens": page,
        "bytes": slot * dims.slots + paged * dims.pages,
        "states": [asdict(state) for state in states],
    }


def plan_facts(spec: ModelSpec, graphs: tuple[Graph, ...], plan: EnginePlan | None) -> Facts:
    """Everything `--plan` knows; `plan` is None when no target was named."""
    facts: Facts = {
        "model": components(spec),
        "caches": state_facts(spec, contract(spec, graphs)),
        "engine": spec.engine.model_dump(mode="json"),
        "sources": dict(spec.sources),
    }
    if plan is not None:
        memory = asdict(plan.memory)
        facts |= {"target": plan.target, "memory": memory, "memory_bytes": sum(memory.values())}
    return facts


def plan_tables(facts: Facts) -> RenderableType:
    """`plan_facts` for a person."""
    parts: list[RenderableType] = [_components(facts["model"]), _caches(facts["caches"])]
    if "memory" in facts:
        parts.append(_memory(facts))
    sources = facts["sources"]
    if isinstance(sources, dict):
        parts += [Text(f"{key} is set by {source}") for key, source in sources.items()]
    return Group(*parts)


def check_table(kernels: Mapping[str, Kernel]) -> RenderableType:
    """The rule of every kernel, and the refusals before it."""
    table = _table("kernels", "rule", "kernel", "uses", "layers refused by")
    for symbol, kernel in kernels.items():
        table.add_row(kernel.rule, symbol, f"{kernel.uses}", "; ".join(kernel.refusals) or "-")
    return table


def _table(title: str, *columns: str, right: int = 0) -> Table:
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for i, column in enumerate(columns):
        numeric = i >= len(columns) - right
        # Folding, unlike an ellipsis, loses no digit on a narrow terminal.
        table.add_column(column, justify="right" if numeric else "left", overflow="fold")
    return table


def _components(model: object) -> Table:
    assert isinstance(model, dict)
    table = _table("checkpoint", "component", "parameters", "bytes", "GiB", right=3)
    for row in model["components"]:
        table.add_row(row["name"], *_amounts(row["parameters"], row["bytes"]))
    table.add_row("backbone subtotal", f"{model['backbone_parameters']:,}", "", "")
    table.add_row("total", *_amounts(model["parameters"], model["bytes"]))
    return table


def _amounts(parameters: int, size: int) -> tuple[str, str, str]:
    return f"{parameters:,}", f"{size:,}", gib(size)


def _caches(caches: object) -> Table:
    assert isinstance(caches, dict)
    table = _table("caches", "state", "addressed", "bytes", "entries", "rollback", right=0)
    kinds: dict[tuple[str, str, int, int, str], int] = {}
    for s in caches["states"]:
        kind = s["name"].rpartition(".")[2]
        key = (kind, s["lifetime"].value, s["bytes"], s["length"], s["rollback"])
        kinds[key] = kinds.get(key, 0) + 1
    for (kind, lifetime, size, length, rollback), count in kinds.items():
        unit = "page" if lifetime == "paged" else "request"
        table.add_row(f"{kind} x{count}", lifetime, f"{size:,} a {unit}", str(length), rollback)
    table.add_row("per token", "", f"{caches['bytes_per_token']:,.0f}", "", "")
    table.add_row("per request", "", f"{caches['bytes_per_request']:,}", "", "")
    where = f"{caches['slots']} slots, {caches['pages']} pages of {caches['page_tokens']} tokens"
    table.add_row("all", "", f"{caches['bytes']:,}", "", where)
    return table


def _memory(facts: Facts) -> Table:
    table = _table(f"memory on {facts['target']}", "class", "bytes", "GiB", right=2)
    memory = facts["memory"]
    assert isinstance(memory, dict)
    for name, size in memory.items():
        table.add_row(name, f"{size:,}", gib(size))
    total = facts["memory_bytes"]
    assert isinstance(total, int)
    table.add_row("total", f"{total:,}", gib(total))
    return table


def gib(size: int) -> str:
    return f"{size / 2**30:.3f}"
