"""Runs one request by hand: any chunks, any slot and pages, so that tests can compare bits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from deepinfer_compile.runtime.executor import Executor
from deepinfer_compile.runtime.request_rows import Span, fill_rows, set_pages
from deepinfer_compile.runtime.snapshot import Snapshot, restore_state, save_state


@dataclass
class Solo:
    """A request alone in the engine. `known` are all its tokens, `done` those fed."""

    executor: Executor
    known: list[int]
    slot: int = 1
    pages: tuple[int, ...] = ()
    done: int = 0
    logprobs: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        if not self.pages:
            limits = self.executor.plan.limits
            self.pages = tuple(range(1, limits.max_context // limits.page_size + 1))
        set_pages(self.executor, self.slot, self.pages)

    def feed(self, chunks: Sequence[int], phase: str = "prefill") -> Solo:
        """Run the next tokens in chunks of these sizes."""
        for size in chunks:
            tokens = tuple(self.known[self.done : self.done + size])
            assert len(tokens) == size
            fill_rows(self.executor, [Span(self.slot, self.done, tokens)])
            self.executor.forward(phase, size)
            self.done += size
        return self

    def sample(self, row: int) -> int:
        """The most likely token after the last token fed, which was row `row` of its step."""
        arrays = self.executor.rows
        arrays["sample_row"][0] = row
        arrays["temperature"][0] = 0
        arrays["top_count"][0] = 0
        samples = self.executor.sample(1)
        self.known.append(int(samples.token[0]))
        self.logprobs.append(float(samples.logprob[0]))
        return self.known[-1]

    def generate(self, count: int, last_chunk: int) -> list[int]:
        """`count` tokens, the first from the prompt's last chunk, the others by decode steps."""
        out = [self.sample(last_chunk - 1)]
        while len(out) < count:
            self.feed([1], "decode")
            out.append(self.sample(0))
        return out

    def save(self) -> Snapshot:
        return save_state(self.executor, self.slot, self.pages, self.done)

    def moved(self, snapshot: Snapshot, slot: int, pages: tuple[int, ...]) -> Solo:
        """The same request continued from `snapshot` elsewhere, in memory full of rubbish."""
        poison(self.executor)
        restore_state(self.executor, snapshot, slot, pages)
        known = self.known[: snapshot.length]
        return Solo(self.executor, known, slot, pages, snapshot.length)


def poison(executor: Executor) -> None:
    """Fill all state, arena and row arrays with bytes that are NaN in every float format."""
    for area in executor.memory.values():
        area[:] = 0xFF
    for array in executor.rows.values():
        array[...] = np.zeros((), dtype=array.dtype)  # padding's slot 0, page 0, token 0


def chunks_of(total: int, size: int) -> list[int]:
    """`total` in chunks of `size`, the rest last."""
    return [size] * (total // size) + [total % size] * (total % size > 0)
