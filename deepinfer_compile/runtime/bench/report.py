"""A bench as text, as JSON facts, as CSV."""

from __future__ import annotations

import csv
import io
import os
import platform
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from statistics import median

from deepinfer_compile import __version__
from deepinfer_compile.runtime.bench.ask import Ask
from deepinfer_compile.runtime.bench.ceilings import COPIED, SIDE, Ceilings
from deepinfer_compile.runtime.bench.measure import KernelFigure, Part
from deepinfer_compile.runtime.bench.work import SEED
from deepinfer_compile.runtime.columns import Row, columns
from deepinfer_compile.runtime.errors import EngineError
from deepinfer_compile.runtime.loader import Engine
from deepinfer_compile.runtime.machine import describe_cpu

_TOLD = 2  # a kernel that takes less than this many empty calls is not compared with its bound
_STEP_NAMES = ("min_ms", "median_ms", "max_ms", "tokens_per_s")
_KERNEL_NAMES = ("calls", "share", "bytes", "flops", "gb_per_s", "gflop_per_s", "bound_ms", "over")
_NOTE = f"""\
bound: what bytes and operations of the operands need at the ceilings above. States count as at
max_context, experts as shared by no rows: under 1x, less was needed or caches gave it. -: the
kernel takes less than {_TOLD} empty calls, too little to compare. Where calls one at a time take
longer than the whole and the calling, caches cooled and threads fell asleep between them."""


@dataclass(frozen=True)
class Report:
    """`header`: facts about engine, machine and versions, in the order they are printed."""

    header: tuple[tuple[str, str], ...]
    ask: Ask
    ceilings: Ceilings
    parts: tuple[Part, ...]

    def bound(self, figure: KernelFigure) -> float:
        """Seconds that the operands need at this machine's ceilings."""
        return max(figure.bytes / self.ceilings.bandwidth, figure.flops / self.ceilings.flops)

    def over(self, figure: KernelFigure) -> float | None:
        """How many times the bound a kernel takes; None where the call is what was measured."""
        bound, spent = self.bound(figure), median(figure.seconds)
        if not bound or spent < _TOLD * figure.calls * self.ceilings.call:
            return None
        return spent / bound


def header(engine: Engine) -> tuple[tuple[str, str], ...]:
    """Which engine, on what."""
    versions = [f"{name} {metadata.version(name)}" for name in ("torch", "numpy")]
    return (
        ("engine", engine.manifest.name),
        ("target", engine.manifest.target),
        ("isa", engine.isa),
        ("numerics", engine.manifest.numerics),
        ("machine", describe_cpu()),
        ("threads", str(engine.threads)),
        (
            "versions",
            f"compiled by {engine.manifest.compiler}, runtime {__version__}, "
            f"Python {platform.python_version()}, {', '.join(versions)}",
        ),
    )


def text(report: Report) -> str:
    """Header, whole steps, and the kernels of each, longest first."""
    ceilings, ask = report.ceilings, report.ask
    head = [
        *report.header,
        (
            "ceilings",
            f"measured now, as many threads: {ceilings.bandwidth / 1e9:.1f} GB/s (NumPy copies "
            f"{COPIED >> 20} MiB, read and written), {ceilings.flops / 1e9:.1f} Gflop/s (torch "
            f"multiplies fp32 {SIDE}x{SIDE})",
        ),
        ("call", f"{ceilings.call * 1e6:.2f} us without a kernel; every call below has it in it"),
        (
            "work",
            f"random tokens, seed {SEED}; contexts prefilled; greedy; {ask.runs} runs after a "
            f"warm-up; a decode run is {ask.tokens} steps",
        ),
    ]
    sections = [f"bench\n{columns(head)}", f"whole steps, sampler included, ms\n{_steps(report)}"]
    sections += [f"kernels of {_name(part)}\n{_kernels(report, part)}" for part in report.parts]
    sections.append(_NOTE)
    return "\n\n".join(sections)


def _name(part: Part) -> str:
    if part.phase == "prefill":
        return f"prefill, {part.rows} tokens"
    return f"decode, {part.rows} {'rows' if part.rows > 1 else 'row'} at {part.context} tokens"


