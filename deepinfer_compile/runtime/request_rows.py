"""The row arrays of a step, filled from the host: slots, positions, pages.

A step has spans; a span is some consecutive tokens of one request:

    token_id    t5 t6 t7 | u0 u1        slot       1 1 1 | 2 2
    position     5  6  7 |  0  1        row_start  0 0 0 | 3 3
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from deepinfer_compile.runtime.executor import Executor


@dataclass(frozen=True)
class Span:
    """`tokens` of the request in `slot`, the first at `position`."""

    slot: int
    position: int
    tokens: tuple[int, ...]


def fill_rows(executor: Executor, spans: Sequence[Span]) -> int:
    """Write the spans one after another; returns the number of rows."""
    columns: dict[str, list[int]] = {"token_id": [], "position": [], "slot": [], "row_start": []}
    for span in spans:
        begin, count = len(columns["slot"]), len(span.tokens)
        columns["token_id"] += span.tokens
        columns["position"] += range(span.position, span.position + count)
        columns["slot"] += [span.slot] * count
        columns["row_start"] += [begin] * count
    rows = len(columns["slot"])
    for name, values in (columns | {"image": [0] * rows}).items():
        if name in executor.rows:
            executor.rows[name][:rows] = values  # one conversion for all spans
    return rows


def set_pages(executor: Executor, slot: int, pages: Sequence[int], first: int = 0) -> None:
    """The slot's row of the page table from entry `first` on; where it has no page, it names
    padding's page 0."""
    table = executor.rows.get("page_table")
    if table is not None:
        table[slot, first:] = 0
        table[slot, first : first + len(pages)] = np.asarray(pages, dtype=np.int32)


class RequestRows:
    """One request alone in an engine: it may have every page."""

    def __init__(self, executor: Executor, slot: int) -> None:
        self._executor = executor
        self._slot = slot
        limits = executor.plan.limits
        count = min(limits.pages - 1, -(-limits.max_context // limits.page_size))
        self.pages = tuple(range(1, count + 1))
        set_pages(executor, slot, self.pages)

    def fill(self, tokens: Sequence[int], position: int) -> int:
        """The request's next tokens as this step's only span."""
        return fill_rows(self._executor, [Span(self._slot, position, tuple(tokens))])
