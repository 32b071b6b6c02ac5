"""Sizes of caches and bounds of a step, derived from the spec.

A ring holds what one position reads, itself included, plus room for drafts that may be rejected.
Slot 0 and page 0 belong to padding rows.
"""

from __future__ import annotations

from dataclasses import dataclass

from deepinfer_compile.spec.load import ModelSpec


@dataclass(frozen=True)
class Dimensions:
    spec: ModelSpec

    @property
    def request_slots(self) -> int:
        return self.spec.engine.max_requests + 1

    @property
    def snapshots(self) -> int:
        """Slots after the requests': what one held at the end of a prefix that others may share."""
        engine = self.spec.engine
        asked = engine.prefix_snapshots
        return 2 * engine.max_requests if asked is None else asked

    @property
    def slots(self) -> int:
        return self.request_slots + self.snapshots

    @property
    def pages_per_request(self) -> int:
        return -(-self.spec.engine.max_context // self.spec.engine.page_size)

    @property
    def pages(self) -> int:
        engine = self.spec.engine
        if engine.cache_tokens is not None:
            return -(-engine.cache_tokens // engine.page_size) + 1
        return engine.max_requests * self.pages_per_request + 1

    @property
    def window_ring(self) -> int:
        return self.spec.model.attention.sliding_window + self.spec.engine.draft_len

    @property
    def history_ring(self) -> int:
        return self.spec.model.engram.engram_max_ngram_size + self.spec.engine.draft_len

    def tail_ring(self, ratio: int) -> int:
        return ratio + self.spec.engine.draft_len

    def page_entries(self, ratio: int) -> int:
        return self.spec.engine.page_size // ratio

    def max_rows(self, phase: str) -> int:
        """The bound of R. A probes engine may sample from every row of a prefill chunk."""
        engine = self.spec.engine
        if phase == "prefill":
            return engine.prefill_chunk
        if phase == "sample" and engine.probes:
            return max(engine.prefill_chunk, engine.max_rows)
        return engine.max_rows

    @property
    def hidden_rows(self) -> int:
        """Rows of the buffer between the forward phases and `sample`."""
        return max(self.spec.engine.prefill_chunk, self.spec.engine.max_rows)
