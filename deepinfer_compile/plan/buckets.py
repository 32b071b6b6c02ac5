"""Row counts that steps are planned for (design.md section 4).

    decode   1, 2, 4, 8, 16, 24, ..., 64, 80, 96, ..., 128, 160, ...
    prefill  64, 128, 256, 512, ... doubling

Above 64 rows the width doubles with the rows: at most a fifth of a padded step is padding. The last
bucket of a phase is its largest step. Every row class ends at a bucket, so that a bucket has one
kernel for each launch. `sample` has the buckets of decode.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import takewhile


def buckets(phase: str, max_rows: int, class_ends: Iterable[int]) -> tuple[int, ...]:
    """Ascending, the last is `max_rows`. `class_ends`: where row classes of the phase end."""
    sizes = _prefill() if phase == "prefill" else _decode()
    usual = takewhile(lambda rows: rows < max_rows, sizes)
    return tuple(sorted({*usual, *class_ends, max_rows}))


def _prefill() -> Iterator[int]:
    rows = 64
    while True:
        yield rows
        rows *= 2


def _decode() -> Iterator[int]:
    yield from (1, 2, 4)
    rows, width = 8, 8
    while True:
        yield rows
        if rows >= 8 * width:
            width *= 2
        rows += width
