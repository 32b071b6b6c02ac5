"""Requests with seeded random tokens, and the steps that run them as serving would.

A step is a phase over spans and then, where rows sample, the sampler: greedy, its tokens unused, as
the next tokens are the request's own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from deepinfer_compile.format.plan import EnginePlan
from deepinfer_compile.runtime.executor import Executor
from deepinfer_compile.runtime.request_rows import Span, fill_rows, set_pages

SEED = 0


@dataclass(frozen=True)
class Request:
    """All tokens of a request, and where the engine keeps it."""

    slot: int
    pages: tuple[int, ...]
    tokens: tuple[int, ...]

    def span(self, first: int, last: int) -> Span:
        return Span(self.slot, first, self.tokens[first:last])


@dataclass(frozen=True)
class Launch:
    """One step; `sampled` are the rows whose next token is chosen."""

    phase: str
    spans: tuple[Span, ...]
    sampled: tuple[int, ...]

    @property
    def rows(self) -> int:
        return sum(len(span.tokens) for span in self.spans)

    def parts(self) -> Iterator[tuple[str, int]]:
        """Phases that run, with their row counts."""
        yield self.phase, self.rows
        if self.sampled:
            yield "sample", len(self.sampled)

    def fill(self, executor: Executor) -> None:
        """Write the row arrays. Of the sampler's the others stay as loaded, which is greedy."""
        fill_rows(executor, self.spans)
        executor.rows["sample_row"][: len(self.sampled)] = np.asarray(self.sampled, dtype=np.int32)

    def run(self, executor: Executor) -> None:
        self.fill(executor)
        executor.forward(self.phase, self.rows)
        if self.sampled:
            executor.sample(len(self.sampled))


def make_requests(plan: EnginePlan, count: int, length: int) -> tuple[Request, ...]:
    """`count` requests of `length` random tokens, each in a slot and pages of its own."""
    pages = -(-length // plan.limits.page_size)
    requests = []
    for i in range(count):
        tokens = np.random.default_rng([SEED, i]).integers(0, plan.limits.vocab_size, length)
        own = range(1 + i * pages, 1 + (i + 1) * pages)
        requests.append(Request(1 + i, tuple(own), tuple(tokens.tolist())))
    return tuple(requests)


def prefill_steps(plan: EnginePlan, request: Request, length: int) -> tuple[Launch, ...]:
    """The first `length` tokens in chunks; the last row samples."""
    most = next(phase.max_rows for phase in plan.phases if phase.name == "prefill")
    steps = []
    for first in range(0, length, most):
        last = min(length, first + most)
        sampled = (last - first - 1,) if last == length else ()
        steps.append(Launch("prefill", (request.span(first, last),), sampled))
    return tuple(steps)


def decode_steps(requests: Sequence[Request], first: int, last: int) -> tuple[Launch, ...]:
    """The tokens at positions first..last-1 of all requests, a step for each."""
    rows = tuple(range(len(requests)))
    return tuple(
        Launch("decode", tuple(request.span(at, at + 1) for request in requests), rows)
        for at in range(first, last)
    )


def own_pages(executor: Executor, requests: Sequence[Request]) -> None:
    """Write the page table's rows of the requests."""
    for request in requests:
        set_pages(executor, request.slot, request.pages)
