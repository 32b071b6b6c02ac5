"""A bench as text: header, whole steps, and the kernels of each, longest first."""

from __future__ import annotations

from statistics import median

from deepinfer_compile.runtime.bench.ceilings import COPIED, SIDE
from deepinfer_compile.runtime.bench.measure import Part
from deepinfer_compile.runtime.bench.report import TOLD, Report, spread
from deepinfer_compile.runtime.bench.work import SEED
from deepinfer_compile.runtime.columns import Row, columns

_NOTE = f"""\
bound: what bytes and operations of the operands need at the ceilings above. States count as at
max_context, experts as shared by no rows: under 1x, less was needed or caches gave it. -: the
kernel takes less than {TOLD} empty calls, too little to compare. Where calls one at a time take
longer than the whole and the calling, caches cooled and threads fell asleep between them."""


def text(report: Report) -> str:
    """All of it."""
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
        low, middle, high = (f"{ms:.3f}" for ms in spread(part.seconds))
        rows.append((_name(part), low, middle, high, f"{part.tokens_per_second:,.0f}"))
    return columns(rows, right=(1, 2, 3, 4))


def _kernels(report: Report, part: Part) -> str:
    titles = ("share", "ms", "calls", "us/call", "MB", "GB/s", "Gflop/s", "bound ms", "over")
    rows: list[Row] = [(*titles, "kernel")]
    for figure in part.kernels:
        spent, over = median(figure.seconds), report.over(figure)
        name = figure.kernel if figure.phase == part.phase else f"{figure.kernel} ({figure.phase})"
        rows.append(
            (
                f"{spent / part.apart:.1%}",
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
        f"{calls:,} calls one at a time: {part.apart * 1e3:.3f} ms, {called:.3f} of it calling; "
        f"whole: {whole:.3f} ms"
    )
    return f"{columns(rows, right=tuple(range(len(titles))))}\n  {sums}"
