"""Changes between two engines as text: `-` is the first engine's, `+` the second's."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import groupby

from deepinfer_compile.runtime.columns import Row, columns
from deepinfer_compile.runtime.comparison import Change

_SHA256 = re.compile(r"[0-9a-f]{64}")
_SOURCE = re.compile(r"kernels/.*\.(cpp|h)")


def describe_changes(changes: Sequence[Change]) -> str:
    """A table for each section that differs; "" for no changes."""
    sections = []
    for title, group in groupby(changes, key=lambda change: change.section):
        rows_of = _files if title == "files" else _rows
        rows = list(rows_of(list(group)))
        used = [i for i in range(len(rows[0])) if any(row[i] for row in rows)]
        table = columns([[row[i] for i in used] for row in rows])
        sections.append(f"{title}\n{table}")
    return "\n\n".join(sections)


def _rows(changes: Sequence[Change]) -> Iterator[Row]:
    """(sign, name, fact, value): a line for each engine that has the fact."""
    for change in changes:
        for sign, value in (("-", change.before), ("+", change.after)):
            if value is not None:
                shown = _shown(value) if change.fact else ""
                yield sign, change.name, change.fact, shown


def _files(changes: Sequence[Change]) -> Iterator[Row]:
    """Sources differ by the dozen, and their kernels are named above: they are counted."""
    sources = [change for change in changes if _SOURCE.fullmatch(change.fact)]
    yield from _rows([change for change in changes if change not in sources])
    if sources:
        counts = {
            "changed": sum(None not in (c.before, c.after) for c in sources),
            "removed": sum(c.after is None for c in sources),
            "added": sum(c.before is None for c in sources),
        }
        told = ", ".join(f"{count} {what}" for what, count in counts.items() if count)
        yield "", "", "generated sources", told


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int | float):
        return f"{value:,}"
    if isinstance(value, list):  # steps
        return f"{len(value):,} of its own" + (f", first {value[0]}" if value else "")
    if isinstance(value, tuple):
        between = ", " if all(isinstance(item, int) for item in value) else "; "
        return between.join(map(str, value)) or "none"
    text = str(value)
    return text[:12] if _SHA256.fullmatch(text) else text
