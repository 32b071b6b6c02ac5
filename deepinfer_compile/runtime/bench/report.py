"""A bench as JSON facts and as CSV; `text.py` prints it."""

from __future__ import annotations

import csv
import io
import platform
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from statistics import median

from deepinfer_compile import __version__
from deepinfer_compile.runtime.bench.ask import Ask
from deepinfer_compile.runtime.bench.ceilings import Ceilings
from deepinfer_compile.runtime.bench.measure import KernelFigure, Part
from deepinfer_compile.runtime.bench.work import SEED
from deepinfer_compile.runtime.loader import Engine
from deepinfer_compile.runtime.machine import describe_cpu
from deepinfer_compile.runtime.text_file import write_text

TOLD = 2  # a kernel that takes less than this many empty calls is not compared with its bound
_STEP_NAMES = ("min_ms", "median_ms", "max_ms", "tokens_per_s")
_KERNEL_NAMES = ("calls", "share", "bytes", "flops", "gb_per_s", "gflop_per_s", "bound_ms", "over")


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
        if not bound or spent < TOLD * figure.calls * self.ceilings.call:
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


def spread(seconds: tuple[float, ...]) -> tuple[float, float, float]:
    """Minimum, median, maximum in ms."""
    return min(seconds) * 1e3, median(seconds) * 1e3, max(seconds) * 1e3


def facts(report: Report) -> dict[str, object]:
    """What --json prints."""
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
        whole = (*spread(part.seconds), part.tokens_per_second)
        yield {
            **where,
            "phase": None,
            "kernel": None,
            **dict(zip(_STEP_NAMES, whole, strict=True)),
            **dict.fromkeys(_KERNEL_NAMES),
        }
        for figure in part.kernels:
            spent = median(figure.seconds)
            numbers = (
                figure.calls,
                spent / part.apart,
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
                **dict(zip(_STEP_NAMES, (*spread(figure.seconds), None), strict=True)),
                **dict(zip(_KERNEL_NAMES, numbers, strict=True)),
            }


def write_csv(report: Report, path: Path) -> None:
    """All steps and kernels, whole or not at all. E551."""
    rows = list(_table(report))
    out = io.StringIO()
    writer = csv.DictWriter(out, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_text(path, out.getvalue())
