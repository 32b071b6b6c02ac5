"""An engine as text and as JSON facts, from its manifest and plan alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from deepinfer_compile.format.manifest import KernelRecord
from deepinfer_compile.format.plan import Lifetime, StateField
from deepinfer_compile.runtime.columns import Row, columns
from deepinfer_compile.runtime.folder import EngineFolder


def describe(folder: EngineFolder) -> str:
    """Limits, memory, phases, the state contract, kernels, and where all of it came from."""
    sections = (
        ("engine", columns(identity_rows(folder))),
        ("limits", columns(limit_rows(folder))),
        ("memory, bytes as allocated", columns(memory_rows(folder), right=(1,))),
        ("phases", columns(phase_rows(folder), right=(1, 2, 3))),
        ("state contract", columns(state_rows(folder), right=(1, 2, 3))),
        ("kernels", columns(_kernels(folder.manifest.kernels), right=(0, 1, 2, 3))),
    )
    return "\n\n".join(f"{title}\n{body}" for title, body in sections)


def facts_of(folder: EngineFolder) -> dict[str, object]:
    """The same for a program; kernels and states in full."""
    manifest, plan = folder.manifest, folder.plan
    identity = {name.replace(" ", "_"): value for name, value in identity_rows(folder)}
    return {
        "engine": identity | {"tools": dict(manifest.tools)},
        "limits": dataclasses.asdict(plan.limits),
        "memory": dataclasses.asdict(plan.memory),
        "phases": [
            {"name": p.name, "max_rows": p.max_rows, "steps": len(p.steps), "probes": len(p.probes)}
            for p in plan.phases
        ],
        "states": [dataclasses.asdict(state) for state in plan.states],
        "kernels": [dataclasses.asdict(kernel) for kernel in manifest.kernels],
    }


def identity_rows(folder: EngineFolder) -> list[tuple[str, str]]:
    manifest = folder.manifest
    origin = manifest.checkpoint
    tools = ", ".join(f"{name} {version}" for name, version in sorted(manifest.tools.items()))
    return [
        ("name", manifest.name),
        ("schema", str(manifest.schema)),
        ("target", manifest.target),
        *((f"isa {b.isa}", f"needs {', '.join(b.features)}") for b in manifest.libraries),
        ("numerics", manifest.numerics),
        ("batch invariant", "checked" if folder.plan.batch_invariant else "not asked for"),
        ("probes", "yes" if manifest.probes else "no"),
        ("weights", _origin(origin.repo, origin.revision, origin.packed)),
        ("oracle", manifest.oracle),
        ("compiler", f"{manifest.compiler} ({tools})"),
        ("spec sha256", manifest.spec_sha256),
        ("files", str(len(manifest.files))),
    ]


def _origin(repo: str, revision: str, packed: bool) -> str:
    place = f"{repo}@{revision}" if revision else repo or "a folder or a seed"
    return f"packed, from {place}" if packed else f"not packed, read from {place}"


def limit_rows(folder: EngineFolder) -> list[tuple[str, str]]:
    return [(k, f"{v:,}") for k, v in dataclasses.asdict(folder.plan.limits).items()]


def memory_rows(folder: EngineFolder) -> list[tuple[str, str]]:
    sizes = dataclasses.asdict(folder.plan.memory)
    return [*((name, f"{size:,}") for name, size in sizes.items()), _total(sizes.values())]


def _total(sizes: Iterable[int]) -> tuple[str, str]:
    return "total", f"{sum(sizes):,}"


def phase_rows(folder: EngineFolder) -> list[Row]:
    rows: list[Row] = [("phase", "max rows", "steps", "probes")]
    for phase in folder.plan.phases:
        counts = (phase.max_rows, len(phase.steps), len(phase.probes))
        rows.append((phase.name, *(f"{count:,}" for count in counts)))
    return rows


def state_rows(folder: EngineFolder) -> list[Row]:
    rows: list[Row] = [
        ("state", "bytes", "bytes/token", "entries", "per", "prefix hit", "roll back")
    ]
    for state in folder.plan.states:
        survives = "survives" if state.survives_prefix_hit else "rebuilt"
        numbers = (f"{state.bytes:,}", _per_token(state), f"{state.length:,}")
        rows.append((state.name, *numbers, _per(state), survives, state.rollback))
    return rows


def bytes_per_token(state: StateField) -> float:
    """Bytes that a state grows by with each token; 0 for what a request has once."""
    paged = state.lifetime is Lifetime.PAGED
    return state.bytes / (state.length * state.ratio) if paged else 0.0


def _per_token(state: StateField) -> str:
    return f"{bytes_per_token(state):,.1f}" if state.lifetime is Lifetime.PAGED else "-"


def _per(state: StateField) -> str:
    if state.lifetime is Lifetime.SLOT:
        return "request"
    return "page" if state.ratio == 1 else f"page, 1 entry per {state.ratio} tokens"


def _kernels(kernels: Sequence[KernelRecord]) -> list[Row]:
    rows: list[Row] = [
        ("uses", "bytes", "bytes/row", "flops/row", "kernel", "policy", "layers", "from")
    ]
    for kernel in kernels:
        per_row = kernel.bytes_per_row + kernel.picked_per_row
        numbers = (kernel.uses, kernel.bytes_fixed, per_row, kernel.flops_per_row)
        spec = kernel.spec[0] if kernel.spec else ""
        more = f" (+{len(kernel.spec) - 1})" if len(kernel.spec) > 1 else ""
        layers = ranges(kernel.layers)
        counts = [f"{number:,}" for number in numbers]
        rows.append((*counts, kernel.name, kernel.policy, layers, spec + more))
    return rows


def ranges(layers: Sequence[int]) -> str:
    """0,1,2,5 as 0-2,5."""
    spans: list[tuple[int, int]] = []
    for layer in sorted(layer for layer in layers if layer >= 0):
        if spans and layer == spans[-1][1] + 1:
            spans[-1] = (spans[-1][0], layer)
        else:
            spans.append((layer, layer))
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in spans) or "-"
