"""What `--plan` and `--check` show: facts for a program, and the same as tables for a person.

Tables are plain text as wide as their words: a pipe or a narrow terminal never costs a digit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict

from deepinfer_compile.build.dimensions import Dimensions
from deepinfer_compile.checkpoint.tensors import tensor_groups, totals
from deepinfer_compile.format.plan import EnginePlan, Lifetime, StateField
from deepinfer_compile.ir.graph import Graph
from deepinfer_compile.plan.kernels import Kernel
from deepinfer_compile.plan.roofline import StepBound
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
        "snapshots": dims.snapshots,
        "smallest_prefix": page if dims.snapshots else None,
        "bytes": slot * dims.slots + paged * dims.pages,
        "states": [asdict(state) for state in states],
    }


def plan_facts(
    spec: ModelSpec,
    graphs: tuple[Graph, ...],
    plan: EnginePlan | None,
    bounds: Sequence[StepBound] = (),
) -> Facts:
    """Everything `--plan` knows; there is no `plan`, nor `bounds`, when no target was named."""
    facts: Facts = {
        "model": components(spec),
        "caches": state_facts(spec, contract(spec, graphs)),
        "engine": spec.engine.model_dump(mode="json"),
        "sources": dict(spec.sources),
    }
    if plan is not None:
        memory = asdict(plan.memory)
        facts |= {"target": plan.target, "memory": memory, "memory_bytes": sum(memory.values())}
        facts |= {"steps": [asdict(bound) for bound in bounds]}
    return facts


def plan_tables(facts: Facts) -> str:
    """`plan_facts` for a person."""
    parts = [_components(facts["model"]), _caches(facts["caches"]), _rollbacks(facts["caches"])]
    if "memory" in facts:
        parts += [_memory(facts), _steps(facts["steps"])]
    sources = facts["sources"]
    if isinstance(sources, dict) and sources:
        parts.append("\n".join(f"{key} is set by {source}" for key, source in sources.items()))
    return "\n\n".join(parts)


def check_table(kernels: Mapping[str, Kernel]) -> str:
    """The rule of every kernel, and under it the rules that were asked before and refused."""
    width = max(len(kernel.rule) for kernel in kernels.values())
    lines = [f"{'rule':{width}}  uses  kernel"]
    for symbol, kernel in kernels.items():
        lines.append(f"{kernel.rule:{width}}  {kernel.uses:4}  {symbol}")
        lines += [f"  refused by {refusal}" for refusal in kernel.refusals]
    return "\n".join(lines)


def _table(rows: Sequence[Sequence[str]], numbers: Sequence[int] = ()) -> str:
    """Aligned columns, the first row their heads; those in `numbers` align to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = (
            cell.rjust(width) if i in numbers else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def _components(model: object) -> str:
    assert isinstance(model, dict)
    rows = [("checkpoint", "parameters", "bytes", "GiB")]
    rows += [(r["name"], *_amounts(r["parameters"], r["bytes"])) for r in model["components"]]
    rows.append(("backbone subtotal", f"{model['backbone_parameters']:,}", "", ""))
    rows.append(("total", *_amounts(model["parameters"], model["bytes"])))
    return _table(rows, numbers=(1, 2, 3))


def _amounts(parameters: int, size: int) -> tuple[str, str, str]:
    return f"{parameters:,}", f"{size:,}", gib(size)


def _caches(caches: object) -> str:
    assert isinstance(caches, dict)
    kinds: dict[tuple[str, str, int, int], int] = {}
    for s in caches["states"]:
        unit = "page" if s["lifetime"] is Lifetime.PAGED else "request"
        key = (_kind(s), unit, s["length"], s["bytes"])
        kinds[key] = kinds.get(key, 0) + 1
    rows = [("caches", "copies", "each per", "entries", "bytes")]
    for (kind, unit, length, size), count in kinds.items():
        rows.append((kind, f"{count}", unit, f"{length:,}", f"{size:,}"))
    rows.append(("all", "", "token", "", f"{caches['bytes_per_token']:,.2f}".removesuffix(".00")))
    rows.append(("all", "", "request", "", f"{caches['bytes_per_request']:,}"))
    rows.append(("total", "", "", "", f"{caches['bytes']:,}"))
    slots, pages = f"{caches['slots']:,} slots", f"{caches['pages']:,} pages"
    where = f"{slots}, {pages} of {caches['page_tokens']} tokens"
    return f"{_table(rows, numbers=(1, 3, 4))}\n{where}\n{_prefixes(caches)}"


def _prefixes(caches: Mapping[str, object]) -> str:
    """What prompts can share."""
    if not caches["snapshots"]:
        return "prefix reuse: off (engine.prefix_snapshots is 0)"
    size = caches["smallest_prefix"]
    return (
        f"prefix reuse: from {size} tokens on in steps of {size}, {caches['snapshots']} snapshots"
    )


def _rollbacks(caches: object) -> str:
    assert isinstance(caches, dict)
    kinds: dict[str, list[str]] = {}
    for s in caches["states"]:
        names = kinds.setdefault(s["rollback"], [])
        names += [_kind(s)] if _kind(s) not in names else []
    rows = [("caches", "after a rollback")]
    return _table(rows + [(", ".join(names), text) for text, names in kinds.items()])


def _kind(state: Mapping[str, object]) -> str:
    return str(state["name"]).rpartition(".")[2]


def _memory(facts: Facts) -> str:
    memory = facts["memory"]
    total = facts["memory_bytes"]
    assert isinstance(memory, dict)
    assert isinstance(total, int)
    rows = [(f"memory on {facts['target']}", "bytes", "GiB")]
    rows += [(name, f"{size:,}", gib(size)) for name, size in [*memory.items(), ("total", total)]]
    return _table(rows, numbers=(1, 2))


def _steps(steps: object) -> str:
    assert isinstance(steps, list)
    rows = [("steps, at best", "rows", "launches", "GB", "Gflop", "ms")]
    for s in steps:
        amounts = (s["bytes"] / 1e9, s["flops"] / 1e9, s["seconds"] * 1e3)
        counts = (f"{s['rows']:,}", f"{s['launches']:,}")
        rows.append((s["phase"], *counts, *(f"{amount:,.3f}" for amount in amounts)))
    return _table(rows, numbers=(1, 2, 3, 4, 5))


def gib(size: int) -> str:
    return f"{size / 2**30:.3f}"
