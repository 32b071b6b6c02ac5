"""The nano model of the examples, and edits of it."""

from __future__ import annotations

from pathlib import Path

from deepinfer_compile.spec.load import load_spec
from deepinfer_compile.spec.schema import Model

REPO = Path(__file__).resolve().parents[2]


def nano() -> Model:
    return load_spec(REPO / "examples/v41_nano.yaml", environment={}).model


def edited(model: Model, **changes: object) -> Model:
    """`model` with new values by `section.field` or `field`, checked by the schema only."""
    facts = model.model_dump()
    for key, value in changes.items():
        *sections, field = key.split(".")
        place = facts
        for section in sections:
            place = place[section]
        place[field] = value
    return Model.model_validate(facts)
