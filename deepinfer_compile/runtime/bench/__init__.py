"""`deepinfer-engine bench`: what an engine takes on this machine, steps whole and kernel by kernel.

ask.py       what is measured; refused before anything runs where it does not fit
work.py      requests with seeded tokens, and the steps that run them
ceilings.py  what this machine can do at most, and what a call costs
measure.py   repetitions and clocks
report.py    the header, tables, JSON and CSV
"""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

from deepinfer_compile.runtime.bench.ask import Ask
from deepinfer_compile.runtime.bench.ceilings import measure_ceilings
from deepinfer_compile.runtime.bench.measure import measure, repetitions
from deepinfer_compile.runtime.bench.report import Report, header
from deepinfer_compile.runtime.folder import EngineFolder
from deepinfer_compile.runtime.loader import start
from deepinfer_compile.runtime.progress import Meter
from deepinfer_compile.runtime.records import kernel_records


def run_bench(
    folder: EngineFolder, ask: Ask, checkpoint: Path | str | None, progress: bool
) -> Report:
    """Load the engine and measure what was asked. E455: a kernel that the manifest lacks."""
    records = kernel_records(folder.manifest, folder.plan)
    engine = start(folder, checkpoint=checkpoint)
    with closing(engine):
        ceilings = measure_ceilings(engine.executor, engine.threads)
        with Meter(repetitions(ask), progress, "bench") as meter:
            parts = measure(engine.executor, records, ask, meter)
        return Report(header(engine), ask, ceilings, parts)
