"""What differs between two engines, from their manifests and plans alone.

    compare(A, B) -> Change(section, name, fact, before, after), ...

Files are compared by the hashes their manifests give, and by the bytes of the manifests: no change
means that both hold the same bytes. That files are what the manifest says is `verify`'s question.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from difflib import SequenceMatcher

from deepinfer_compile.format.manifest import MANIFEST
from deepinfer_compile.format.plan import EnginePlan, Phase
from deepinfer_compile.runtime.folder import EngineFolder
from deepinfer_compile.runtime.launches import launches

Facts = Mapping[str, object]


@dataclass(frozen=True)
class Change:
    """A fact that differs. `name` is a kernel, state, phase or weight; "" in the sections that
    hold facts of the engine itself. `fact` is "" and the other side None where one engine has
    no such thing at all."""

    section: str
    name: str
    fact: str
    before: object
    after: object


def compare(a: EngineFolder, b: EngineFolder) -> tuple[Change, ...]:
    """Every difference, by section. Nothing: the engines are the same bytes."""
    before, after = _sections(a), _sections(b)
    found: list[Change] = []
    for section, records in before.items():
        for name in dict.fromkeys((*records, *after[section])):
            found += _changes(section, name, records.get(name), after[section].get(name))
        if section == "phases":
            found += _steps(a.plan, b.plan)
    return tuple(found)


def _sections(folder: EngineFolder) -> dict[str, dict[str, Facts]]:
    """Everything that is compared: section, name, fact. Indices of buffers only say where in
    plan.json they are."""
    manifest, plan = folder.manifest, folder.plan
    return {
        "engine": {"": _identity(folder)},
        "limits": {"": asdict(plan.limits)},
        "memory": {"": asdict(plan.memory)},
        "states": {s.name: _without(asdict(s), "name", "buffer") for s in plan.states},
        "phases": {
            phase.name: {"buckets": phase.buckets, "probes": len(phase.probes)}
            for phase in plan.phases
        },
        "kernels": {
            kernel.name: {
                **_without(asdict(kernel), "name"),
                "source sha256": manifest.files.get(kernel.source, ""),
            }
            for kernel in manifest.kernels
        },
        "weights": {
            " ".join((r.pattern, *map(str, r.layers))): _without(asdict(r), "layers", "buffers")
            for r in plan.weights
        },
        "files": {"": {**manifest.files, MANIFEST: folder.files.sha256(MANIFEST)[0]}},
    }


def _identity(folder: EngineFolder) -> Facts:
    """All of the manifest that is neither a kernel nor a file."""
    manifest = folder.manifest
    simple = _without(
        asdict(manifest), "tools", "machine", "libraries", "checkpoint", "kernels", "files"
    )
    return {
        **simple,
        **{f"tool {name}": version for name, version in manifest.tools.items()},
        **{f"isa {library.isa}": library.features for library in manifest.libraries},
        **{f"machine {name}": value for name, value in asdict(manifest.machine).items()},
        **{f"weights {name}": value for name, value in asdict(manifest.checkpoint).items()},
    }


def _without(facts: Facts, *names: str) -> Facts:
    return {name: value for name, value in facts.items() if name not in names}


def _changes(section: str, name: str, a: Facts | None, b: Facts | None) -> Iterator[Change]:
    if a is None or b is None:
        yield Change(section, name, "", a, b)
        return
    for fact in dict.fromkeys((*a, *b)):
        if a.get(fact) != b.get(fact):
            yield Change(section, name, fact, a.get(fact), b.get(fact))


def _steps(a: EnginePlan, b: EnginePlan) -> Iterator[Change]:
    """Steps that only one of the engines has, by phase: order counts, and buffers by name."""
    others = {phase.name: phase for phase in b.phases}
    for phase in a.phases:
        if phase.name in others:
            one, two = _lines(a, phase), _lines(b, others[phase.name])
            spans = SequenceMatcher(None, one, two, autojunk=False).get_opcodes()
            changed = [span for span in spans if span[0] != "equal"]
            if changed:
                before = [line for _, i, j, _, _ in changed for line in one[i:j]]
                after = [line for _, _, _, i, j in changed for line in two[i:j]]
                yield Change("phases", phase.name, "steps", before, after)


def _lines(plan: EnginePlan, phase: Phase) -> list[str]:
    return [f"{launch.spelled}({', '.join(launch.names)})" for launch in launches(plan, phase)]
