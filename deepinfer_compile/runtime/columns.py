"""Aligned text for terminals."""

from __future__ import annotations

from collections.abc import Sequence

Row = Sequence[str]


def columns(rows: Sequence[Row], right: Sequence[int] = ()) -> str:
    """Rows of equal length as lines; `right` are the columns of numbers."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [
            cell.rjust(width) if i in right else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  " + "  ".join(cells).rstrip())
    return "\n".join(lines)
