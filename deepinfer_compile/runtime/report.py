"""The page of an engine: what it is, what it holds, what it runs and why.

    page(folder) -> HTML        report_facts(folder) -> what --json prints

Everything comes from the manifest and the plan, so the same engine has the same page.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from deepinfer_compile.format.plan import Lifetime, Phase
from deepinfer_compile.runtime import markup
from deepinfer_compile.runtime.explanation import microseconds
from deepinfer_compile.runtime.folder import EngineFolder
from deepinfer_compile.runtime.inspection import (
    bytes_per_token,
    facts_of,
    identity_rows,
    limit_rows,
    memory_rows,
    phase_rows,
    state_rows,
)
from deepinfer_compile.runtime.launches import launches, lives
from deepinfer_compile.runtime.markup import Markup, code, folded, paragraph, table
from deepinfer_compile.runtime.pictures import bar, liveness, stacked_bar
from deepinfer_compile.runtime.rooflines import by_time
from deepinfer_compile.runtime.text_file import check_outside, write_text


def page(folder: EngineFolder) -> str:
    """The whole HTML file."""
    manifest = folder.manifest
    sections = (
        ("What it is", [table(identity_rows(folder))]),
        ("Limits", [table(limit_rows(folder), right=(1,))]),
        ("Memory", _memory(folder)),
        ("State of a request", _states(folder)),
        ("The arena", _arena(folder)),
        ("Kernels", _kernels(folder)),
        ("Refusals", [_refusals(folder)]),
        ("Program", _program(folder)),
    )
    return markup.page(f"{manifest.name}, an engine for {manifest.target}", sections)


def report_facts(folder: EngineFolder) -> dict[str, object]:
    """What `inspect` knows, and the numbers behind the pictures."""
    programs = {phase.name: launches(folder.plan, phase) for phase in folder.plan.phases}
    return {
        **facts_of(folder),
        "state_bytes": {"per_token": _growth(folder), "per_request": _once(folder)},
        "machine": asdict(folder.manifest.machine),
        "roofline": [
            {
                "kernel": one.kernel.name,
                "rows": one.rows,
                "seconds": one.seconds,
                "bound": one.bound,
            }
            for one in by_time(folder)
        ],
        "arena": {
            name: [
                {
                    "name": life.buffer.name,
                    "offset": life.buffer.offset,
                    "bytes": life.buffer.bytes,
                    "first": life.first,
                    "last": life.last,
                }
                for life in lives(program)
            ]
            for name, program in programs.items()
        },
        "steps": {
            name: [
                {"kernels": [asdict(choice) for choice in launch.choices], "buffers": launch.names}
                for launch in program
            ]
            for name, program in programs.items()
        },
    }


def write_page(folder: EngineFolder, out: Path) -> None:
    """The page as a file, whole or not at all. E026: it would lie in the engine. E551."""
    check_outside(folder.path, out)
    write_text(out, page(folder))


def _memory(folder: EngineFolder) -> list[Markup]:
    sizes = asdict(folder.plan.memory)
    whole = max(1, sum(sizes.values()))
    bars = [bar(size / whole, name) for name, size in sizes.items()]
    rows = [(*row, drawn) for row, drawn in zip(memory_rows(folder), (*bars, ""), strict=True)]
    return [stacked_bar(sizes), table(rows, ("class", "bytes", ""), right=(1,))]


def _states(folder: EngineFolder) -> list[Markup]:
    head, *rows = state_rows(folder)
    words = f"A request takes {_once(folder):,} bytes, and {_growth(folder):,.1f} for each token."
    return [paragraph(words), table(rows, head, right=(1, 2, 3))]


def _growth(folder: EngineFolder) -> float:
    return sum(bytes_per_token(state) for state in folder.plan.states)


def _once(folder: EngineFolder) -> int:
    return sum(s.bytes for s in folder.plan.states if s.lifetime is Lifetime.SLOT)


def _arena(folder: EngineFolder) -> list[Markup]:
    """A picture for each phase that has values of a step."""
    size = folder.plan.memory.arena
    words = (
        f"{size:,} bytes from top to bottom, steps from left to right. A value is a rectangle "
        "from the first step that touches it to the last; point at one to read its name."
    )
    pictures = [paragraph(words)]
    for phase in folder.plan.phases:
        if found := lives(launches(folder.plan, phase)):
            pictures += [
                paragraph(f"{phase.name}: {len(found):,} values"),
                liveness(found, len(phase.steps), size),
            ]
    return pictures


def _kernels(folder: EngineFolder) -> list[Markup]:
    timed = by_time(folder)
    longest = max((one.seconds for one in timed), default=0.0) or 1.0
    rows = [
        (
            microseconds(one.seconds),
            bar(one.seconds / longest),
            one.bound,
            f"{one.rows:,}",
            f"{one.kernel.uses:,}",
            code(one.kernel.name),
            ", ".join(one.kernel.spec),
        )
        for one in timed
    ]
    words = (
        f"The least time of a launch on {folder.manifest.machine.name}, in microseconds: for one "
        "row, or the fewest rows that the kernel is launched for."
    )
    head = ("us", "", "bound", "rows", "uses", "kernel", "from")
    return [paragraph(words), table(rows, head, right=(0, 3, 4))]


def _refusals(folder: EngineFolder) -> Markup:
    rows = [(code(k.name), k.rule, why) for k in folder.manifest.kernels for why in k.refusals]
    return table(rows, ("kernel", "rule", "refused before it")) if rows else paragraph("None.")


def _program(folder: EngineFolder) -> list[Markup]:
    head, *rows = phase_rows(folder)
    return [
        table(rows, head, right=(1, 2, 3)),
        *(_steps(folder, phase) for phase in folder.plan.phases),
    ]


def _steps(folder: EngineFolder, phase: Phase) -> Markup:
    rows = [
        (str(launch.step), code(launch.spelled), code(", ".join(launch.names)))
        for launch in launches(folder.plan, phase)
    ]
    body = table(rows, ("step", "kernel", "buffers"), right=(0,))
    return folded(f"{phase.name}: {len(rows):,} steps", [body])
