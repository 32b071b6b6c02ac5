"""Which rows run next: a pure function of the state and what happened.

    plan(state, events)   -> state, StepPlan      what to run, and requests that end without running
    commit(state, step, sampled) -> state, events tokens, each request's last one with its reason

A step may be planned before the one before it is committed: planning takes it that every sampled
token continues its request. Where it turns out to end it, the later step's row of that request is
for nothing and its token is dropped. Steps run in the order of their plans, so what a request gives
back may be handed out again while its last row has yet to run.

No clock, no tensors, no randomness, and no tokens but those just sampled: a request is its length.
Values that every row of a step makes anew are named tuples: frozen dataclasses take four times as
long to make.
Requests have a rank, by priority, then by arrival. The best ranked waiting one is admitted when a
slot and the pages of its tokens are free; pages for what it generates are taken one at a time. When
none is left, the worst ranked running request is preempted: it waits again and all its tokens go
through the model once more, or it ends (`Preemption`). The best ranked request is never preempted
and the pool holds any one request, so a full pool cannot dead-lock. Prefill and decode steps
alternate while both have work, so neither starves. Every request ends with exactly one event that
has a reason.

Full pages of prompts are kept for requests that begin alike (`prefixes`). So that one can go on
after them, prefill stops at the end of a prompt's last full page, and where a prompt parts from
others, and the slot is saved there; but before the prompt's last token, which always has to run.
A request waits while another is at work on what both begin with.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum, StrEnum
from typing import NamedTuple

from deepinfer_compile.runtime.prefixes import (
    Prefixes,
    add,
    common,
    give_up,
    hold,
    let_go,
    match,
    prefixes,
    restored,
    saved,
)


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
class Request:
    """`max_tokens` bounds what is generated; `ignore_eos` goes on after the end token, but not
    after one of `stop_token_ids`. A smaller `priority` is served first. `pages` names the full
    pages of the prompt; without names nothing is shared."""

    id: int
    prompt_len: int
    max_tokens: int
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    priority: int = 0
    pages: tuple[bytes, ...] = ()


@dataclass(frozen=True)
class Abort:
    """Stop a request wherever it is; unknown ids are ignored: it may just have ended."""

    id: int


class Choice(NamedTuple):
    """A sampled token. `top`: the most likely ones with their log probabilities, as many as asked
    for. `stops`: its text completes a stop string. `prompt_logprobs`: beside the first token.
    `smaller`: the probability of less likely tokens. Empty and -1 if not asked for."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    stops: bool = False
    prompt_logprobs: tuple[float, ...] = ()
    smaller: float = -1.0


@dataclass(frozen=True)
class Failure:
    """In the place of a token: the request's grammar allows none, and why."""

    error: str


class Emitted(NamedTuple):
    """A sampled token, or with `choice` None the end of a request that gets no more. `reused`
    tokens of its prompt were there already when it was last admitted."""

    id: int
    choice: Choice | None
    finish: Finish | None
    error: str = ""
    reused: int = 0


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
    free_pages: tuple[int, ...]
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


@dataclass(frozen=True)
class Work:
    """Rows of one request in a step: `count` of its tokens from `position` on. `samples`: the last
    row is sampled from."""

    id: int
    slot: int
    position: int
    count: int
    samples: bool

    @property
    def known(self) -> int:
        """Tokens of the request after the step, if it samples."""
        return self.position + self.count + 1


@dataclass(frozen=True)
class Copy:
    """All that one slot holds, to another slot."""

    source: int
    target: int


@dataclass(frozen=True)
class Grown:
    """Pages that a slot's request gets: entries `first` and on of its page table. From 0 on: the
    request is new in the slot."""

    slot: int
    first: int
    pages: tuple[int, ...]


@dataclass(frozen=True)
class StepPlan:
    """`kind` None: nothing to run. `restored` before the rows run, `saved` after them."""

    kind: Kind | None
    work: tuple[Work, ...]
    grown: tuple[Grown, ...]
    restored: tuple[Copy, ...]
    saved: tuple[Copy, ...]
    ended: tuple[Emitted, ...]


def initial(capacity: Capacity, preemption: Preemption = Preemption.RECOMPUTE) -> State:
    """Nothing to do, everything free."""
    slots = tuple(range(1, capacity.requests + 1))
    pages = tuple(range(1, capacity.pages + 1))
    places = range(capacity.requests + 1, capacity.requests + capacity.snapshots + 1)
    return State(capacity, preemption, (), (), slots, pages, prefixes(places), 0, 0, 0, None)


def idle(state: State) -> bool:
    return not state.waiting and not state.running


def load(state: State) -> Load:
    """How full the engine is."""
    pages, kept = state.capacity.pages, state.prefixes
    usage = 1 - _available(state) / pages if pages else 0.0
    return Load(
        running=len(state.running),
        waiting=len(state.waiting),
        page_usage=usage,
        preemptions=state.preemptions,
        prefix_queries=kept.asked,
        prefix_hits=kept.reused,
    )


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
    state, copies = _admit(state, ended)
    kind = _next_kind(state)
    if kind is Kind.DECODE:
        state = _with_pages(state, ended)
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
    return (_without(state, gone) if gone else state), tuple(events)


