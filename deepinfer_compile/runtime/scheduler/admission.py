"""Who gets a slot and pages, and who has to give them up."""

from __future__ import annotations

from dataclasses import replace

from deepinfer_compile.runtime.scheduler.pool import (
    available,
    pages_of,
    queued,
    released,
    taken,
    without,
)
from deepinfer_compile.runtime.scheduler.prefixes import common, hold, match, restored
from deepinfer_compile.runtime.scheduler.state import Capacity, Preemption, Running, State, Waiting
from deepinfer_compile.runtime.scheduler.step import Copy
from deepinfer_compile.runtime.scheduler.traffic import Emitted, Finish, Request


def enqueue(state: State, request: Request, ended: list[Emitted]) -> State:
    """A new request waits, or ends if it could never run."""
    capacity = state.capacity
    most = min(request.prompt_len + request.max_tokens - 1, capacity.max_context)
    if request.prompt_len >= capacity.max_context or pages_of(capacity, most) > capacity.pages:
        ended.append(Emitted(request.id, None, Finish.PROMPT_LENGTH_EXCEEDED))
        return state
    assert request.prompt_len >= 1, "the caller refuses empty prompts"
    assert request.max_tokens >= 1, request
    assert capacity.snapshots or not request.pages, "what is shared cannot be gone on from"
    state = replace(state, arrivals=state.arrivals + 1)
    return queued(state, Waiting(request, state.arrivals, request.prompt_len))


def abort(state: State, id: int, ended: list[Emitted]) -> State:
    """A request ends, if it has not."""
    everyone: tuple[Running | Waiting, ...] = (*state.running, *state.waiting)
    found = [one for one in everyone if one.request.id == id]
    if not found:
        return state
    ended.append(Emitted(id, None, Finish.ABORT, reused=found[0].reused))
    return without(state, {id})


def admit(state: State, ended: list[Emitted]) -> tuple[State, tuple[Copy, ...]]:
    """By rank: a big request is not overtaken by small ones for ever. One of a better priority
    takes the place of worse ones, if that is enough for it. The copies restore what slots held
    after the pages that requests share."""
    copies: list[Copy] = []
    while state.waiting:
        head = state.waiting[0]
        if (cut := _in_work(state, head)) is not None:
            return cut, tuple(copies)
        displaced: list[Emitted] = []
        made = state
        while (admitted := _admitted(made, head, copies)) is None:
            worst = _worst(made)
            if worst is None or worst.request.priority <= head.request.priority:
                return state, tuple(copies)
            made = _preempted(made, worst, displaced)
        ended += displaced
        state = admitted
    return state, tuple(copies)


def _in_work(state: State, head: Waiting) -> State | None:
    """If a running request is yet to compute pages that `head` begins with: the state in which it
    stops at their end, for `head` to go on from there."""
    if not any(s.prefilling for s in state.running):
        return None
    size = state.capacity.page_size
    names = _shareable(state.capacity, head)
    usable = match(state.prefixes, names).usable
    for s in state.running:
        end = common(names, s.request.pages) * size if s.prefilling else 0
        if end > max(s.done, usable * size):
            cuts = tuple(sorted({*s.cuts, end}))
            running = tuple(s._replace(cuts=cuts) if one is s else one for one in state.running)
            return replace(state, running=running)
    return None


def _shareable(capacity: Capacity, one: Waiting) -> tuple[bytes, ...]:
    """The full pages of its prompt that end before its last token, which has to run."""
    return one.request.pages[: (one.known - 1) // capacity.page_size]


def _admitted(state: State, head: Waiting, copies: list[Copy]) -> State | None:
    """With a slot and the pages of its tokens, shared ones first; None if there are too few. A
    page for every running request stays free: what is admitted is not preempted at once."""
    capacity, request = state.capacity, head.request
    if len(state.running) >= min(capacity.requests, capacity.decode_rows, capacity.sample_rows):
        return None
    names = _shareable(capacity, head)
    found = match(state.prefixes, names)
    held = names[: found.usable]
    need = pages_of(capacity, head.known) - len(held)
    if need + len(state.running) > available(state) - found.unused:
        return None
    made = replace(state, prefixes=hold(state.prefixes, held))
    shared = tuple(made.prefixes.pages[name].number for name in held)
    made, pages = taken(made, need)
    slot, *rest = made.free_slots
    kept = made.prefixes
    if held:
        kept, place = restored(kept, held[-1])
        copies.append(Copy(place, slot))
    reused = len(held) * capacity.page_size
    if request.pages:
        kept = replace(kept, asked=kept.asked + head.known, reused=kept.reused + reused)
    cuts = {count for count in (found.shared, len(names)) if count > found.usable}
    sequence = Running(
        request=request,
        arrival=head.arrival,
        admission=made.admissions,
        slot=slot,
        pages=(*shared, *pages),
        done=reused,
        known=head.known,
        prefilled=head.known,
        held=len(held),
        reused=reused,
        cuts=tuple(count * capacity.page_size for count in sorted(cuts)),
    )
    return replace(
        made,
        waiting=tuple(one for one in made.waiting if one is not head),
        running=(*made.running, sequence),
        free_slots=tuple(rest),
        prefixes=kept,
        admissions=made.admissions + 1,
    )


def _worst(state: State) -> Running | None:
    return max(state.running, key=lambda s: s.rank, default=None)


def _preempted(state: State, victim: Running, ended: list[Emitted]) -> State:
    running = tuple(s for s in state.running if s is not victim)
    state = replace(state, running=running, preemptions=state.preemptions + 1)
    state = released(state, [victim])
    if state.preemption is Preemption.RECOMPUTE:
        waiting = Waiting(victim.request, victim.arrival, victim.known, victim.reused)
        return queued(state, waiting)
    finish = Finish.INSUFFICIENT_SYSTEM_RESOURCE
    ended.append(Emitted(victim.request.id, None, finish, reused=victim.reused))
    return state


def with_pages(state: State, ended: list[Emitted]) -> State:
    """Every decoding request has the page of its next row, or was preempted for a better one."""
    size = state.capacity.page_size
    full = [s for s in state.running if s.done == len(s.pages) * size]
    short = [s for s in full if s.decoding(state.capacity)]
    for sequence in sorted(short, key=lambda s: s.rank):
        while not available(state) and _runs(state, sequence):
            victim = _worst(state)
            assert victim is not None
            state = _preempted(state, victim, ended)
        if _runs(state, sequence):
            state, more = taken(state, 1)
            longer = sequence._replace(pages=(*sequence.pages, *more))
            running = tuple(longer if s is sequence else s for s in state.running)
            state = replace(state, running=running)
    return state


def _runs(state: State, sequence: Running) -> bool:
    return any(s is sequence for s in state.running)
