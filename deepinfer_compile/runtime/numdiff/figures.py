"""How far two values are apart, summed up over rows as they come.

Floats   max |a - b| and |a - b| / |a|, over all elements
Sets     of each row's ids: how many are missing, and in how many rows any is
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from deepinfer_compile.runtime.arrays import Array
from deepinfer_compile.runtime.probed import floats


@dataclass
class Floats:
    """A NaN on one side only is no agreement: the figures are infinite then."""

    largest: float = 0.0
    difference: float = 0.0  # sums of squares
    size: float = 0.0

    def add(self, a: Array, b: Array) -> None:
        """Rows of both sides: f32, or bf16 as bits."""
        x, y = floats(a).astype(np.float64), floats(b).astype(np.float64)
        alike = (x == y) | (np.isnan(x) & np.isnan(y))
        apart = np.where(alike, 0.0, np.abs(np.where(alike, 0.0, x) - np.where(alike, 0.0, y)))
        apart = np.where(np.isnan(apart), np.inf, apart)
        self.largest = max(self.largest, float(apart.max(initial=0.0)))
        self.difference += float(np.square(apart).sum())
        self.size += float(np.square(x, where=np.isfinite(x), out=np.zeros_like(x)).sum())

    @property
    def error(self) -> float:
        """Relative L2 of the difference."""
        if not self.difference:
            return 0.0
        return float(np.sqrt(self.difference / self.size)) if self.size else float("inf")


@dataclass
class Sets:
    """Rows of ids in any order; negative ids are none."""

    rows: int = 0
    missing: float = 0.0  # summed over rows: the part of the ids that one side lacks

    def add(self, a: Array, b: Array) -> None:
        self.rows += len(a)
        for x, y in zip(a, b, strict=True):
            left, right = set(x[x >= 0].tolist()), set(y[y >= 0].tolist())
            if left != right:
                self.missing += 1 - len(left & right) / max(len(left), len(right))

    @property
    def error(self) -> float:
        """1 - the mean overlap of a row."""
        return self.missing / self.rows if self.rows else 0.0


@dataclass
class Rows:
    """Rows of ids that must all agree, `ordered` or not."""

    ordered: bool
    rows: int = 0
    other: int = 0

    def add(self, a: Array, b: Array) -> None:
        x, y = (a, b) if self.ordered else (np.sort(a, axis=1), np.sort(b, axis=1))
        self.rows += len(a)
        self.other += int(np.any(x != y, axis=1).sum())

    @property
    def error(self) -> float:
        """The part of rows that differ."""
        return self.other / self.rows if self.rows else 0.0


Figure = Floats | Sets | Rows


def figure_of(part: str) -> Figure:
    """An empty figure of the kind that a probe's values need."""
    match part:
        case "selected" | "candidates":
            return Sets()
        case "experts":
            return Rows(ordered=False)
        case "engram_rows":
            return Rows(ordered=True)
    return Floats()