def _steps(report: Report) -> str:
    rows: list[Row] = [("", "min", "median", "max", "tokens/s")]
    for part in report.parts:
        low, middle, high = (f"{ms:.3f}" for ms in _spread(part.seconds))
        rows.append((_name(part), low, middle, high, f"{part.tokens_per_second:,.0f}"))
    return columns(rows, right=(1, 2, 3, 4))


def _kernels(report: Report, part: Part) -> str:
    titles = ("share", "ms", "calls", "us/call", "MB", "GB/s", "Gflop/s", "bound ms", "over")
    rows: list[Row] = [(*titles, "kernel")]
    total = _total(part)
    for figure in part.kernels:
        spent, over = median(figure.seconds), report.over(figure)
        name = figure.kernel if figure.phase == part.phase else f"{figure.kernel} ({figure.phase})"
        rows.append(
            (
                f"{spent / total:.1%}",
                f"{spent * 1e3:.3f}",
                f"{figure.calls:,}",
                f"{spent / figure.calls * 1e6:.1f}",
                f"{figure.bytes / 1e6:.3f}",
                f"{figure.bytes / spent / 1e9:.2f}",
                f"{figure.flops / spent / 1e9:.2f}",
                f"{report.bound(figure) * 1e3:.3f}",
                "-" if over is None else f"{over:.1f}x",
                name,
            )
        )
    calls = sum(figure.calls for figure in part.kernels)
    called, whole = calls * report.ceilings.call * 1e3, median(part.seconds) * 1e3
    sums = (
        f"{calls:,} calls one at a time: {total * 1e3:.3f} ms, {called:.3f} of it calling; "
        f"whole: {whole:.3f} ms"
    )
    return f"{columns(rows, right=tuple(range(len(titles))))}\n  {sums}"


def _total(part: Part) -> float:
    return sum(median(figure.seconds) for figure in part.kernels)


def _spread(seconds: tuple[float, ...]) -> tuple[float, float, float]:
    """Minimum, median, maximum in ms."""
    return min(seconds) * 1e3, median(seconds) * 1e3, max(seconds) * 1e3


def facts(report: Report) -> dict[str, object]:
    """The same for a program."""
    return {
        "bench": {**dict(report.header), "seed": SEED},
        "asked": asdict(report.ask),
        "ceilings": {
            "bytes_per_s": report.ceilings.bandwidth,
            "flops_per_s": report.ceilings.flops,
            "call_s": report.ceilings.call,
        },
        "steps": [row for row in _table(report) if row["kernel"] is None],
        "kernels": [row for row in _table(report) if row["kernel"] is not None],
    }


def _table(report: Report) -> Iterator[dict[str, object]]:
    """A row for each step and kernel; None where a column means nothing."""
    for part in report.parts:
        where = {"step": part.phase, "rows": part.rows, "context": part.context}
        whole = (*_spread(part.seconds), part.tokens_per_second)
        yield {
            **where,
            "phase": None,
            "kernel": None,
            **dict(zip(_STEP_NAMES, whole, strict=True)),
            **dict.fromkeys(_KERNEL_NAMES),
        }
        total = _total(part)
        for figure in part.kernels:
            spent = median(figure.seconds)
            numbers = (
                figure.calls,
                spent / total,
                figure.bytes,
                figure.flops,
                figure.bytes / spent / 1e9,
                figure.flops / spent / 1e9,
                report.bound(figure) * 1e3,
                report.over(figure),
            )
            yield {
                **where,
                "phase": figure.phase,
                "kernel": figure.kernel,
                **dict(zip(_STEP_NAMES, (*_spread(figure.seconds), None), strict=True)),
                **dict(zip(_KERNEL_NAMES, numbers, strict=True)),
            }


def write_csv(report: Report, path: Path) -> None:
    """All steps and kernels, whole or not at all. E551."""
    rows = list(_table(report))
    out = io.StringIO()
    writer = csv.DictWriter(out, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        partial.write_text(out.getvalue(), encoding="utf-8")
        partial.replace(path)
    except OSError as failure:
        partial.unlink(missing_ok=True)
        message = f"cannot write the file: {failure.strerror or failure}"
        raise EngineError("E551", message, where=str(path)) from None
