"""The scheduler against a model of its resources: conservation, order, one end per request."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer_compile.runtime.scheduler import (
    Abort,
    Capacity,
    Choice,
    Emitted,
    Failure,
    Finish,
    Kind,
    Preemption,
    Request,
    commit,
    idle,
    initial,
    load,
    plan,
)

EOS = 1
SMALL = Capacity(
    requests=3,
    snapshots=2,
    pages=8,
    page_size=4,
    max_context=24,
    prefill_rows=8,
    decode_rows=4,
    sample_rows=4,
    eos_token_id=EOS,
)


def token_after(id, position):
    """What the pretended model samples: now and then the end token."""
    mixed = (id * 7919 + position * 104729) % 11
    return EOS if mixed == 0 else 2 + mixed


def completes(id, position):
    """Whether the text of that token completes a stop string: of every third request, at times."""
    return id % 3 == 2 and (id * 31 + position * 17) % 13 == 0


def names(text):
    """Page names of a prompt whose pages are these letters: a name stands for all before it."""
    return tuple(text[: i + 1].encode() for i in range(len(text)))


class World:
    """Runs steps, checks every promise, keeps what was emitted. `ahead`: each step is planned
    before the one before it is committed."""

    def __init__(self, capacity=SMALL, preemption=Preemption.RECOMPUTE, stuck=(), ahead=False):
        self.stuck = stuck  # (id, position) where a grammar allows no token
        self.capacity = capacity
        self.ahead = ahead
        self.flight = None
        self.state = initial(capacity, preemption)
        self.requests = {}
        self.events = []
        self.known = {}
        self.tables = {}
        self.slots = {}  # the tokens that a slot's state has seen
        self.pages = {}  # (page, place in it): the token there
        self.kinds = []

    def step(self, *incoming):
        for event in incoming:
            if isinstance(event, Request):
                self.requests[event.id] = event
                self.known[event.id] = event.prompt_len
        self.state, step = plan(self.state, incoming)
        self.events += step.ended
        self.run(step)
        self.kinds.append(step.kind)
        self.check_conservation()
        if self.ahead:
            ready, self.flight = self.flight, step if step.kind is not None else None
        else:
            ready = step
        if ready is not None:
            self.commit(ready)
        self.check_conservation()
        return step

    def commit(self, step):
        sampled = {}
        for work in step.work:
            if work.samples:
                position = work.position + work.count
                stops = completes(work.id, position)
                sampled[work.id] = Choice(token_after(work.id, position), -1.0, stops=stops)
                if (work.id, position) in self.stuck:
                    sampled[work.id] = Failure("nothing may follow")
        self.state, emitted = commit(self.state, step, sampled)
        for event in emitted:
            self.known[event.id] += event.choice is not None
        self.events += emitted

    def token(self, id, position):
        """What a request has at a position: a letter of a page, something of its own, or what was
        sampled."""
        request = self.requests[id]
        if position >= request.prompt_len:
            return token_after(id, position)
        page = position // self.capacity.page_size
        return request.pages[page][-1] if page < len(request.pages) else -id - 10

    def run(self, step):
        """As the device does, in the order of the plans: every row finds in its slot and its pages
        exactly the tokens before it, whoever computed them."""
        limit = {Kind.PREFILL: self.capacity.prefill_rows, Kind.DECODE: self.capacity.decode_rows}
        rows = sum(work.count for work in step.work)
        assert (rows == 0) == (step.kind is None)
        assert step.kind is None or rows <= limit[step.kind]
        assert sum(work.samples for work in step.work) <= self.capacity.sample_rows
        assert len({work.id for work in step.work}) == len(step.work)
        for grown in step.grown:
            if grown.first == 0:
                self.tables[grown.slot] = []
                self.slots[grown.slot] = []
            assert len(self.tables[grown.slot]) == grown.first
            self.tables[grown.slot] += grown.pages
        for sequence in self.state.running:
            assert tuple(self.tables[sequence.slot]) == sequence.pages
        for copy in step.restored:
            self.slots[copy.target] = list(self.slots[copy.source])
        for work in step.work:
            self.run_rows(work)
        for copy in step.saved:
            assert copy.target > self.capacity.requests
            self.slots[copy.target] = list(self.slots[copy.source])

    def run_rows(self, work):
        size, table = self.capacity.page_size, self.tables[work.slot]
        assert 1 <= work.slot <= self.capacity.requests
        for position in range(work.position, work.position + work.count):
            before = [self.token(work.id, p) for p in range(position)]
            assert self.slots[work.slot] == before
            assert [self.pages[table[p // size], p % size] for p in range(position)] == before
            token = self.token(work.id, position)
            self.slots[work.slot].append(token)
            self.pages[table[position // size], position % size] = token
        assert position < self.capacity.max_context
        in_flight = 1 if self.ahead else 0
        assert 0 <= work.known - 1 - self.known[work.id] <= in_flight or not work.samples

    def check_conservation(self):
        state, kept = self.state, self.state.prefixes
        slots = [s.slot for s in state.running] + list(state.free_slots)
        assert sorted(slots) == list(range(1, self.capacity.requests + 1))
        places = [*kept.free_places, *kept.snapshots.values()]
        assert sorted(places) == [
            self.capacity.requests + 1 + i for i in range(self.capacity.snapshots)
        ]
        shared = {page.number for _, page in kept.pages.items()}
        own = [p for s in state.running for p in s.pages if p not in shared]
        assert sorted([*own, *shared, *state.free_pages]) == list(range(1, self.capacity.pages + 1))
        held = Counter(n for s in state.running for n in s.request.pages[: s.held])
        assert held == Counter({name: page.users for name, page in kept.pages.items()})
        pages = dict(kept.pages.items())
        idle = {page.released: name for name, page in pages.items() if page.users == 0}
        assert dict(kept.unused.items()) == idle
        assert len(kept.unused) == len(idle)
        assert all(kept.oldest <= time < kept.now for time in idle)
        assert kept.snapshots.keys() <= pages.keys()
        assert all(name[:-1] in pages for name in pages if len(name) > 1)

    def drain(self):
        for _ in range(10_000):
            if idle(self.state) and self.flight is None:
                return self
            self.step()
        raise AssertionError("no progress")

    def ends(self, id):
        return [e.finish for e in self.events if e.id == id and e.finish is not None]

    def tokens(self, id):
        return [e.choice.token for e in self.events if e.id == id and e.choice is not None]


def expected(request, capacity=SMALL):
    """What a request alone must produce, by the rules' plain statement."""
    tokens, position = [], request.prompt_len
    while True:
        token = token_after(request.id, position)
        tokens.append(token)
        ends = token == EOS and not request.ignore_eos
        if ends or token in request.stop_token_ids or completes(request.id, position):
            return tokens, Finish.STOP
        position += 1
        if len(tokens) == request.max_tokens or position == capacity.max_context:
            return tokens, Finish.LENGTH


