"""A step is planned from the state, and committed to it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from deepinfer_compile.runtime.scheduler.admission import abort, admit, enqueue, with_pages
from deepinfer_compile.runtime.scheduler.pool import without
from deepinfer_compile.runtime.scheduler.prefixes import hold, saved
from deepinfer_compile.runtime.scheduler.state import Capacity, Running, State, Waiting
from deepinfer_compile.runtime.scheduler.step import Copy, Grown, Kind, StepPlan, Work
from deepinfer_compile.runtime.scheduler.traffic import (
    Abort,
    Choice,
    Emitted,
    Failure,
    Finish,
    Request,
)


def plan(state: State, events: Sequence[Request | Abort]) -> tuple[State, StepPlan]:
    """Take new requests and aborts in, admit what fits, choose the next step."""
    ended: list[Emitted] = []
    for event in events:
        state = (
            abort(state, event.id, ended)
            if isinstance(event, Abort)
            else enqueue(state, event, ended)
        )
    had = {s.admission: len(s.pages) for s in state.running}
    state, copies = admit(state, ended)
    kind = _next_kind(state)
    if kind is Kind.DECODE:
        state = with_pages(state, ended)
        kind = _next_kind(state)  # those that decode may all have been preempted
    work = _work(state, kind)
    firsts = [(s, had.get(s.admission, 0)) for s in state.running]
    grown = tuple(Grown(s.slot, n, s.pages[n:]) for s, n in firsts if n < len(s.pages))
    state = _advanced(replace(state, last=kind), work)
    state, kept = _shared(state, work) if kind is Kind.PREFILL else (state, ())
    return state, StepPlan(kind, work, grown, copies, kept, tuple(ended))


def commit(
    state: State, step: StepPlan, sampled: Mapping[int, Choice | Failure]
) -> tuple[State, tuple[Emitted, ...]]:
    """The step ran: hand out the tokens of the requests that have not ended meanwhile."""
    alive: dict[int, Running | Waiting] = {s.request.id: s for s in state.running}
    for one in state.waiting:
        alive[one.request.id] = one
    events: list[Emitted] = []
    gone: set[int] = set()
    for work in step.work:
        found = alive.get(work.id)
        if found is None or not work.samples:
            continue
        choice = sampled[work.id]
        if isinstance(choice, Failure):
            event = Emitted(work.id, None, Finish.GRAMMAR, choice.error, found.reused)
        else:
            finish = _finish(state.capacity, found.request, work.known, choice)
            event = Emitted(work.id, choice, finish, "", found.reused)
        events.append(event)
        if event.finish is not None:
            gone.add(work.id)
    return (without(state, gone) if gone else state), tuple(events)


def _next_kind(state: State) -> Kind | None:
    prefilling = any(s.prefilling for s in state.running)
    decoding = any(s.decoding(state.capacity) for s in state.running)
    if prefilling and (not decoding or state.last is not Kind.PREFILL):
        return Kind.PREFILL
    return Kind.DECODE if decoding else None


def _work(state: State, kind: Kind | None) -> tuple[Work, ...]:
    match kind:
        case Kind.PREFILL:
            return _prefill_work(state)
        case Kind.DECODE:
            return _decode_work(state)
        case None:
            return ()


def _prefill_work(state: State) -> tuple[Work, ...]:
    """Prompts in order of admission share the step's rows."""
    work: list[Work] = []
    rows, samples = state.capacity.prefill_rows, state.capacity.sample_rows
    for sequence in state.running:
        if not sequence.prefilling or rows == 0 or samples == 0:
            continue
        stop = next((cut for cut in sequence.cuts if cut > sequence.done), sequence.prefilled)
        count = min(rows, stop - sequence.done)
        last = sequence.done + count == sequence.prefilled
        work.append(Work(sequence.request.id, sequence.slot, sequence.done, count, last))
        rows -= count
        samples -= last
    return tuple(work)


def _decode_work(state: State) -> tuple[Work, ...]:
    """One row per running request; admission keeps their number within a step's rows."""
    return tuple(
        Work(s.request.id, s.slot, s.done, 1, True)
        for s in state.running
        if s.decoding(state.capacity)
    )


def _advanced(state: State, work: Sequence[Work]) -> State:
    """As if the rows had run, and every token continued its request."""
    ran = {one.id: one for one in work}
    running = tuple(
        s if (one := ran.get(s.request.id)) is None else s.after(one) for s in state.running
    )
    return replace(state, running=running)


def _shared(state: State, work: Sequence[Work]) -> tuple[State, tuple[Copy, ...]]:
    """Full pages of prompts that a prefill step completes are kept for others, with a snapshot
    where a request stopped for it."""
    ran = {one.id for one in work}
    kept, copies = state.prefixes, []
    running: list[Running] = []
    for s in state.running:
        names = s.request.pages[s.held : s.done // state.capacity.page_size]
        if s.request.id in ran and names:
            held = s.held + len(names)
            kept = hold(kept, names, s.pages[s.held : held])
            s = s._replace(held=held)
        if s.request.id in ran and s.done in s.cuts:
            kept, place = saved(kept, s.request.pages[s.done // state.capacity.page_size - 1])
            copies.append(Copy(s.slot, place))
        running.append(s)
    return replace(state, running=tuple(running), prefixes=kept), tuple(copies)


def _finish(capacity: Capacity, request: Request, known: int, choice: Choice) -> Finish | None:
    ends = choice.token == capacity.eos_token_id and not request.ignore_eos
    if choice.stops or ends or choice.token in request.stop_token_ids:
        return Finish.STOP
    generated = known - request.prompt_len
    if generated >= request.max_tokens or known >= capacity.max_context:
        return Finish.LENGTH
    return None