def _enqueue(state: State, request: Request, ended: list[Emitted]) -> State:
    capacity = state.capacity
    most = min(request.prompt_len + request.max_tokens - 1, capacity.max_context)
    if request.prompt_len >= capacity.max_context or _pages(capacity, most) > capacity.pages:
        ended.append(Emitted(request.id, None, Finish.PROMPT_LENGTH_EXCEEDED))
        return state
    assert request.prompt_len >= 1, "the caller refuses empty prompts"
    assert request.max_tokens >= 1, request
    assert capacity.snapshots or not request.pages, "what is shared cannot be gone on from"
    state = replace(state, arrivals=state.arrivals + 1)
    return _queued(state, Waiting(request, state.arrivals, request.prompt_len))


def _queued(state: State, waiting: Waiting) -> State:
    queue = list(state.waiting)
    insort(queue, waiting, key=lambda one: one.rank)
    return replace(state, waiting=tuple(queue))


def _abort(state: State, id: int, ended: list[Emitted]) -> State:
    everyone: tuple[Running | Waiting, ...] = (*state.running, *state.waiting)
    found = [one for one in everyone if one.request.id == id]
    if not found:
        return state
    ended.append(Emitted(id, None, Finish.ABORT, reused=found[0].reused))
    return _without(state, {id})


def _without(state: State, ids: set[int]) -> State:
    """These requests are gone, with all that they had."""
    gone = [s for s in state.running if s.request.id in ids]
    running = tuple(s for s in state.running if s.request.id not in ids)
    waiting = tuple(one for one in state.waiting if one.request.id not in ids)
    return _released(replace(state, running=running, waiting=waiting), gone)


def _admit(state: State, ended: list[Emitted]) -> tuple[State, tuple[Copy, ...]]:
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
    made = replace(state, prefixes=hold(state.prefixes, held))
    need = _pages(capacity, head.known) - len(held)
    if need + len(state.running) > _available(made):
        return None
    shared = tuple(made.prefixes.pages[name].number for name in held)
    made, pages = _taken(made, need)
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


def _available(state: State) -> int:
    """Pages that can be taken."""
    return len(state.free_pages) + len(state.prefixes.unused)


def _taken(state: State, count: int) -> tuple[State, tuple[int, ...]]:
    """Free pages, or else such as are only kept."""
    pages, kept = state.free_pages, state.prefixes
    if count > len(pages):
        kept, more = give_up(kept, count - len(pages))
        pages = (*pages, *more)
    return replace(state, free_pages=pages[count:], prefixes=kept), pages[:count]


def _worst(state: State) -> Running | None:
    return max(state.running, key=lambda s: s.rank, default=None)


def _preempted(state: State, victim: Running, ended: list[Emitted]) -> State:
    running = tuple(s for s in state.running if s is not victim)
    state = replace(state, running=running, preemptions=state.preemptions + 1)
    state = _released(state, [victim])
    if state.preemption is Preemption.RECOMPUTE:
        waiting = Waiting(victim.request, victim.arrival, victim.known, victim.reused)
        return _queued(state, waiting)
    finish = Finish.INSUFFICIENT_SYSTEM_RESOURCE
    ended.append(Emitted(victim.request.id, None, finish, reused=victim.reused))
    return state


def _with_pages(state: State, ended: list[Emitted]) -> State:
    """Every decoding request has the page of its next row, or was preempted for a better one."""
    size = state.capacity.page_size
    full = [s for s in state.running if s.done == len(s.pages) * size]
    short = [s for s in full if s.decoding(state.capacity)]
    for sequence in sorted(short, key=lambda s: s.rank):
        while not _available(state) and _runs(state, sequence):
            victim = _worst(state)
            assert victim is not None
            state = _preempted(state, victim, ended)
        if _runs(state, sequence):
            state, more = _taken(state, 1)
            longer = sequence._replace(pages=(*sequence.pages, *more))
            running = tuple(longer if s is sequence else s for s in state.running)
            state = replace(state, running=running)
    return state


def _runs(state: State, sequence: Running) -> bool:
    return any(s is sequence for s in state.running)


def _pages(capacity: Capacity, tokens: int) -> int:
    return -(-tokens // capacity.page_size)


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
            kept = add(kept, names, s.pages[s.held : held])
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


def _released(state: State, gone: Sequence[Running]) -> State:
    """Their slots and pages are free, but the shared pages are only let go."""
    free, kept = list(state.free_pages), state.prefixes
    for s in gone:
        names = s.request.pages[: s.held]
        own = [p for p, name in zip(s.pages, names, strict=False) if kept.pages[name].number != p]
        free += [*own, *s.pages[s.held :]]
        kept = let_go(kept, names)
    return replace(
        state,
        free_slots=(*state.free_slots, *(s.slot for s in gone)),
        free_pages=tuple(free),
        prefixes=kept,
    )