arrivals = st.lists(
    st.tuples(
        st.integers(0, 3),
        st.integers(1, 30),
        st.integers(1, 40),
        st.booleans(),
        st.sampled_from([(), (7,), (EOS, 3, 9)]),
        st.sampled_from([0, 0, 0, -1, 5]),
        st.text("ab", min_size=7, max_size=7),
    ),
    max_size=12,
)
aborts = st.lists(st.tuples(st.integers(0, 20), st.integers(0, 12)), max_size=4)
stuck = st.sets(st.tuples(st.integers(0, 11), st.integers(1, 40)), max_size=30)


@given(arrivals, aborts, stuck, st.integers(6, 40), st.sampled_from(Preemption), st.booleans())
@settings(max_examples=400, deadline=None)
def test_any_traffic_ends_every_request_once_and_returns_everything(
    arrivals, aborts, stuck, pages, preemption, ahead
):
    """Whether the pool holds one request or all of them, whether steps are planned ahead or not,
    and whatever prompts share, tokens are those of lone requests."""
    world = World(replace(SMALL, pages=pages), preemption, stuck, ahead)
    pending = dict(aborts)
    for id, (pause, length, *request, text) in enumerate(arrivals):
        for _ in range(pause):
            world.step()
        stop = [Abort(pending.pop(id))] if id in pending else []
        shared = names(text[: length // SMALL.page_size])
        world.step(Request(id, length, *request, shared), *stop)
    world.drain()
    for id, request in world.requests.items():
        (end,) = world.ends(id)
        tokens, finish = expected(request)
        if end is Finish.PROMPT_LENGTH_EXCEEDED:
            assert request.prompt_len >= SMALL.max_context
            assert world.tokens(id) == []
        elif end is Finish.GRAMMAR:
            assert world.tokens(id) == tokens[: len(world.tokens(id))]
            assert (id, request.prompt_len + len(world.tokens(id))) in stuck
        elif end in (Finish.ABORT, Finish.INSUFFICIENT_SYSTEM_RESOURCE):
            assert end is Finish.ABORT or preemption is Preemption.STOP
            assert world.tokens(id) == tokens[: len(world.tokens(id))]
        else:
            assert (world.tokens(id), end) == (tokens, finish)
    assert len(world.state.free_slots) == SMALL.requests
    assert len(world.state.free_pages) + len(world.state.prefixes.unused) == pages


def test_a_long_prompt_is_cut_into_chunks_and_sampled_once():
    world = World()
    world.step(Request(0, 20, 1, True))
    world.drain()
    assert world.kinds == [Kind.PREFILL] * 3
    assert world.tokens(0) == expected(world.requests[0])[0]


def test_prompts_share_a_prefill_step_and_decode_together():
    world = World()
    step = world.step(*(Request(i, 2, 3, True) for i in range(3)))
    assert [work.id for work in step.work] == [0, 1, 2]
    assert [work.id for work in world.step().work] == [0, 1, 2]


def test_prefill_and_decode_alternate_while_both_have_work():
    world = World()
    world.step(Request(0, 1, 8, True))
    world.step(Request(1, 23, 1, True))
    world.drain()
    assert world.kinds[:6] == [
        Kind.PREFILL,
        Kind.DECODE,
        Kind.PREFILL,
        Kind.DECODE,
        Kind.PREFILL,
        Kind.DECODE,
    ]


def test_a_big_request_is_not_overtaken_for_ever():
    world = World()
    world.step(Request(0, 17, 4, True))  # 5 of 8 pages
    world.step(Request(1, 20, 4, True))  # 5 pages: waits
    step = world.step(Request(2, 1, 2, True))  # would fit now, but came later
    assert 2 not in {work.id for work in step.work}
    world.drain()
    assert [world.ends(i) for i in range(3)] == [[Finish.LENGTH]] * 3


def test_pages_are_taken_as_they_are_needed():
    world = World()
    step = world.step(Request(0, 6, 10, True))
    assert [len(grown.pages) for grown in step.grown] == [2]
    grown = [world.step().grown for _ in range(4)]
    assert [[(g.first, len(g.pages)) for g in step] for step in grown] == [[], [], [(2, 1)], []]


def test_a_full_pool_preempts_the_youngest_and_both_finish_as_if_alone():
    world = World(replace(SMALL, pages=7))
    world.step(Request(0, 12, 11, True), Request(3, 7, 12, True))
    slots = {s.request.id: s.slot for s in world.state.running}
    assert set(slots) == {0, 3}
    while all(not one.known > one.request.prompt_len for one in world.state.waiting):
        world.step()
    assert [one.request.id for one in world.state.waiting] == [3]
    world.drain()
    for id in (0, 3):
        assert (world.tokens(id), world.ends(id)[0]) == expected(world.requests[id])


def test_a_preempted_request_ends_if_it_is_not_to_be_recomputed():
    world = World(replace(SMALL, pages=7), Preemption.STOP)
    world.step(Request(0, 12, 11, True), Request(3, 7, 12, True))
    world.drain()
    assert world.ends(0) == [Finish.LENGTH]
    assert world.ends(3) == [Finish.INSUFFICIENT_SYSTEM_RESOURCE]


def test_priority_comes_before_arrival():
    world = World(replace(SMALL, requests=1))
    world.step(Request(0, 2, 2, True))
    world.step(Request(1, 2, 2, True), Request(2, 2, 2, True, (), priority=-1))
    world.drain()
    assert [e.id for e in world.events if e.finish] in ([0, 2, 1], [2, 0, 1])


def test_a_better_priority_takes_the_place_of_a_worse_one_that_goes_on_later():
    world = World(replace(SMALL, requests=1))
    world.step(Request(0, 6, 9, True, (), priority=1))
    world.step()
    step = world.step(Request(1, 4, 2, True))
    assert {work.id for work in step.work} == {1}
    world.drain()
    assert [e.id for e in world.events if e.finish] == [1, 0]
    assert (world.tokens(0), world.ends(0)[0]) == expected(world.requests[0])


def test_nobody_is_displaced_in_vain():
    """Two of a worse priority hold less than the newcomer lacks."""
    world = World(replace(SMALL, pages=7))
    world.step(Request(0, 16, 8, True), Request(1, 2, 6, True, (), priority=1))
    world.step(Request(2, 20, 2, True))
    assert {sequence.request.id for sequence in world.state.running} == {0, 1}


def test_abort_frees_at_once_and_an_unknown_id_is_ignored():
    world = World()
    world.step(Request(0, 10, 14, True))
    world.step(Abort(0), Abort(77))
    assert world.events[-1] == Emitted(0, None, Finish.ABORT)
    assert idle(world.state)
    assert len(world.state.free_pages) == SMALL.pages


def test_a_context_that_is_full_ends_with_length():
    world = World()
    world.step(Request(0, 23, 40, True))
    world.drain()
    assert (len(world.tokens(0)), world.ends(0)) == (1, [Finish.LENGTH])


def test_what_never_fits_the_pool_is_rejected_not_queued():
    world = World(replace(SMALL, pages=2))
    world.step(Request(0, 8, 2, True), Request(1, 8, 1, True), Request(2, 24, 1, True))
    assert world.ends(0) == world.ends(2) == [Finish.PROMPT_LENGTH_EXCEEDED]
    assert world.ends(1) == [Finish.LENGTH]


def test_a_step_whose_only_decoder_was_preempted_goes_to_prefill():
    """It was planned as a decode step of no rows."""
    world = World(replace(SMALL, pages=6))
    world.step(Request(0, 13, 1, True))
    world.step(Request(1, 7, 8, True))
    world.drain()
    assert world.ends(0) == world.ends(1) == [Finish.LENGTH]


def reused(world, id):
    """Of a request that has ended."""
    return next(e.reused for e in world.events if e.id == id and e.finish is not None)


def test_the_same_prompt_again_runs_only_its_last_tokens():
    world = World()
    for id in range(3):
        world.step(Request(id, 10, 1, True, pages=names("ab")))
        world.drain()
    assert [reused(world, id) for id in range(3)] == [0, 8, 8]
    assert load(world.state).prefix_queries == 30
    assert load(world.state).prefix_hits == 16


def test_the_last_token_runs_even_if_every_page_is_there():
    world = World()
    for id in range(2):
        world.step(Request(id, 8, 1, True, pages=names("ab")))
        world.drain()
    assert [reused(world, id) for id in range(2)] == [0, 4]


def test_two_that_part_show_where_the_third_may_go_on():
    """The first leaves a snapshot at the end of its pages, which nobody else has."""
    world = World()
    for id, text in enumerate(["aab", "aac", "aad"]):
        world.step(Request(id, 13, 1, True, pages=names(text)))
        world.drain()
    assert [reused(world, id) for id in range(3)] == [0, 0, 8]


def test_the_prefix_used_least_recently_makes_room():
    """Two snapshots: of three prompts by turns only the last two are there."""
    world = World(replace(SMALL, pages=40))
    for id, text in enumerate("abcca"):
        world.step(Request(id, 6, 1, True, pages=names(text)))
        world.drain()
    assert [reused(world, id) for id in range(5)] == [0, 0, 0, 4, 0]


def test_kept_pages_are_given_up_when_the_pool_needs_them():
    world = World(replace(SMALL, pages=6))
    world.step(Request(0, 10, 1, True, pages=names("ab")))
    world.drain()
    assert load(world.state).page_usage == 0
    world.step(Request(1, 16, 4, True))
    world.drain()
    assert world.ends(1) == [Finish.LENGTH]
    assert dict(world.state.prefixes.pages.items()).keys() == {b"a"}, (
        "the end of a prefix goes first"
    )


def test_a_preempted_request_goes_on_from_its_prompt():
    world = World(replace(SMALL, pages=7))
    world.step(Request(0, 12, 11, True), Request(3, 7, 12, True, pages=names("a")))
    world.drain()
    assert world.state.preemptions == 1
    assert reused(world, 3) == 4
    assert world.tokens(3) == expected(world.requests[3])[0]


def test_a_step_planned_ahead_runs_a_row_for_nothing_and_hands_out_no_token():
    id = next(i for i in range(50) if token_after(i, 2) == EOS)
    world = World(ahead=True)
    world.step(Request(id, 2, 9))
    step = world.step()
    assert [work.known for work in step.work] == [4]
    assert world.ends(id) == [Finish.STOP]
    world.drain()
    assert world.tokens(id) == [EOS]


def test_no_row_is_planned_past_the_length():
    world = World(ahead=True)
    world.step(Request(0, 3, 2, True))
    steps = [world.step() for _ in range(3)]
    assert [len(step.work) for step in steps] == [1, 0, 0]
    assert world.ends(0) == [Finish.LENGTH]


def test_requests_wait_for_what_another_is_at_work_on():
    """Eight rows a step: the first computes the two pages that all share, once."""
    world = World(replace(SMALL, pages=40))
    step = world.step(*(Request(i, 13, 3, True, pages=names("aa" + "bcd"[i])) for i in range(3)))
    assert [(work.id, work.count) for work in step.work] == [(0, 8)]
    world.drain()
    assert [reused(world, id) for id in range(3)] == [0, 8, 8]
    for id in range(3):
        assert world.tokens(id) == expected(world.requests[id])[0]


def test_nobody_waits_for_what_was_computed_before_it_came():
    """Its snapshot is missing, so the second computes it again, for the third."""
    world = World(replace(SMALL, pages=40))
    world.step(Request(0, 23, 1, True, pages=names("aabbb")))
    world.step(Request(1, 13, 1, True, pages=names("aac")))
    assert len(world.state.running) == 2
    world.drain()
    world.step(Request(2, 13, 1, True, pages=names("aad")))
    world.drain()
    assert [reused(world, id) for id in range(3)] == [0, 0, 8]


SECONDS = {Kind.PREFILL: 0.5, Kind.DECODE: 0.1, None: 0.01}


@given(arrivals, st.booleans())
@settings(max_examples=100, deadline=None)
def test_by_a_clock_nobody_waits_for_more_than_one_step_of_the_other_kind(arrivals, ahead):
    """With pages for all: a running request's next token comes after at most one prefill step and
    its own, and a prompt that has a slot goes on after at most one decode step and its own."""
    world, now, newest, skipped = World(replace(SMALL, pages=40), ahead=ahead), 0.0, {}, 0
    coming = [
        (pause, Request(id, length, *request, 0, names(text[: length // SMALL.page_size])))
        for id, (pause, length, *request, _, text) in enumerate(arrivals)
    ]
    while coming or world.flight or not idle(world.state):
        incoming = []
        while coming and coming[0][0] == 0:
            incoming.append(coming.pop(0)[1])
        if coming:
            coming[0] = (coming[0][0] - 1, coming[0][1])
        seen, prompts = len(world.events), any(s.prefilling for s in world.state.running)
        step = world.step(*incoming)
        now += SECONDS[step.kind]
        for event in world.events[seen:]:
            if event.choice is not None:
                gap = now - newest.get(event.id, now)
                assert gap <= SECONDS[Kind.PREFILL] + SECONDS[Kind.DECODE] + 1e-9
                newest[event.id] = now
        skipped = skipped + 1 if prompts and step.kind is not Kind.PREFILL else 0
        assert skipped <= 1
