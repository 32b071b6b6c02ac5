"""Steps planned ahead: the tokens of steps planned one by one, and as the model's rule says."""

from __future__ import annotations

import dataclasses
import gc
import random
import threading
import time

import pytest

from deepinfer_compile.runtime import SamplingParams
from deepinfer_compile.runtime.late_binding import rows_of
from deepinfer_compile.runtime.loader import load_engine
from deepinfer_compile.runtime.loop import StepLoop
from deepinfer_compile.runtime.scheduler import Finish, Work
from deepinfer_compile.runtime.stream import Stream
from tests.runtime.pretend import EOS, PLAN, answer, pretend_engine


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    engine = load_engine(pretend_engine(tmp_path_factory.mktemp("late") / "e"), threads=1)
    yield engine
    engine.close()


def stop_after(token):
    """As the text would: some tokens complete a stop string."""
    return token % 23 == 5


def workload(rng):
    """Prompts that begin alike or not, with all that can end a request."""
    starts = [[rng.randrange(2, 256) for _ in range(40)] for _ in range(2)]
    requests = []
    for _ in range(rng.randrange(1, 7)):
        prompt = [*rng.choice(starts)[: rng.choice([0, 1, 15, 16, 17, 33])], rng.randrange(2, 256)]
        sampled = rng.random() < 0.5
        params = SamplingParams(
            temperature=1.0 if sampled else 0.0,
            seq_seed=rng.getrandbits(64),
            max_tokens=rng.choice([1, 2, 9, 30]),
            ignore_eos=rng.random() < 0.5,
            stop_token_ids=[rng.randrange(256)],
        )
        requests.append((prompt, params, rng.random() < 0.3, rng.choice([0, 0, 1])))
    return requests


def expected(prompt, params, watched):
    seed = params.seed if params.temperature else 0
    tokens = answer(prompt, params.max_tokens, params.temperature, seed, params.ignore_eos)
    ends = [t in params.stop_ids or (watched and stop_after(t)) for t in tokens]
    return tokens[: ends.index(True) + 1] if True in ends else tokens


def run(loop, requests, rng):
    """Requests come between steps, some are aborted; tokens and reasons by request."""
    waiting, ids = list(requests), []
    tokens, ends = {}, {}
    while waiting or loop.busy:
        while waiting and rng.random() < 0.6:
            prompt, params, watched, priority = waiting.pop(0)
            ids.append(loop.submit(prompt, params, stop_after if watched else None, priority))
        if ids and rng.random() < 0.05:
            loop.abort(rng.choice(ids))
        for event in loop.step():
            assert event.id not in ends
            if event.choice is not None:
                tokens.setdefault(event.id, []).append(event.choice.token)
            if event.finish is not None:
                ends[event.id] = event.finish
    return [(tokens.get(id, []), ends[id]) for id in ids]


@pytest.mark.parametrize(
    "first", [0, *(pytest.param(i, marks=pytest.mark.slow) for i in range(1, 20))]
)
def test_planning_ahead_changes_no_token(engine, first):
    """A hundred workloads each time, with few pages or many, one loop after another or kept."""
    loops = {}
    for pages in (6, 9):
        limits = dataclasses.replace(PLAN.limits, pages=pages)
        plan = dataclasses.replace(PLAN, limits=limits)
        loops[pages] = plan
    for seed in range(first * 100, first * 100 + 100):
        plan = loops[6 if seed % 2 else 9]
        requests = workload(random.Random(seed))
        results = []
        for ahead in (False, True):
            loop = StepLoop(plan, engine.executor, asynchronous=ahead)
            results.append(run(loop, requests, random.Random(seed)))
            again = run(loop, requests, random.Random(-seed))  # from pages that are kept
            results.append(again)
            loop.close()
        for (prompt, params, watched, _), *found in zip(requests, *results, strict=True):
            whole = expected(prompt, params, watched)
            for tokens, end in found:
                if end is Finish.ABORT:
                    assert tokens == whole[: len(tokens)]
                else:
                    assert tokens == whole
                    assert end in (Finish.STOP, Finish.LENGTH)


def test_the_host_hands_tokens_out_while_the_device_runs(engine, monkeypatch):
    """While the tokens of a step are read, the next step's forward pass was already given."""
    order = []
    forward, sample = engine.executor.forward, engine.executor.sample
    monkeypatch.setattr(
        engine.executor, "forward", lambda *args: (order.append("forward"), forward(*args))
    )
    monkeypatch.setattr(
        engine.executor,
        "sample",
        lambda rows: (order.append("sample"), time.sleep(0.01), sample(rows))[2],
    )
    loop = StepLoop(PLAN, engine.executor)
    loop.submit(
        [5, 6], SamplingParams(temperature=0, max_tokens=6, ignore_eos=True), lambda _: seen()
    )
    counts = []

    def seen():
        time.sleep(0.005)
        counts.append(order.count("forward"))
        return False

    while loop.busy:
        loop.step()
    assert counts == [2, 3, 4, 5, 6, 6], "one step ahead of every token, but none past the last"
    loop.close()


def test_only_the_newest_token_is_bound_late():
    work = (Work(7, 1, 0, 3, True), Work(8, 2, 4, 1, True), Work(9, 3, 2, 1, True))
    tokens = {7: [1, 2, 3], 8: [0, 0, 0, 0], 9: [5, 5]}
    rows = rows_of(work, tokens, {8: 2})
    assert [span.tokens for span in rows.spans] == [(1, 2, 3), (0,), (0,)]
    assert (rows.late, rows.sources) == ((3,), (2,)), "9 got no token: it ends"


def test_waiting_for_the_device_while_launching_is_refused():
    for asynchronous in (False, True):
        stream = Stream(asynchronous=asynchronous)
        pending = stream.run(lambda: 5)
        with stream.launching(), pytest.raises(RuntimeError, match="while it launches a step"):
            pending.result()
        assert pending.result() == 5
        stream.close()


@pytest.mark.parametrize("failure", [ZeroDivisionError, KeyboardInterrupt, SystemExit])
def test_after_a_failure_nothing_runs_on_its_results(failure):
    def fail():
        raise failure

    stream, ran = Stream(asynchronous=True), []
    first = stream.run(fail)
    second = stream.run(lambda: ran.append(1))
    for pending in (first, second):
        with pytest.raises(failure):
            pending.result()
    assert ran == []
    stream.close()


def test_a_request_that_ends_leaves_its_slot_to_the_next_at_once(engine):
    """Its last row is for nothing and runs after the slot was given out."""
    loop = StepLoop(PLAN, engine.executor)
    params = SamplingParams(temperature=0, max_tokens=40)
    prompt = next(p for p in ([i] for i in range(2, 256)) if 2 < len(answer(p, 40)) < 12)
    assert answer(prompt, 40)[-1] == EOS
    ids = [loop.submit(prompt, params) for _ in range(5)]
    found = {id: [] for id in ids}
    while loop.busy:
        for event in loop.step():
            found[event.id].append(event.choice.token)
    assert [found[id] for id in ids] == [answer(prompt, 40)] * 5
    loop.close()


def test_a_stream_that_nobody_closes_leaves_no_thread():
    before = set(threading.enumerate())
    stream = Stream(asynchronous=True)
    assert stream.run(lambda: 5).result() == 5
    (thread,) = set(threading.enumerate()) - before
    del stream
    gc.collect()
    thread.join(10)
    assert not thread.is_alive()
