"""Which rows run next: a pure function of the state and what happened.

    plan(state, events)   -> state, StepPlan      what to run, and requests that end without running
    commit(state, step, sampled) -> state, events tokens, each request's last one with its reason

No clock, no tensors, no randomness. A request is admitted, first come first served, when a slot and
all pages it can ever need are free: nothing is ever preempted, and a full pool cannot dead-lock.
Prefill and decode steps alternate while both have work, so neither starves. Every request ends with
exactly one event that has a reason.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum


class Finish(StrEnum):
    """Why a request ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    PROMPT_LENGTH_EXCEEDED = "prompt_length_exceeded"


class Kind(StrEnum):
    """The phase a step runs."""

    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True)
class Capacity:
    """What the engine holds; slot 0 and page 0 are padding's and not counted in."""

    requests: int
    pages: int
    page_size: int
    max_context: int
    prefill_rows: int
    decode_rows: int
    sample_rows: int
    eos_token_id: int


@dataclass(frozen=True)
class Request:
    """`max_tokens` bounds what is generated; `ignore_eos` goes on after the end token, but not
    after one of `stop_token_ids`."""

    id: int
    prompt: tuple[int, ...]
    max_tokens: int
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class Abort:
    """Stop a request wherever it is; unknown ids are ignored: it may just have ended."""

    id: int


