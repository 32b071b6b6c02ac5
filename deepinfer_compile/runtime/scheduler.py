"""Which rows run next: a pure function of the state and what happened.

    plan(state, events)   -> state, StepPlan      what to run, and requests that end without running
    commit(state, step, sampled) -> state, events tokens, each request's last one with its reason

No clock, no tensors, no randomness, and no tokens but those just sampled: a request is its length.
Requests have a rank, by priority, then by arrival. The best ranked waiting one is admitted when a
slot and the pages of its tokens are free; pages for what it generates are taken one at a time. When
none is left, the worst ranked running request is preempted: it waits again and all its tokens go
through the model once more, or it ends (`Preemption`). The best ranked request is never preempted
and the pool holds any one request, so a full pool cannot dead-lock. Prefill and decode steps
alternate while both have work, so neither starves. Every request ends with exactly one event that
has a reason.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum, StrEnum


class Finish(StrEnum):
    """Why a request ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    PROMPT_LENGTH_EXCEEDED = "prompt_length_exceeded"
    INSUFFICIENT_SYSTEM_RESOURCE = "insufficient_system_resource"
    GRAMMAR = "xgrammar runtime errors or timeout"  # DeepInfer's words, whatever the library


class Kind(StrEnum):
    """The phase a step runs."""

    PREFILL = "prefill"
    DECODE = "decode"


class Preemption(Enum):
    """What becomes of a preempted request."""

    RECOMPUTE = "recompute"
    STOP = "stop"


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
    after one of `stop_token_ids`. A smaller `priority` is served first."""

    id: int
    prompt_len: int
    max_tokens: int
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    priority: int = 0


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
class Failure:
    """In the place of a token: the request's grammar allows none, and why."""

    error: str


@dataclass(frozen=True)
class Emitted:
    """A sampled token, or with `choice` None the end of a request that gets no more."""

    id: int
    choice: Choice | None
    finish: Finish | None
    error: str = ""


@dataclass(frozen=True)
class Waiting:
    """A request that has no slot. `known`: its tokens, with those generated before a preemption."""

    request: Request
    arrival: int
    known: int

    @property
    def rank(self) -> tuple[int, int]:
        return self.request.priority, self.arrival


