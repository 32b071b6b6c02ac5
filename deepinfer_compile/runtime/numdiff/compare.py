"""Two engines over the same tokens.

forced   A runs freely; at every probe B's value is compared with A's, then replaced by it. So
         each part of B gets A's inputs, and a difference is the part's own.
free     both run on their own; logits are compared as distributions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from deepinfer_compile.format.plan import Probe
from deepinfer_compile.runtime.arrays import Array
from deepinfer_compile.runtime.executor import Executor
from deepinfer_compile.runtime.numdiff.figures import Figure, figure_of
from deepinfer_compile.runtime.numdiff.match import Piece
from deepinfer_compile.runtime.probed import LAYER, as_stored, read_logits, visit_probes
from deepinfer_compile.runtime.progress import Meter
from deepinfer_compile.runtime.request_rows import RequestRows

_SLOT = 1
_HANDED_ON = ("streams", "pre")  # named after the layer that reads them


@dataclass(frozen=True)
class Place:
    """A part of a layer, in a phase. Layer -1 is the embedding, one past the last is the head."""

    layer: int
    phase: str
    part: str


@dataclass(frozen=True)
class FreeRun:
    """`divergence`: KL(A || B) of each position, in nats. `same_top`: the part of positions with
    the same arg max."""

    divergence: NDArray[np.float64]
    same_top: float


@dataclass(frozen=True)
class Comparison:
    """`forced`: figures by the place where the values were made."""

    layers: int
    forced: dict[Place, Figure]
    free: FreeRun


def compare(a: Executor, b: Executor, pieces: Sequence[Piece], meter: Meter) -> Comparison:
    """Run all pieces three times: A, B on A's values, B alone. States are left used."""
    layers = sum(probe.name.endswith(".attn_out") for probe in a.phase("prefill").probes)
    forced = _Forced(a, b, layers)
    logits = []
    for piece in pieces:
        logits.append(forced.run(piece))
        meter.add(2 * len(piece.tokens), False)
    return Comparison(layers, forced.figures, _free(b, pieces, logits, meter))


class _Forced:
    def __init__(self, a: Executor, b: Executor, layers: int) -> None:
        self._a, self._b, self._layers = a, b, layers
        self._rows_of_a, self._rows_of_b = RequestRows(a, _SLOT), RequestRows(b, _SLOT)
        self.figures: dict[Place, Figure] = {}

    def run(self, piece: Piece) -> Array:
        """Compare a piece at every probe; A's logits."""
        taken: dict[str, Array] = {}
        rows = len(piece.tokens)

        def take(probe: Probe) -> None:
            taken[probe.name] = self._a.read(probe, rows)

        def force(probe: Probe) -> None:
            theirs, ours = taken[probe.name], self._b.read(probe, rows)
            self._add(piece.phase, probe.name, theirs, ours)
            ids = ours.dtype == np.int32
            self._b.inject(probe, rows, theirs if ids else as_stored(self._b, probe, theirs))

        self._rows_of_a.fill(piece.tokens, piece.first)
        visit_probes(self._a, piece.phase, rows, take)
        logits = read_logits(self._a, rows)
        self._rows_of_b.fill(piece.tokens, piece.first)
        visit_probes(self._b, piece.phase, rows, force)
        self._add(piece.phase, "logits", logits, read_logits(self._b, rows))
        return logits

    def _add(self, phase: str, name: str, a: Array, b: Array) -> None:
        place = self._place(phase, name)
        self.figures.setdefault(place, figure_of(place.part)).add(a, b)

    def _place(self, phase: str, name: str) -> Place:
        """Where a value was made."""
        match = LAYER.fullmatch(name)
        if not match:
            return Place(self._layers, phase, name)
        part = match[2]
        return Place(int(match[1]) - (part in _HANDED_ON), phase, part)


def _free(b: Executor, pieces: Sequence[Piece], logits: Sequence[Array], meter: Meter) -> FreeRun:
    """B by itself, against what A said by itself."""
    rows_of_b = RequestRows(b, _SLOT)
    divergence, same = [], []
    for piece, theirs in zip(pieces, logits, strict=True):
        rows = len(piece.tokens)
        rows_of_b.fill(piece.tokens, piece.first)
        b.forward(piece.phase, rows)
        for x, y in zip(theirs, read_logits(b, rows), strict=True):
            divergence.append(_divergence(x, y))
            same.append(np.argmax(x) == np.argmax(y))
        meter.add(rows, False)
    return FreeRun(np.array(divergence), float(np.mean(same)))


def _divergence(a: Array, b: Array) -> float:
    """KL of two rows of logits; infinite where one is no distribution."""
    if np.array_equal(a, b):
        return 0.0
    x, y = a.astype(np.float64), b.astype(np.float64)
    if not (np.isfinite(x).all() and np.isfinite(y).all()):
        return float("inf")
    p, q = _log_softmax(x), _log_softmax(y)
    return float(np.sum(np.exp(p) * (p - q)))


def _log_softmax(row: NDArray[np.float64]) -> NDArray[np.float64]:
    shifted = row - row.max()
    return np.asarray(shifted - np.log(np.exp(shifted).sum()))
