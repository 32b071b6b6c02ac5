"""Slots and pages, given out and taken back."""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence
from dataclasses import replace

from deepinfer_compile.runtime.scheduler.prefixes import give_up, let_go
from deepinfer_compile.runtime.scheduler.state import Capacity, Load, Running, State, Waiting


def load(state: State) -> Load:
    """How full the engine is."""
    pages, kept = state.capacity.pages, state.prefixes
    usage = 1 - available(state) / pages if pages else 0.0
    return Load(
        running=len(state.running),
        waiting=len(state.waiting),
        page_usage=usage,
        preemptions=state.preemptions,
        prefix_queries=kept.asked,
        prefix_hits=kept.reused,
    )


def queued(state: State, waiting: Waiting) -> State:
    """A request waits, in its rank's place."""
    queue = list(state.waiting)
    insort(queue, waiting, key=lambda one: one.rank)
    return replace(state, waiting=tuple(queue))


def without(state: State, ids: set[int]) -> State:
    """These requests are gone, with all that they had."""
    gone = [s for s in state.running if s.request.id in ids]
    running = tuple(s for s in state.running if s.request.id not in ids)
    waiting = tuple(one for one in state.waiting if one.request.id not in ids)
    return released(replace(state, running=running, waiting=waiting), gone)


def available(state: State) -> int:
    """Pages that can be taken."""
    return len(state.free_pages) + len(state.prefixes.unused)


def taken(state: State, count: int) -> tuple[State, tuple[int, ...]]:
    """Free pages, or else such as are only kept."""
    free, pages = state.free_pages.without(count)
    kept = state.prefixes
    if count > len(pages):
        kept, more = give_up(kept, count - len(pages))
        pages = (*pages, *more)
    return replace(state, free_pages=free, prefixes=kept), pages


def pages_of(capacity: Capacity, tokens: int) -> int:
    """How many pages so many tokens need."""
    return -(-tokens // capacity.page_size)


def released(state: State, gone: Sequence[Running]) -> State:
    """Their slots and pages are free, but the shared pages are only let go."""
    free: list[int] = []
    kept = state.prefixes
    for s in gone:
        names = s.request.pages[: s.held]
        own = [p for p, name in zip(s.pages, names, strict=False) if kept.pages[name].number != p]
        free += [*own, *s.pages[s.held :]]
        kept = let_go(kept, names)
    return replace(
        state,
        free_slots=(*state.free_slots, *(s.slot for s in gone)),
        free_pages=state.free_pages.with_back(free),
        prefixes=kept,
    )
