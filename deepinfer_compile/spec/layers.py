"""Per-layer facts derived from the source maps (model_v41.md section 2).

A source list `S` serves layer `l` from `max{s in S : s <= l}`; layers before the first source, and
window-only layers, have none. Draft layers never take part.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from deepinfer_compile.spec.schema import Model


@dataclass(frozen=True)
class LayerFacts:
    """What one backbone layer owns and reads. Sources are layer indices; None: not used here."""

    index: int
    ratio: int
    kv_source: int | None
    index_k_source: int | None
    index_source: int | None
    candidate_source: int | None
    engram: bool

    @property
    def owns_kv(self) -> bool:
        """Compresses its own tokens into KV entries."""
        return self.kv_source == self.index

    @property
    def owns_index_k(self) -> bool:
        """Projects index keys from its own latents."""
        return self.index_k_source == self.index

    @property
    def selects(self) -> bool:
        """Computes a top-k list; other compressed layers reuse the last one."""
        return self.index_source == self.index

    @property
    def selects_candidates(self) -> bool:
        """Also picks the candidate blocks later index sources are confined to."""
        return self.candidate_source == self.index

    @property
    def mode(self) -> str:
        """The schedule's word for this layer: SWA, Full, Reindex or Reuse."""
        if self.ratio == 0:
            return "SWA"
        if self.owns_kv:
            return "Full"
        return "Reindex" if self.selects else "Reuse"


def nearest_source(sources: Sequence[int], layer: int) -> int | None:
    """The last source at or before `layer`; `sources` ascending."""
    return max((s for s in sources if s <= layer), default=None)


def layer_facts(model: Model) -> tuple[LayerFacts, ...]:
    """One `LayerFacts` per backbone layer, in order. The model must have passed `spec/rules.py`."""
    compression, indexer = model.compression, model.indexer
    index_k_sources = compression.index_k_source_layer_ids or compression.kv_source_layer_ids
    facts = []
    for index in range(model.num_hidden_layers):
        ratio = compression.ratios[index]
        index_source = nearest_source(compression.index_source_layer_ids, index) if ratio else None
        candidate = indexer.candidate_source_layer_id
        confined = index_source is not None and index_source >= candidate
        facts.append(
            LayerFacts(
                index=index,
                ratio=ratio,
                kv_source=nearest_source(compression.kv_source_layer_ids, index) if ratio else None,
                index_k_source=nearest_source(index_k_sources, index) if ratio else None,
                index_source=index_source,
                candidate_source=candidate if confined else None,
                engram=index in model.engram.engram_layer_ids,
            )
        )
    return tuple(facts)
