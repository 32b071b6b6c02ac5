"""`deepinfer-engine numdiff A B`: where two engines of one model differ, and whether they may.

match.py     can they be compared, on what tokens
compare.py   A free, B forced to A's values at every probe, B free
figures.py   relative errors, ids that agree
limits.py    what is allowed, and by what
verdict.py   outside, worst, first
report.py    tables and JSON
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path

from deepinfer_compile.runtime.folder import open_folder
from deepinfer_compile.runtime.loader import Engine, start
from deepinfer_compile.runtime.numdiff.compare import compare
from deepinfer_compile.runtime.numdiff.match import Piece, check_same_model, pieces_of
from deepinfer_compile.runtime.numdiff.verdict import Verdict, judge
from deepinfer_compile.runtime.progress import Meter


@dataclass(frozen=True)
class Outcome:
    """A verdict and what it is about; the engines are closed."""

    verdict: Verdict
    a: Engine
    b: Engine
    pieces: Sequence[Piece]


def run_numdiff(
    a: str, b: str, checkpoint: Path | str | None, prompt: int | None, progress: bool
) -> Outcome:
    """Compare two engines; refused before either is loaded where they cannot be."""
    folders = open_folder(a), open_folder(b)
    check_same_model(*folders)
    pieces = pieces_of(folders[0].plan, folders[1].plan, prompt)
    with ExitStack() as stack:
        first, second = (
            stack.enter_context(closing(start(folder, checkpoint=checkpoint))) for folder in folders
        )
        with Meter(len(pieces), progress, "numdiff") as meter:
            comparison = compare(first.executor, second.executor, pieces, meter)
        return Outcome(judge(comparison), first, second, pieces)
