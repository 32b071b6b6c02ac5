"""Whether two engines can be compared, and on what tokens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from deepinfer_compile.format.plan import EnginePlan
from deepinfer_compile.runtime.errors import EngineError, RequestError
from deepinfer_compile.runtime.folder import EngineFolder
from deepinfer_compile.runtime.probed import HOW_TO_GET

SEED = 0
DECODED = 8  # teacher-forced steps after the prompt
_PROMPT = 256
_SHOWN = 10


@dataclass(frozen=True)
class Piece:
    """Consecutive tokens of the one request, run as one step of both engines."""

    phase: str
    first: int
    tokens: tuple[int, ...]


def check_same_model(a: EngineFolder, b: EngineFolder) -> None:
    """E467 with all that differs."""
    blind = [str(folder.path) for folder in (a, b) if not _shapes(folder.plan, "prefill")]
    problems = [f"{path}: compiled without probes" for path in blind]
    sizes = (_sizes(a.plan), _sizes(b.plan))
    problems += [
        f"{name}: {sizes[0][name]:,} and {sizes[1][name]:,}"
        for name in sizes[0]
        if name in sizes[1] and sizes[0][name] != sizes[1][name]
    ]
    problems = problems or list(_other_probes(a.plan, b.plan))
    if problems:
        help = HOW_TO_GET if blind else "compare engines that were compiled from one model"
        more = [f"and {len(problems) - _SHOWN} more"] if len(problems) > _SHOWN else []
        raise EngineError(
            "E467",
            "these engines cannot be compared",
            where=f"{a.path} and {b.path}",
            notes=problems[:_SHOWN] + more,
            help=help,
        )


def _shapes(plan: EnginePlan, phase: str) -> dict[str, tuple[int, ...]]:
    """What a row of each probe holds."""
    probes = next(p.probes for p in plan.phases if p.name == phase)
    return {probe.name: plan.buffers[probe.buffer].shape[1:] for probe in probes}


def _sizes(plan: EnginePlan) -> Mapping[str, int]:
    """The model's size, as far as its probes tell."""
    outputs = {n: s for n, s in _shapes(plan, "prefill").items() if n.endswith(".attn_out")}
    sizes = {"vocabulary": plan.limits.vocab_size}
    if outputs:
        sizes |= {"layers": len(outputs), "hidden size": next(iter(outputs.values()))[-1]}
    return sizes


def _other_probes(a: EnginePlan, b: EnginePlan) -> Iterator[str]:
    for phase in ("prefill", "decode", "sample"):
        ours, theirs = _shapes(a, phase), _shapes(b, phase)
        for name in sorted(ours.keys() | theirs.keys()):
            found = [str(s.get(name, "absent")) for s in (ours, theirs)]
            if found[0] != found[1]:
                yield f"probe `{name}` of {phase}: {found[0]} and {found[1]}"


def pieces_of(a: EnginePlan, b: EnginePlan, prompt: int | None) -> tuple[Piece, ...]:
    """A seeded random prompt in chunks that both engines take, then decode steps. E022."""
    most = min(_positions(plan) for plan in (a, b)) - DECODED
    length = max(1, min(_PROMPT, most)) if prompt is None else prompt
    if not 1 <= length <= most:
        message = f"--prompt {length}: these engines take 1 to {most} tokens"
        notes = [f"{DECODED} more are decoded"]
        raise RequestError("E022", message, notes=notes, help="give another --prompt")
    vocabulary = a.limits.vocab_size
    tokens = np.random.default_rng(SEED).integers(0, vocabulary, length + DECODED).tolist()
    chunk = min(p.max_rows for plan in (a, b) for p in plan.phases if p.name == "prefill")
    pieces = [
        Piece("prefill", first, tuple(tokens[first : min(length, first + chunk)]))
        for first in range(0, length, chunk)
    ]
    pieces += [Piece("decode", at, (tokens[at],)) for at in range(length, length + DECODED)]
    return tuple(pieces)


def _positions(plan: EnginePlan) -> int:
    """What one request can hold, alone in the engine."""
    return min(plan.limits.max_context, (plan.limits.pages - 1) * plan.limits.page_size)
