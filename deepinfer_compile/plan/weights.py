"""Weight recipes: checkpoint tensors of the same shape, one line for all layers and experts."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from deepinfer_compile.format.plan import WeightRecipe
from deepinfer_compile.ir.graph import Weight
from deepinfer_compile.ir.types import DType, TensorType

_STORED = {
    DType.F32: "F32",
    DType.BF16: "BF16",
    DType.I32: "I32",
    DType.E4M3: "F8_E4M3",
    DType.UE8M0: "F8_E8M0",
    DType.E2M1: "I8",
}
_LAYER = re.compile(r"^layers\.(\d+)\.")


@dataclass(frozen=True)
class _Family:
    pattern: str
    experts: int
    dtype: str
    shape: tuple[int, ...]


def recipes(weights: Sequence[Weight], buffers: Mapping[str, int]) -> tuple[WeightRecipe, ...]:
    """One recipe per pattern, in name order; `buffers` gives each weight's buffer."""
    families: dict[_Family, dict[int, int]] = {}
    for weight in weights:
        layer = _LAYER.match(weight.source)
        members = families.setdefault(_family(weight), {})
        members[int(layer[1]) if layer else -1] = buffers[weight.value.name]
    return tuple(
        WeightRecipe(
            pattern=family.pattern,
            layers=tuple(sorted(members)) if "{l}" in family.pattern else (),
            experts=family.experts,
            dtype=family.dtype,
            shape=family.shape,
            buffers=tuple(members[layer] for layer in sorted(members)),
        )
        for family, members in sorted(families.items(), key=lambda item: item[0].pattern)
    )


def _family(weight: Weight) -> _Family:
    stacked = "{e}" in weight.source
    shape = _stored_shape(weight.value.type)
    return _Family(
        pattern=_LAYER.sub("layers.{l}.", weight.source),
        experts=shape[0] if stacked else 0,
        dtype=_STORED[weight.value.type.dtype],
        shape=shape[1:] if stacked else shape,
    )


def _stored_shape(type_: TensorType) -> tuple[int, ...]:
    """The checkpoint packs two e2m1 codes in a byte."""
    lead = type_.shape[0]
    assert isinstance(lead, int)
    shape = (lead, *type_.inner)
    return (*shape[:-1], shape[-1] // 2) if type_.dtype is DType.E2M1 else shape
