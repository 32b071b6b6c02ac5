"""The answer: which figures are outside their limits, the worst, the first."""

from __future__ import annotations

from dataclasses import dataclass

from deepinfer_compile.runtime.numdiff.compare import Comparison, Place
from deepinfer_compile.runtime.numdiff.figures import Figure
from deepinfer_compile.runtime.numdiff.limits import DIVERGENCE, LIMITS, Limit

_PHASES = ("prefill", "decode")
_PARTS = tuple(LIMITS)


@dataclass(frozen=True)
class Finding:
    """A figure, judged; `place` None: logits of the free run. `error` as its limit bounds it."""

    place: Place | None
    name: str
    error: float
    limit: Limit

    @property
    def ok(self) -> bool:
        return self.error <= self.limit.most

    @property
    def excess(self) -> float:
        """How many times the limit."""
        if not self.error:
            return 0.0
        return self.error / self.limit.most if self.limit.most else float("inf")


@dataclass(frozen=True)
class Verdict:
    """Findings by layer, then phase, then in the order of computing; the free run's is last."""

    comparison: Comparison
    findings: tuple[Finding, ...]

    @property
    def ok(self) -> bool:
        return all(finding.ok for finding in self.findings)

    @property
    def worst(self) -> Finding:
        return max(self.findings, key=lambda finding: finding.excess)

    @property
    def first(self) -> Finding | None:
        """The first outside its limit."""
        return next((finding for finding in self.findings if not finding.ok), None)

    def at(self, layer: int, phase: str) -> dict[str, tuple[Finding, Figure]]:
        """What was found of a layer, by part."""
        return {
            finding.place.part: (finding, self.comparison.forced[finding.place])
            for finding in self.findings
            if finding.place and (finding.place.layer, finding.place.phase) == (layer, phase)
        }


def judge(comparison: Comparison) -> Verdict:
    """Every figure against its limit."""
    places = sorted(comparison.forced, key=_order)
    findings = [
        Finding(
            place,
            f"{layer_name(place.layer, comparison.layers)} {place.part}, {place.phase}",
            comparison.forced[place].error,
            LIMITS[place.part],
        )
        for place in places
    ]
    mean = float(comparison.free.divergence.mean())
    findings.append(Finding(None, "free run, mean KL", mean, DIVERGENCE))
    return Verdict(comparison, tuple(findings))


def layer_name(layer: int, layers: int) -> str:
    """As probes name it; the embedding comes before, the head after."""
    if layer < 0:
        return "embed"
    return f"layers.{layer}" if layer < layers else "head"


def _order(place: Place) -> tuple[int, int, int]:
    return place.layer, _PHASES.index(place.phase), _PARTS.index(place.part)