@dataclass(frozen=True)
class Choice:
    """A sampled token. `top`: the most likely ones with their log probabilities, as many as asked
    for. `stops`: its text completes a stop string."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    stops: bool = False


@dataclass(frozen=True)
class Emitted:
    """A sampled token, or with `choice` None the end of a request that gets no more."""

    id: int
    choice: Choice | None
    finish: Finish | None


@dataclass(frozen=True)
class Running:
    """An admitted request: `done` of its `known` tokens have been through the model.

    Tokens are not kept: `last` is the newest, all that a decode row needs.
    """

    request: Request
    slot: int
    pages: tuple[int, ...]
    done: int
    known: int
    last: int

    @property
    def prefilling(self) -> bool:
        return self.done < len(self.request.prompt)


@dataclass(frozen=True)
class State:
    """`running` in order of admission; `last` is the kind of the last step."""

    capacity: Capacity
    waiting: tuple[Request, ...]
    running: tuple[Running, ...]
    free_slots: tuple[int, ...]
    free_pages: tuple[int, ...]
    last: Kind | None


@dataclass(frozen=True)
class Work:
    """Rows of one request in a step; `samples`: the last row is sampled from."""

    id: int
    slot: int
    position: int
    tokens: tuple[int, ...]
    samples: bool


@dataclass(frozen=True)
class StepPlan:
    """`kind` None: nothing to run. `admitted`: slot -> pages, new in this step."""

    kind: Kind | None
    work: tuple[Work, ...]
    admitted: Mapping[int, tuple[int, ...]]
    ended: tuple[Emitted, ...]


def initial(capacity: Capacity) -> State:
    """Nothing to do, everything free."""
    slots = tuple(range(1, capacity.requests + 1))
    return State(capacity, (), (), slots, tuple(range(1, capacity.pages + 1)), None)


def idle(state: State) -> bool:
    return not state.waiting and not state.running


def plan(state: State, events: Sequence[Request | Abort]) -> tuple[State, StepPlan]:
    """Take new requests and aborts in, admit what fits, choose the next step."""
    ended: list[Emitted] = []
    for event in events:
        state = (
            _abort(state, event.id, ended)
            if isinstance(event, Abort)
            else _enqueue(state, event, ended)
        )
    before = {sequence.slot for sequence in state.running}
    state = _admit(state)
    admitted = {s.slot: s.pages for s in state.running if s.slot not in before}
    kind = _next_kind(state)
    work = _prefill_work(state) if kind is Kind.PREFILL else ()
    if kind is Kind.DECODE:
        work = _decode_work(state)
    return replace(state, last=kind), StepPlan(kind, work, admitted, tuple(ended))


def commit(
    state: State, step: StepPlan, sampled: Mapping[int, Choice]
) -> tuple[State, tuple[Emitted, ...]]:
    """The step ran: account for its rows and hand out its tokens."""
    ran = {work.id: work for work in step.work}
    events: list[Emitted] = []
    kept: list[Running] = []
    for sequence in state.running:
        work = ran.get(sequence.request.id)
        if work is None:
            kept.append(sequence)
            continue
        sequence = replace(sequence, done=sequence.done + len(work.tokens))
        finish = None
        if work.samples:
            choice = sampled[work.id]
            sequence = replace(sequence, known=sequence.known + 1, last=choice.token)
            finish = Finish.STOP if choice.stops else _finish(state.capacity, sequence)
            events.append(Emitted(work.id, choice, finish))
        if finish is None:
            kept.append(sequence)
        else:
            state = _released(state, sequence)
    return replace(state, running=tuple(kept)), tuple(events)


def _enqueue(state: State, request: Request, ended: list[Emitted]) -> State:
    most = state.capacity.max_context
    if len(request.prompt) >= most or _pages_for(state.capacity, request) > state.capacity.pages:
        ended.append(Emitted(request.id, None, Finish.PROMPT_LENGTH_EXCEEDED))
        return state
    assert request.prompt, "the caller refuses empty prompts"
    assert request.max_tokens >= 1, request
    return replace(state, waiting=(*state.waiting, request))


def _abort(state: State, id: int, ended: list[Emitted]) -> State:
    waiting = tuple(r for r in state.waiting if r.id != id)
    gone = [s for s in state.running if s.request.id == id]
    if len(waiting) < len(state.waiting) or gone:
        ended.append(Emitted(id, None, Finish.ABORT))
    for sequence in gone:
        state = _released(state, sequence)
    running = tuple(s for s in state.running if s.request.id != id)
    return replace(state, waiting=waiting, running=running)


def _admit(state: State) -> State:
    """First come first served: a big request is not overtaken by small ones for ever."""
    capacity = state.capacity
    limit = min(capacity.requests, capacity.decode_rows, capacity.sample_rows)
    while state.waiting and state.free_slots and len(state.running) < limit:
        request = state.waiting[0]
        need = _pages_for(capacity, request)
        if need > len(state.free_pages):
            break
        slot, pages = state.free_slots[0], state.free_pages[:need]
        sequence = Running(request, slot, pages, 0, len(request.prompt), request.prompt[-1])
        state = replace(
            state,
            waiting=state.waiting[1:],
            running=(*state.running, sequence),
            free_slots=state.free_slots[1:],
            free_pages=state.free_pages[need:],
        )
    return state


def _pages_for(capacity: Capacity, request: Request) -> int:
    """All pages the request can fill. Its last token is sampled, never stored."""
    tokens = min(len(request.prompt) + request.max_tokens - 1, capacity.max_context)
    return -(-tokens // capacity.page_size)


def _next_kind(state: State) -> Kind | None:
    prefilling = any(s.prefilling for s in state.running)
    decoding = any(not s.prefilling for s in state.running)
    if prefilling and (not decoding or state.last is not Kind.PREFILL):
        return Kind.PREFILL
    return Kind.DECODE if decoding else None


def _prefill_work(state: State) -> tuple[Work, ...]:
    """Prompts in order of admission share the step's rows."""
    work: list[Work] = []
    rows, samples = state.capacity.prefill_rows, state.capacity.sample_rows
    for sequence in state.running:
        if not sequence.prefilling or rows == 0 or samples == 0:
            continue
        prompt = sequence.request.prompt
        tokens = prompt[sequence.done : sequence.done + rows]
        last = sequence.done + len(tokens) == len(prompt)
        work.append(Work(sequence.request.id, sequence.slot, sequence.done, tokens, last))
        rows -= len(tokens)
        samples -= last
    return tuple(work)


def _decode_work(state: State) -> tuple[Work, ...]:
    """One row per running request; admission keeps their number within a step's rows."""
    return tuple(
        Work(s.request.id, s.slot, s.done, (s.last,), True)
        for s in state.running
        if not s.prefilling
    )


def _finish(capacity: Capacity, sequence: Running) -> Finish | None:
    request = sequence.request
    ends = sequence.last == capacity.eos_token_id and not request.ignore_eos
    if ends or sequence.last in request.stop_token_ids:
        return Finish.STOP
    generated = sequence.known - len(request.prompt)
    if generated >= request.max_tokens or sequence.known >= capacity.max_context:
        return Finish.LENGTH
    return None


def _released(state: State, sequence: Running) -> State:
    return replace(
        state,
        free_slots=(*state.free_slots, sequence.slot),
        free_pages=(*state.free_pages, *sequence.pages),
    )
