"""Why a kernel is there: spec lines, passes, rule, refusals, roofline, and the steps it runs in.

    explain(folder)         every kernel with the spec lines it serves and the rule that chose it
    explain(folder, NAME)   all of one kernel; or a buffer, and the steps that touch it

All of it was written by the compiler; nothing is executed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from difflib import get_close_matches

from deepinfer_compile.format.manifest import KernelRecord
from deepinfer_compile.format.plan import Buffer
from deepinfer_compile.format.roofline import Machine, bound, bytes_moved, seconds
from deepinfer_compile.runtime.columns import Row, columns
from deepinfer_compile.runtime.errors import RequestError
from deepinfer_compile.runtime.folder import EngineFolder
from deepinfer_compile.runtime.inspection import ranges
from deepinfer_compile.runtime.launches import KernelChoice, Launch, launches


@dataclass(frozen=True)
class Explanation:
    """`facts` for a program, `text` for a person."""

    facts: Mapping[str, object]
    text: str


@dataclass(frozen=True)
class Roof:
    """The least that a launch of `rows` rows costs; `phases` launch the kernel for so many at
    most."""

    rows: int
    phases: tuple[str, ...]
    bytes: int
    flops: int
    seconds: float
    bound: str


def explain(folder: EngineFolder, name: str | None = None) -> Explanation:
    """One line for each kernel, or all that is known of `name`. E025: nothing is called so."""
    if name is None:
        return _all(folder.manifest.kernels)
    kernels = {kernel.name: kernel for kernel in folder.manifest.kernels}
    buffers = {buffer.name: buffer for buffer in folder.plan.buffers}
    program = [step for phase in folder.plan.phases for step in launches(folder.plan, phase)]
    if name in kernels:
        return _kernel(folder, kernels[name], [step for step in program if name in step.kernels])
    if name in buffers:
        return _buffer(buffers[name], [step for step in program if name in step.names])
    known = (*kernels, *buffers)
    near = [other for other in known if name in other][:3] or get_close_matches(name, known)
    raise RequestError(
        "E025",
        f"the engine has no kernel or buffer `{name}`",
        where=str(folder.path),
        notes=[f"there is `{other}`" for other in near],
        help="without a name, explain lists the kernels",
    )


def _all(kernels: Sequence[KernelRecord]) -> Explanation:
    rows: list[Row] = [("uses", "kernel", "rule", "from")]
    rows += [(f"{k.uses:,}", k.name, k.rule, ", ".join(k.spec)) for k in kernels]
    facts = [{"name": k.name, "uses": k.uses, "rule": k.rule, "spec": k.spec} for k in kernels]
    return Explanation({"kernels": facts}, columns(rows, right=(0,)))


def _kernel(folder: EngineFolder, kernel: KernelRecord, steps: Sequence[Launch]) -> Explanation:
    machine = folder.manifest.machine
    used = [(s, choice) for s in steps for choice in s.choices if choice.kernel == kernel.name]
    roofs = tuple(_roofs(kernel, used, machine))
    facts = {
        "kernel": asdict(kernel),
        "machine": asdict(machine),
        "roofline": [asdict(roof) for roof in roofs],
        "steps": [
            {
                "phase": step.phase,
                "step": step.step,
                "least_rows": choice.least,
                "most_rows": choice.most,
                "buffers": step.names,
            }
            for step, choice in used
        ],
    }
    launched: list[Row] = [("phase", "step", "rows", "buffers")]
    launched += [
        (step.phase, str(step.step), f"{choice.least}-{choice.most}", ", ".join(step.names))
        for step, choice in used
    ]
    sections = (
        (kernel.name, columns(list(_provenance(kernel)))),
        (f"roofline on {machine.name}", columns(_roof_rows(roofs), right=(0, 1, 2, 3))),
        ("steps that launch it", columns(launched, right=(1,))),
    )
    return Explanation(facts, "\n\n".join(f"{title}\n{body}" for title, body in sections))


def _provenance(kernel: KernelRecord) -> Iterator[Row]:
    yield "computes", kernel.computes
    yield from (("from" if i == 0 else "", line) for i, line in enumerate(kernel.spec))
    yield "layers", ranges(kernel.layers)
    yield "passes", " > ".join(kernel.passes)
    yield "rule", kernel.rule
    yield from (("refused", why) for why in kernel.refusals)
    yield from (("shapes" if i == 0 else "", line) for i, line in enumerate(kernel.shapes))
    yield "adds up", kernel.reduction
    yield "rows", kernel.rows
    yield "policy", kernel.policy
    yield "template", f"templates/{kernel.template}"
    yield "source", kernel.source


def _roofs(
    kernel: KernelRecord, used: Sequence[tuple[Launch, KernelChoice]], machine: Machine
) -> Iterator[Roof]:
    """At the fewest rows that the kernel is launched for, and at the most of every phase."""
    largest = {step.phase: choice.most for step, choice in used}
    for rows in sorted({*largest.values(), *(choice.least for _, choice in used)}):
        phases = tuple(name for name, most in largest.items() if most == rows)
        flops, moved = rows * kernel.flops_per_row, bytes_moved(kernel, rows)
        time, limit = seconds(kernel, rows, machine), bound(kernel, rows, machine)
        yield Roof(rows, phases, moved, flops, time, limit)


def _roof_rows(roofs: Sequence[Roof]) -> list[Row]:
    rows: list[Row] = [("rows", "bytes", "flops", "us", "bound", "the most of")]
    for roof in roofs:
        counts = (f"{n:,}" for n in (roof.rows, roof.bytes, roof.flops))
        rows.append((*counts, microseconds(roof.seconds), roof.bound, ", ".join(roof.phases)))
    return rows


def microseconds(time: float) -> str:
    """Three digits, as in the header of a kernel."""
    return f"{time * 1e6:.3g}"


def _buffer(buffer: Buffer, steps: Sequence[Launch]) -> Explanation:
    facts = {
        "buffer": asdict(buffer),
        "steps": [{"phase": s.phase, "step": s.step, "kernels": s.kernels} for s in steps],
    }
    shape = ",".join("R" if n == -1 else str(n) for n in buffer.shape)
    where: list[Row] = [
        ("type", f"{buffer.dtype}[{shape}]"),
        ("memory", buffer.memory.value),
        ("offset", f"{buffer.offset:,}"),
        ("bytes", f"{buffer.bytes:,}"),
    ]
    touched: list[Row] = [("phase", "step", "kernel")]
    touched += [(step.phase, str(step.step), step.spelled) for step in steps]
    table = columns(touched, right=(1,))
    text = f"{buffer.name}\n{columns(where)}\n\nsteps that touch it\n{table}"
    return Explanation(facts, text)
