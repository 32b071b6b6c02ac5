"""The scheduler against a model of its resources: conservation, order, one end per request."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer_compile.runtime.scheduler import (
    Abort,
    Capacity,
    Choice,
    Emitted,
    Finish,
    Kind,
    Request,
    commit,
    idle,
    initial,
    plan,
)

EOS = 1
SMALL = Capacity(
    requests=3,
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


class World:
    """Runs steps, checks every promise, keeps what was emitted."""

    def __init__(self, capacity=SMALL):
        self.capacity = capacity
        self.state = initial(capacity)
        self.requests = {}
        self.events = []
        self.known = {}
        self.pages = {}
        self.kinds = []

    def step(self, *incoming):
        for event in incoming:
            if isinstance(event, Request):
                self.requests[event.id] = event
                self.known[event.id] = list(event.prompt)
        self.state, step = plan(self.state, incoming)
        self.pages |= step.admitted
        self.events += step.ended
        self.check_step(step)
        sampled = {}
        for work in step.work:
            if work.samples:
                position = work.position + len(work.tokens)
                stops = completes(work.id, position)
                sampled[work.id] = Choice(token_after(work.id, position), -1.0, stops=stops)
        self.state, emitted = commit(self.state, step, sampled)
        for event in emitted:
            self.known[event.id].append(event.choice.token)
        self.events += emitted
        self.kinds.append(step.kind)
        self.check_conservation()
        return step

    def check_step(self, step):
        limit = {Kind.PREFILL: self.capacity.prefill_rows, Kind.DECODE: self.capacity.decode_rows}
        rows = sum(len(work.tokens) for work in step.work)
        assert (rows == 0) == (step.kind is None)
        if step.kind is not None:
            assert rows <= limit[step.kind]
        assert sum(work.samples for work in step.work) <= self.capacity.sample_rows
        assert len({work.id for work in step.work}) == len(step.work)
        for work in step.work:
            end = work.position + len(work.tokens)
            # The tokens are the request's own, at their own places, and their pages are owned.
            assert tuple(self.known[work.id][work.position : end]) == work.tokens
            assert work.samples == (end == len(self.known[work.id]))
            assert end <= len(self.pages[work.slot]) * self.capacity.page_size
            assert work.slot != 0

    def check_conservation(self):
        slots = [s.slot for s in self.state.running] + list(self.state.free_slots)
        pages = [p for s in self.state.running for p in s.pages] + list(self.state.free_pages)
        assert sorted(slots) == list(range(1, self.capacity.requests + 1))
        assert sorted(pages) == list(range(1, self.capacity.pages + 1))

    def drain(self):
        for _ in range(10_000):
            if idle(self.state):
                return self
            self.step()
        raise AssertionError("no progress")

    def ends(self, id):
        return [e.finish for e in self.events if e.id == id and e.finish is not None]

    def tokens(self, id):
        return [e.choice.token for e in self.events if e.id == id and e.choice is not None]


def expected(request, capacity=SMALL):
    """What a request alone must produce, by the rules' plain statement."""
    tokens, position = [], len(request.prompt)
    while True:
        token = token_after(request.id, position)
        tokens.append(token)
        ends = token == EOS and not request.ignore_eos
        if ends or token in request.stop_token_ids or completes(request.id, position):
            return tokens, Finish.STOP
        position += 1
        if len(tokens) == request.max_tokens or position == capacity.max_context:
            return tokens, Finish.LENGTH


prompts = st.lists(st.integers(2, 99), min_size=1, max_size=30).map(tuple)
arrivals = st.lists(
    st.tuples(
        st.integers(0, 3),
        prompts,
        st.integers(1, 40),
        st.booleans(),
        st.sampled_from([(), (7,), (EOS, 3, 9)]),
    ),
    max_size=12,
)


@given(arrivals, st.lists(st.tuples(st.integers(0, 20), st.integers(0, 12)), max_size=4))
@settings(max_examples=150, deadline=None)
def test_any_traffic_ends_every_request_once_and_returns_everything(arrivals, aborts):
    world = World()
    pending = dict(aborts)
    for id, (pause, prompt, most, ignore, stops) in enumerate(arrivals):
        for _ in range(pause):
            world.step()
        stop = [Abort(pending.pop(id))] if id in pending else []
        world.step(Request(id, prompt, most, ignore, stops), *stop)
    world.drain()
    for id, request in world.requests.items():
        (end,) = world.ends(id)
        if end is Finish.PROMPT_LENGTH_EXCEEDED:
            assert len(request.prompt) >= SMALL.max_context
            assert world.tokens(id) == []
        elif end is Finish.ABORT:
            tokens, _ = expected(request)
            assert world.tokens(id) == tokens[: len(world.tokens(id))]
        else:
            assert (world.tokens(id), end) == expected(request)
    assert len(world.state.free_slots) == SMALL.requests
    assert len(world.state.free_pages) == SMALL.pages


def test_a_long_prompt_is_cut_into_chunks_and_sampled_once():
    world = World()
    world.step(Request(0, tuple(range(2, 22)), 1, True))
    world.drain()
    assert world.kinds == [Kind.PREFILL] * 3
    assert world.tokens(0) == expected(world.requests[0])[0]


def test_prompts_share_a_prefill_step_and_decode_together():
    world = World()
    requests = [Request(i, (5, 6), 3, True) for i in range(3)]
    step = world.step(*requests)
    assert [work.id for work in step.work] == [0, 1, 2]
    assert [work.id for work in world.step().work] == [0, 1, 2]


def test_prefill_and_decode_alternate_while_both_have_work():
    world = World()
    world.step(Request(0, (5,), 8, True))
    world.step(Request(1, tuple(range(2, 25)), 1, True))
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
    world.step(Request(0, (5,) * 10, 10, True))  # 5 of 8 pages
    world.step(Request(1, (5,) * 20, 4, True))  # 6 pages: waits
    step = world.step(Request(2, (5,), 2, True))  # would fit now, but came later
    assert 2 not in {work.id for work in step.work}
    world.drain()
    assert [world.ends(i) for i in range(3)] == [[Finish.LENGTH]] * 3


def test_abort_frees_at_once_and_an_unknown_id_is_ignored():
    world = World()
    world.step(Request(0, (5,) * 10, 14, True))
    world.step(Abort(0), Abort(77))
    assert world.events[-1] == Emitted(0, None, Finish.ABORT)
    assert idle(world.state)
    assert len(world.state.free_pages) == SMALL.pages


def test_a_context_that_is_full_ends_with_length():
    world = World()
    world.step(Request(0, (5,) * 23, 40, True))
    world.drain()
    assert (len(world.tokens(0)), world.ends(0)) == (1, [Finish.LENGTH])


def test_what_never_fits_the_pool_is_rejected_not_queued():
    from dataclasses import replace

    world = World(replace(SMALL, pages=2))
    world.step(Request(0, (5,) * 10, 10, True), Request(1, (5,), 1, True))
    assert world.ends(0) == [Finish.PROMPT_LENGTH_EXCEEDED]
    assert world.ends(1) == [Finish.LENGTH]
