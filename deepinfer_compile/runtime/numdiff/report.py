"""A verdict as text and as JSON facts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from deepinfer_compile.runtime.columns import Row, columns
from deepinfer_compile.runtime.loader import Engine
from deepinfer_compile.runtime.numdiff.figures import Figure, Floats
from deepinfer_compile.runtime.numdiff.limits import DIVERGENCE, LIMITS
from deepinfer_compile.runtime.numdiff.match import DECODED, SEED, Piece
from deepinfer_compile.runtime.numdiff.verdict import Finding, Verdict, layer_name

_ENTERS = ("attn_in", "ffn_in", "hidden")
_LEAVES = ("pre", "streams", "logits")
_TITLES = (
    *("", "in", "engram", "candidates", "selected", "attn_out", "max"),
    *("experts", "ffn_out", "max", "out"),
)
_NOTE = """\
  B gets A's values at every probe, so a difference is the part's own. in, out: the worse of attn_in
  and ffn_in, of pre and streams; in the head hidden and logits. attn_out, ffn_out: relative L2, and
  max |a - b|. Ids: the part that agrees. !: outside its limit."""

Found = Mapping[str, tuple[Finding, Figure]]


def text(verdict: Verdict, a: Engine, b: Engine, pieces: Sequence[Piece]) -> str:
    """Engines, a table by layer for each phase, the free run, limits with sources, the answer."""
    free = verdict.comparison.free
    return "\n\n".join(
        [
            f"numdiff\n{columns(_head(a, b, pieces))}",
            *(f"forced, {phase}\n{_table(verdict, phase)}" for phase in ("prefill", "decode")),
            _NOTE,
            f"free run, {len(free.divergence)} positions\n"
            f"  logits KL mean {free.divergence.mean():.3g}, max {free.divergence.max():.3g}; "
            f"same top token {free.same_top:.1%}",
            f"limits, by section 9 of the model's specification\n{columns(_limits())}",
            _answer(verdict, a, b),
        ]
    )


def _head(a: Engine, b: Engine, pieces: Sequence[Piece]) -> list[Row]:
    prompt = sum(len(piece.tokens) for piece in pieces if piece.phase == "prefill")
    chunks = sum(piece.phase == "prefill" for piece in pieces)
    tokens = f"{prompt} random ones, seed {SEED}, in {chunks} chunks; {DECODED} decoded one by one"
    return [
        *((name, f"{e.path} ({e.manifest.numerics}, {e.isa})") for name, e in (("A", a), ("B", b))),
        ("tokens", tokens),
    ]


def _table(verdict: Verdict, phase: str) -> str:
    layers = verdict.comparison.layers
    rows: list[Row] = [_TITLES]
    for layer in range(-1, layers + 1):
        found = verdict.at(layer, phase)
        rows.append(
            (
                layer_name(layer, layers),
                _error(found, *_ENTERS),
                *(_agreement(found, part) for part in ("engram_rows", "candidates", "selected")),
                *(_error(found, "attn_out"), _largest(found, "attn_out")),
                _agreement(found, "experts"),
                *(_error(found, "ffn_out"), _largest(found, "ffn_out")),
                _error(found, *_LEAVES),
            )
        )
    return columns(rows, right=tuple(range(1, len(_TITLES))))


def _error(found: Found, *parts: str) -> str:
    """The worst of some parts."""
    findings = [found[part][0] for part in parts if part in found]
    if not findings:
        return ""
    worst = max(findings, key=lambda finding: finding.excess)
    return f"{worst.error:.2g}{_mark(worst)}"


def _agreement(found: Found, part: str) -> str:
    return f"{1 - found[part][0].error:.1%}{_mark(found[part][0])}" if part in found else ""


def _largest(found: Found, part: str) -> str:
    figure = found[part][1] if part in found else None
    return f"{figure.largest:.2g}" if isinstance(figure, Floats) else ""


def _mark(finding: Finding) -> str:
    return "" if finding.ok else "!"


def _limits() -> list[Row]:
    limits = {**LIMITS, "free run": DIVERGENCE}
    return [(name, f"{limit.most:.2g}", limit.source) for name, limit in limits.items()]


def _answer(verdict: Verdict, a: Engine, b: Engine) -> str:
    total, first, worst = len(verdict.findings), verdict.first, verdict.worst
    lines = []
    if worst.error:
        lines.append(f"worst: {worst.name}: {worst.error:.3g}, {worst.excess:.3g} times its limit")
    if first is None:
        equal = "within their limits" if worst.error else "zero: what was compared is equal"
        lines.append(f"ok: all {total} figures are {equal}")
    else:
        outside = sum(not finding.ok for finding in verdict.findings)
        lines.append(
            f"no: {outside} of {total} figures are outside their limits, the first: {first.name}: "
            f"{first.error:.3g}, {first.limit.most:.2g} allowed"
        )
    if a.manifest.numerics != b.manifest.numerics:
        lines.append(
            f"the engines round by other policies ({a.manifest.numerics}, {b.manifest.numerics}); "
            "the limits are for one policy"
        )
    return "\n".join(lines)


def facts(verdict: Verdict, a: Engine, b: Engine, pieces: Sequence[Piece]) -> dict[str, object]:
    """The same for a program. An infinite error, of a NaN, is null."""
    free = verdict.comparison.free
    engines = {
        name: {"engine": e.manifest.name, "numerics": e.manifest.numerics, "isa": e.isa}
        for name, e in (("a", a), ("b", b))
    }
    first = verdict.first
    return {
        "ok": verdict.ok,
        **engines,
        "seed": SEED,
        "prompt": sum(len(piece.tokens) for piece in pieces) - DECODED,
        "decoded": DECODED,
        "figures": [_fact(finding, verdict) for finding in verdict.findings],
        "free_run": {
            "kl_mean": _number(float(free.divergence.mean())),
            "kl_max": _number(float(free.divergence.max())),
            "same_top": free.same_top,
        },
        "worst": _fact(verdict.worst, verdict),
        "first_outside": None if first is None else _fact(first, verdict),
    }


def _fact(finding: Finding, verdict: Verdict) -> dict[str, object]:
    place = finding.place
    figure = None if place is None else verdict.comparison.forced[place]
    return {
        "layer": None if place is None else layer_name(place.layer, verdict.comparison.layers),
        "phase": None if place is None else place.phase,
        "part": "free run" if place is None else place.part,
        "error": _number(finding.error),
        "max_abs": _number(figure.largest) if isinstance(figure, Floats) else None,
        "most": finding.limit.most,
        "source": finding.limit.source,
        "ok": finding.ok,
    }


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None
