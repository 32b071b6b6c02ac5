"""Whether this machine has the memory that an engine allocates, asked before it does.

Weights that are mapped are not counted: their pages come from files and can go back there.
"""

from __future__ import annotations

from dataclasses import dataclass

from deepinfer_compile.format.plan import EnginePlan, Lifetime
from deepinfer_compile.runtime.errors import EngineError


@dataclass(frozen=True)
class Need:
    """Bytes: the plan's state, io and arena; `copied`: weights that lie apart in a checkpoint."""

    state: int
    io: int
    arena: int
    copied: int

    @property
    def total(self) -> int:
        return self.state + self.io + self.arena + self.copied


def need_of(plan: EnginePlan, packed: bool) -> Need:
    """What loading allocates, with weights from the engine's own file or from a checkpoint."""
    apart = [recipe for recipe in plan.weights if recipe.experts > 1 and not packed]
    copied = sum(plan.buffers[i].bytes for recipe in apart for i in recipe.buffers)
    return Need(plan.memory.state, plan.memory.io, plan.memory.arena, copied)


def check_room(plan: EnginePlan, packed: bool, available: int | None) -> None:
    """E242 when `available` bytes are too few; None, an unknown number, is enough."""
    need = need_of(plan, packed)
    if available is None or need.total <= available:
        return
    missing = need.total - available
    raise EngineError(
        "E242",
        f"the engine needs {need.total:,} bytes of memory, {available:,} are available: "
        f"{missing:,} are missing",
        notes=[
            f"state {need.state:,}: {_state(plan)}",
            f"io {need.io:,}, arena {need.arena:,}: for steps of max_rows and prefill_chunk",
            *([f"experts copied together {need.copied:,}: none if packed"] if need.copied else []),
        ],
        help=f"free memory, or compile again with {_smaller(plan, missing)}",
    )


def _per(plan: EnginePlan, lifetime: Lifetime) -> int:
    """Bytes of a slot, or of a page."""
    return sum(field.bytes for field in plan.states if field.lifetime is lifetime)


def _state(plan: EnginePlan) -> str:
    limits = plan.limits
    return (
        f"{limits.slots} slots of {_per(plan, Lifetime.SLOT):,} "
        "(engine.max_requests, engine.prefix_snapshots), "
        f"{limits.pages} pages of {_per(plan, Lifetime.PAGED):,} "
        "(engine.max_requests * engine.max_context, or engine.cache_tokens)"
    )


def _smaller(plan: EnginePlan, missing: int) -> str:
    """What fits here, if fewer pages for one request at least are enough."""
    limits, page = plan.limits, _per(plan, Lifetime.PAGED)
    fewer = -(-missing // page) if page else limits.pages
    tokens = (limits.pages - 1 - fewer) * limits.page_size
    smaller = "a smaller engine.max_requests or engine.max_context"
    if tokens < limits.max_context:
        return f"{smaller}, or engine.cache_tokens"
    return f"--set engine.cache_tokens={tokens}, or {smaller}"
