"""All that a scheduler knows between two steps, as a value."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from deepinfer_compile.runtime.scheduler.free_list import FreeList
from deepinfer_compile.runtime.scheduler.prefixes import Prefixes, prefixes
from deepinfer_compile.runtime.scheduler.step import Kind, Work
from deepinfer_compile.runtime.scheduler.traffic import Request


class Preemption(Enum):
    """What becomes of a preempted request."""

    RECOMPUTE = "recompute"
    STOP = "stop"


@dataclass(frozen=True)
class Capacity:
    """What the engine holds; slot 0 and page 0 are padding's and not counted in. The slots after
    the requests' own hold `snapshots`."""

    requests: int
    snapshots: int
    pages: int
    page_size: int
    max_context: int
    prefill_rows: int
    decode_rows: int
    sample_rows: int
    eos_token_id: int


@dataclass(frozen=True)
class Waiting:
    """A request that has no slot. `known`: its tokens, with those generated before a preemption,
    the newest of which may not be committed."""

    request: Request
    arrival: int
    known: int
    reused: int = 0

    @property
    def rank(self) -> tuple[int, int]:
        return self.request.priority, self.arrival


class Running(NamedTuple):
    """An admitted request: `done` of its `known` tokens are planned to have gone through the
    model, the first `reused` of them for another request, those up to `prefilled` in prefill steps;
    these stop at `cuts`. Its first `held` pages are shared or may be. `admission` numbers
    admissions: it may be the second."""

    request: Request
    arrival: int
    admission: int
    slot: int
    pages: tuple[int, ...]
    done: int
    known: int
    prefilled: int
    held: int
    reused: int
    cuts: tuple[int, ...]

    @property
    def rank(self) -> tuple[int, int]:
        return self.request.priority, self.arrival

    @property
    def prefilling(self) -> bool:
        return self.done < self.prefilled

    def decoding(self, capacity: Capacity) -> bool:
        """It goes on by a token, as long as none ends it before its length does."""
        generated = self.known - self.request.prompt_len
        room = generated < self.request.max_tokens and self.known < capacity.max_context
        return room and not self.prefilling

    def after(self, work: Work) -> Running:
        """The step runs. Not `_replace`, which takes several times as long."""
        return Running(
            self.request,
            self.arrival,
            self.admission,
            self.slot,
            self.pages,
            self.done + work.count,
            self.known + work.samples,
            self.prefilled,
            self.held,
            self.reused,
            self.cuts,
        )


@dataclass(frozen=True)
class State:
    """`waiting` by rank, `running` in order of admission; `last` is the kind of the last step.
    `arrivals`, `admissions` and `preemptions` count them all."""

    capacity: Capacity
    preemption: Preemption
    waiting: tuple[Waiting, ...]
    running: tuple[Running, ...]
    free_slots: tuple[int, ...]
    free_pages: FreeList
    prefixes: Prefixes
    arrivals: int
    admissions: int
    preemptions: int
    last: Kind | None


@dataclass(frozen=True)
class Load:
    """Requests with a slot and without; the part of the pages that they hold, 0 to 1; preemptions
    so far; tokens of prompts that were looked for among the kept pages so far, and found there."""

    running: int
    waiting: int
    page_usage: float
    preemptions: int
    prefix_queries: int
    prefix_hits: int


def initial(capacity: Capacity, preemption: Preemption = Preemption.RECOMPUTE) -> State:
    """Nothing to do, everything free."""
    slots = tuple(range(1, capacity.requests + 1))
    pages = FreeList.of(range(1, capacity.pages + 1))
    places = range(capacity.requests + 1, capacity.requests + capacity.snapshots + 1)
    return State(capacity, preemption, (), (), slots, pages, prefixes(places), 0, 0, 0, None)


def idle(state: State) -> bool:
    return not state.waiting and not state.running
