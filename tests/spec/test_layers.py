"""Layer facts of the released model and of nano, row by row (model_v41.md sections 2 and 10.4)."""

from __future__ import annotations

from deepinfer_compile.spec.layers import LayerFacts, layer_facts
from deepinfer_compile.spec.load import load_spec
from tests.spec.error_cases import ROOT

# Layers, ratio, mode, compressed KV from, index keys from, top-k list from.
SCHEDULE = (
    (range(0, 2), 0, "SWA", None, None, None),
    (range(2, 3), 2, "Full", 2, 2, 2),
    (range(3, 8), 2, "Reuse", 2, 2, 2),
    (range(8, 9), 2, "Full", 8, 8, 8),
    (range(9, 14), 2, "Reuse", 8, 8, 8),
    (range(14, 15), 2, "Full", 14, 14, 14),
    (range(15, 20), 2, "Reuse", 14, 14, 14),
    (range(20, 21), 1, "Full", 20, 20, 20),
    (range(21, 24), 1, "Reuse", 20, 20, 20),
    (range(24, 25), 1, "Reindex", 20, 20, 24),
    (range(25, 28), 1, "Reuse", 20, 20, 24),
    (range(28, 29), 1, "Reindex", 20, 20, 28),
    (range(29, 32), 1, "Reuse", 20, 20, 28),
    (range(32, 33), 1, "Reindex", 20, 20, 32),
    (range(33, 36), 1, "Reuse", 20, 20, 32),
    (range(36, 37), 1, "Reindex", 20, 20, 36),
    (range(37, 40), 1, "Reuse", 20, 20, 36),
)


def facts(name: str) -> tuple[LayerFacts, ...]:
    return layer_facts(load_spec(ROOT / "examples" / f"{name}.yaml", environment={}).model)


def test_released_schedule() -> None:
    layers = facts("v41_flash")
    assert [layer.index for layer in layers] == list(range(40))
    for span, *row in SCHEDULE:
        for index in span:
            fact = layers[index]
            found = [fact.ratio, fact.mode, fact.kv_source, fact.index_k_source, fact.index_source]
            assert found == row, index


def test_released_owners() -> None:
    layers = facts("v41_flash")
    assert [fact.index for fact in layers if fact.owns_kv] == [2, 8, 14, 20]
    assert [fact.index for fact in layers if fact.owns_index_k] == [2, 8, 14, 20]
    assert [fact.index for fact in layers if fact.selects] == [2, 8, 14, 20, 24, 28, 32, 36]
    assert [fact.index for fact in layers if fact.selects_candidates] == [20]
    assert [fact.candidate_source for fact in layers] == [None] * 20 + [20] * 20
    assert [fact.index for fact in layers if fact.engram] == [1, 14]


def test_nano_covers_every_mode() -> None:
    modes = [fact.mode for fact in facts("v41_nano")]
    assert modes == ["SWA", "SWA", "Full", "Reuse", "Reuse", "Full", "Reuse", "Reindex"]


def test_kshape_covers_reuse_after_a_reindex() -> None:
    assert [fact.mode for fact in facts("v41_kshape")][6:] == ["Full", "Reuse", "Reindex", "Reuse"]
    assert facts("v41_kshape")[9].index_source == 8
