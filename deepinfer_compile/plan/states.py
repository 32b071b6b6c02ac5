"""The state contract: what each kind of state is, how it is addressed and what survives.

kind          addressed   survives a prefix hit   roll back
window        slot        at snapshot positions   rows at re-used positions are overwritten
kv_pages      paged       yes                     visible length follows from the position
index_pages   paged       yes                     visible length follows from the position
tail          slot        no: hits end groups     the group is pooled again when it completes
history       slot        at snapshot positions   rows at re-used positions are overwritten
"""

from __future__ import annotations

from dataclasses import dataclass

from deepinfer_compile.format.plan import Lifetime, StateField
from deepinfer_compile.ir.graph import Value
from deepinfer_compile.spec.schema import Model


@dataclass(frozen=True)
class _Kind:
    lifetime: Lifetime
    survives: bool
    rollback: str


_KINDS = {
    "window": _Kind(Lifetime.SLOT, True, "overwritten at re-used positions"),
    "kv_pages": _Kind(Lifetime.PAGED, True, "visible length follows from the position"),
    "index_pages": _Kind(Lifetime.PAGED, True, "visible length follows from the position"),
    "tail": _Kind(Lifetime.SLOT, False, "pooled again when the group completes"),
    "history": _Kind(Lifetime.SLOT, True, "overwritten at re-used positions"),
}


def state_field(model: Model, state: Value, buffer: int) -> StateField:
    """The contract's row for a graph state; its name ends in the kind."""
    owner, _, kind = state.name.rpartition(".")
    facts = _KINDS[kind]
    units = state.type.shape[0]
    assert isinstance(units, int)
    layer = int(owner.split(".")[1]) if owner else -1
    return StateField(
        name=state.name,
        buffer=buffer,
        lifetime=facts.lifetime,
        owner=owner or "model",
        bytes=state.type.bytes(0) // units,
        length=state.type.inner[0],
        ratio=model.compression.ratios[layer] if facts.lifetime is Lifetime.PAGED else 1,
        survives_prefix_hit=facts.survives,
        rollback=facts.rollback,
        crosses=True,
    )