@dataclass(frozen=True)
class Running:
    """An admitted request: `done` of its `known` tokens have been through the model, the first
    `prefilled` of them in prefill steps. `admission` numbers admissions: it may be the second."""

    request: Request
    arrival: int
    admission: int
    slot: int
    pages: tuple[int, ...]
    done: int
    known: int
    prefilled: int

    @property
    def rank(self) -> tuple[int, int]:
        return self.request.priority, self.arrival

    @property
    def prefilling(self) -> bool:
        return self.done < self.prefilled

    def after(self, work: Work) -> Running:
        """The step ran. Not `dataclasses.replace`: this is most of the host's time in a step."""
        return Running(
            self.request,
            self.arrival,
            self.admission,
            self.slot,
            self.pages,
            self.done + work.count,
            self.known + work.samples,
            self.prefilled,
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
    free_pages: tuple[int, ...]
    arrivals: int
    admissions: int
    preemptions: int
    last: Kind | None


@dataclass(frozen=True)
class Load:
    """Requests with a slot and without; the used part of the pages, 0 to 1; preemptions so far."""

    running: int
    waiting: int
    page_usage: float
    preemptions: int


@dataclass(frozen=True)
class Work:
    """Rows of one request in a step: `count` of its tokens from `position` on. `samples`: the last
    row is sampled from."""

    id: int
    slot: int
    position: int
    count: int
    samples: bool


@dataclass(frozen=True)
class Grown:
    """Pages that a slot's request gets: entries `first` and on of its page table. From 0 on: the
    request is new in the slot."""

    slot: int
    first: int
    pages: tuple[int, ...]


@dataclass(frozen=True)
class StepPlan:
    """`kind` None: nothing to run."""

    kind: Kind | None
    work: tuple[Work, ...]
    grown: tuple[Grown, ...]
    ended: tuple[Emitted, ...]


def initial(capacity: Capacity, preemption: Preemption = Preemption.RECOMPUTE) -> State:
    """Nothing to do, everything free."""
    slots = tuple(range(1, capacity.requests + 1))
    pages = tuple(range(1, capacity.pages + 1))
    return State(capacity, preemption, (), (), slots, pages, 0, 0, 0, None)


def idle(state: State) -> bool:
    return not state.waiting and not state.running


def load(state: State) -> Load:
    """How full the engine is."""
    pages = state.capacity.pages
    usage = 1 - len(state.free_pages) / pages if pages else 0.0
    return Load(len(state.running), len(state.waiting), usage, state.preemptions)


def plan(state: State, events: Sequence[Request | Abort]) -> tuple[State, StepPlan]:
    """Take new requests and aborts in, admit what fits, choose the next step."""
    ended: list[Emitted] = []
    for event in events:
        state = (
            _abort(state, event.id, ended)
            if isinstance(event, Abort)
            else _enqueue(state, event, ended)
        )
    had = {s.admission: len(s.pages) for s in state.running}
    state = _admit(state, ended)
    kind = _next_kind(state)
    work = _prefill_work(state) if kind is Kind.PREFILL else ()
    if kind is Kind.DECODE:
        state = _with_pages(state, ended)
        work = _decode_work(state)
    firsts = [(s, had.get(s.admission, 0)) for s in state.running]
    grown = tuple(Grown(s.slot, n, s.pages[n:]) for s, n in firsts if n < len(s.pages))
    return replace(state, last=kind), StepPlan(kind, work, grown, tuple(ended))


def commit(
    state: State, step: StepPlan, sampled: Mapping[int, Choice | Failure]
) -> tuple[State, tuple[Emitted, ...]]:
    """The step ran: account for its rows and hand out its tokens."""
    ran = {work.id: work for work in step.work}
    events: list[Emitted] = []
    kept: list[Running] = []
    gone: list[Running] = []
    for sequence in state.running:
        work = ran.get(sequence.request.id)
        if work is None:
            kept.append(sequence)
            continue
        sequence = sequence.after(work)
        finish = None
        if work.samples:
            choice = sampled[work.id]
            if isinstance(choice, Failure):
                events.append(Emitted(work.id, None, Finish.GRAMMAR, choice.error))
                gone.append(sequence)
                continue
            finish = _finish(state.capacity, sequence, choice)
            events.append(Emitted(work.id, choice, finish))
        (kept if finish is None else gone).append(sequence)
    return _released(replace(state, running=tuple(kept)), gone), tuple(events)


def _enqueue(state: State, request: Request, ended: list[Emitted]) -> State:
    capacity = state.capacity
    most = min(request.prompt_len + request.max_tokens - 1, capacity.max_context)
    if request.prompt_len >= capacity.max_context or _pages(capacity, most) > capacity.pages:
        ended.append(Emitted(request.id, None, Finish.PROMPT_LENGTH_EXCEEDED))
        return state
    assert request.prompt_len >= 1, "the caller refuses empty prompts"
    assert request.max_tokens >= 1, request
    state = replace(state, arrivals=state.arrivals + 1)
    return _queued(state, Waiting(request, state.arrivals, request.prompt_len))


def _queued(state: State, waiting: Waiting) -> State:
    queue = list(state.waiting)
    insort(queue, waiting, key=lambda one: one.rank)
    return replace(state, waiting=tuple(queue))


def _abort(state: State, id: int, ended: list[Emitted]) -> State:
    waiting = tuple(one for one in state.waiting if one.request.id != id)
    gone = [s for s in state.running if s.request.id == id]
    if len(waiting) < len(state.waiting) or gone:
        ended.append(Emitted(id, None, Finish.ABORT))
    running = tuple(s for s in state.running if s.request.id != id)
    return _released(replace(state, waiting=waiting, running=running), gone)


def _admit(state: State, ended: list[Emitted]) -> State:
    """By rank: a big request is not overtaken by small ones for ever. One of a better priority
    takes the place of worse ones, if that is enough for it."""
    while state.waiting:
        head = state.waiting[0]
        displaced: list[Emitted] = []
        made = state
        while not _fits(made, head):
            worst = _worst(made)
            if worst is None or worst.request.priority <= head.request.priority:
                return state
            made = _preempted(made, worst, displaced)
        ended += displaced
        state = _admitted(made, head)
    return state


def _admitted(state: State, head: Waiting) -> State:
    need = _pages(state.capacity, head.known)
    sequence = Running(
        request=head.request,
        arrival=head.arrival,
        admission=state.admissions,
        slot=state.free_slots[0],
        pages=state.free_pages[:need],
        done=0,
        known=head.known,
        prefilled=head.known,
    )
    return replace(
        state,
        waiting=tuple(one for one in state.waiting if one is not head),
        running=(*state.running, sequence),
        free_slots=state.free_slots[1:],
        free_pages=state.free_pages[need:],
        admissions=state.admissions + 1,
    )


def _fits(state: State, waiting: Waiting) -> bool:
    """A page for every running request stays free: what is admitted is not preempted at once."""
    capacity = state.capacity
    limit = min(capacity.requests, capacity.decode_rows, capacity.sample_rows)
    need = _pages(capacity, waiting.known) + len(state.running)
    return len(state.running) < limit and need <= len(state.free_pages)


def _worst(state: State) -> Running | None:
    return max(state.running, key=lambda s: s.rank, default=None)


def _preempted(state: State, victim: Running, ended: list[Emitted]) -> State:
    running = tuple(s for s in state.running if s is not victim)
    state = replace(state, running=running, preemptions=state.preemptions + 1)
    state = _released(state, [victim])
    if state.preemption is Preemption.RECOMPUTE:
        return _queued(state, Waiting(victim.request, victim.arrival, victim.known))
    ended.append(Emitted(victim.request.id, None, Finish.INSUFFICIENT_SYSTEM_RESOURCE))
    return state


def _with_pages(state: State, ended: list[Emitted]) -> State:
    """Every decoding request has the page of its next row, or was preempted for a better one."""
    size = state.capacity.page_size
    short = [s for s in state.running if s.done == len(s.pages) * size and not s.prefilling]
    for sequence in sorted(short, key=lambda s: s.rank):
        while not state.free_pages and _runs(state, sequence):
            victim = _worst(state)
            assert victim is not None
            state = _preempted(state, victim, ended)
        if _runs(state, sequence):
            longer = replace(sequence, pages=(*sequence.pages, state.free_pages[0]))
            running = tuple(longer if s is sequence else s for s in state.running)
            state = replace(state, running=running, free_pages=state.free_pages[1:])
    return state


def _runs(state: State, sequence: Running) -> bool:
    return any(s is sequence for s in state.running)


def _pages(capacity: Capacity, tokens: int) -> int:
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
        count = min(rows, sequence.prefilled - sequence.done)
        last = sequence.done + count == sequence.prefilled
        work.append(Work(sequence.request.id, sequence.slot, sequence.done, count, last))
        rows -= count
        samples -= last
    return tuple(work)


def _decode_work(state: State) -> tuple[Work, ...]:
    """One row per running request; admission keeps their number within a step's rows."""
    return tuple(
        Work(s.request.id, s.slot, s.done, 1, True) for s in state.running if not s.prefilling
    )


def _finish(capacity: Capacity, sequence: Running, choice: Choice) -> Finish | None:
    request = sequence.request
    ends = choice.token == capacity.eos_token_id and not request.ignore_eos
    if choice.stops or ends or choice.token in request.stop_token_ids:
        return Finish.STOP
    generated = sequence.known - request.prompt_len
    if generated >= request.max_tokens or sequence.known >= capacity.max_context:
        return Finish.LENGTH
    return None


def _released(state: State, gone: Sequence[Running]) -> State:
    return replace(
        state,
        free_slots=(*state.free_slots, *(s.slot for s in gone)),
        free_pages=(*state.free_pages, *(page for s in gone for page in s.pages)),
    )
