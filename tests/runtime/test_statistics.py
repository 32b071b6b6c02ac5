"""Statistics by hand: a scripted workload on a clock that the test moves."""

from __future__ import annotations

import asyncio
import json
import logging
import re

import pytest

from deepinfer_compile.runtime import LLM, AsyncLLM, SamplingParams
from deepinfer_compile.runtime.loop import StepLoop
from deepinfer_compile.runtime.records import kernel_records
from deepinfer_compile.runtime.scheduler import Choice, Emitted, Finish, Kind, Load, StepPlan, Work
from deepinfer_compile.runtime.statistics import WINDOW, Statistics, Stats, step_flops
from tests.runtime.pretend import KERNELS, PLAN, pretend_engine

IDLE = Load(0, 0, 0.0, 0, 0, 0)
FLOPS = step_flops(PLAN, {kernel.name: kernel for kernel in KERNELS})


class Clock:
    now = 50.0

    def __call__(self):
        return self.now


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return pretend_engine(tmp_path_factory.mktemp("engines") / "pretend.engine")


@pytest.fixture
def llm(path):
    with LLM(path, threads=1) as llm:
        yield llm


def greedy(count, **more):
    return SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, **more)


def test_rates_of_a_scripted_workload(llm):
    """Two prompts of 8 and 4 tokens; a prefill step takes 2 s, a decode step 1 s."""
    clock = Clock()
    statistics = Statistics(FLOPS, peak=100.0, clock=clock)
    executor = llm.engine.executor
    forward = executor.forward

    def timed(phase, rows):
        clock.now += {"prefill": 2.0, "decode": 1.0}[phase]
        forward(phase, rows)

    executor.forward = timed
    loop = StepLoop(PLAN, executor, asynchronous=False, statistics=statistics)
    for length in (8, 4):
        loop.submit([7] * length, greedy(3))
        clock.now += 0.5
    kinds = []
    while loop.busy:
        before = clock.now
        loop.step()
        kinds.append(clock.now - before)
    # Prefill of 8 rows, a decode step of the first, prefill of 4, then decode steps of both.
    assert kinds == [2.0, 1.0, 2.0, 1.0, 1.0]
    clock.now += 3.0  # idle until we ask
    found = statistics.stats(loop.load)
    rows, sampled = 8 + 1 + 4 + 2 + 1, 1 + 1 + 1 + 2 + 1
    flops = rows * (7 + 1) + sampled * 3
    assert statistics.flops == flops
    assert found == Stats(
        steps=5,
        prompt_tokens_rate=12 / 10,
        completion_tokens_rate=6 / 10,
        running=0,
        waiting=0,
        page_usage=0.0,
        prefill_share=4 / 7,
        decode_share=3 / 7,
        reused_share=0.0,
        first_token_mean=((0.5 + 0.5 + 2) + (0.5 + 2 + 1 + 2)) / 2,
        first_token_max=5.5,
        finished=2,
        aborted=0,
        preempted=0,
        flops_rate=flops / 7,
        peak_share=pytest.approx(flops / 700),
    )


def test_steps_that_overlap_count_the_same(llm):
    """Their times do not hang together on a clock that both threads move; all else does."""
    found = []
    for asynchronous in (False, True):
        statistics = Statistics(FLOPS)
        executor = llm.engine.executor
        loop = StepLoop(PLAN, executor, asynchronous=asynchronous, statistics=statistics)
        for length in (8, 4):
            loop.submit([9] * length, greedy(3))
        while loop.busy:
            loop.step()
        loop.close()
        stats = statistics.stats(loop.load)
        assert stats.prefill_share + stats.decode_share == pytest.approx(1)
        assert 0 < stats.first_token_mean <= stats.first_token_max
        found.append((stats.steps, stats.finished, stats.running, statistics.flops))
    assert found[0] == found[1]


def step(kind, rows):
    return StepPlan(kind, (Work(0, 1, 0, rows, True),), (), (), (), ())


def test_nothing_happened_is_zeros():
    nothing = Statistics().stats(IDLE)
    assert nothing == Stats(*[0] * 16)
    assert str(nothing).startswith("[stats] steps=0 prompt_TPS=0.0 ")


def test_a_clock_that_stands_still_divides_by_nothing():
    statistics = Statistics(lambda step, sampled: 3, peak=0.0, clock=lambda: 5.0)
    statistics.arrived(0)
    statistics.begin()
    end = Emitted(0, Choice(1, 0.0), Finish.STOP)
    statistics.ran(step(Kind.PREFILL, 3), 1, [end])
    statistics.note([end], IDLE)
    found = statistics.stats(IDLE)
    assert (found.steps, found.finished, found.prompt_tokens_rate, found.flops_rate) == (1, 1, 0, 0)


def test_steps_that_have_left_the_window_do_not_count():
    clock = Clock()
    statistics = Statistics(clock=clock)
    statistics.begin()
    for rows in [1000] + [1] * WINDOW:
        clock.now += 1.0
        statistics.ran(step(Kind.PREFILL, rows), 0, [])
    assert statistics.stats(IDLE).prompt_tokens_rate == 1.0


def test_ends_are_counted_by_kind():
    statistics = Statistics()
    ends = [Emitted(0, None, Finish.ABORT), Emitted(1, Choice(3, 0.0), Finish.LENGTH)]
    load = Load(1, 4, 0.5, 2, 40, 10)
    statistics.note([*ends, Emitted(2, Choice(3, 0.0), None)], load)
    found = statistics.stats(load)
    assert (found.finished, found.aborted, found.preempted, found.running) == (1, 1, 2, 1)
    assert (found.waiting, found.page_usage, found.reused_share) == (4, 0.5, 0.25)


def test_at_the_end_of_the_longest_context_flops_are_the_bound(nano_engine):
    """In every bucket, of plan and manifest read as JSON."""
    plan = json.loads((nano_engine / "plan.json").read_text())
    manifest = json.loads((nano_engine / "manifest.json").read_text())
    of_kernel = {kernel["name"]: kernel["flops_per_row"] for kernel in manifest["kernels"]}
    with LLM(nano_engine, threads=1) as llm:
        flops = step_flops(llm.engine.plan, kernel_records(llm.engine.manifest, llm.engine.plan))
    end = plan["limits"]["max_context"] - 1
    bounds = {}
    for phase in plan["phases"]:
        for rows in (*phase["buckets"], phase["buckets"][-1] - 1):
            kernels = [
                next(v["kernel"] for v in step["variants"] if rows <= v["most_rows"])
                for step in phase["steps"]
            ]
            bounds[phase["name"], rows] = rows * sum(of_kernel[k] for k in kernels)
    for (phase, rows), bound in bounds.items():
        if phase != "sample":
            last = StepPlan(Kind(phase), (Work(0, 1, end, 1, True),) * rows, (), (), (), ())
            assert flops(last, 0) == bound > 0
        else:
            assert flops(last, rows) - flops(last, 0) == bound > 0


@pytest.mark.parametrize(("interval", "lines"), [("2", 5), ("0", 0), ("-1", 0), ("11", 0)])
def test_a_line_is_logged_every_so_many_steps(path, monkeypatch, caplog, interval, lines):
    """Ten steps: a prefill step and nine decode steps; nothing at all by default."""
    monkeypatch.setenv("DEEPINFER_LOGGING_INTERVAL_STEP", interval)
    with caplog.at_level(logging.INFO):
        with LLM(path, threads=1) as llm:
            llm.generate(prompt_token_ids=[[5]], sampling_params=greedy(10))
        assert caplog.messages == []
        with LLM(path, threads=1, disable_log_stats=False) as llm:
            llm.generate(prompt_token_ids=[[5]], sampling_params=greedy(10))
    assert len(caplog.messages) == lines
    if lines:
        number = r"[\d.]+%?"
        assert re.fullmatch(rf"\[stats\] steps=10( \w+={number})+", caplog.messages[-1])
        assert " running=1 " in caplog.messages[0]
        assert " finished=1 " in caplog.messages[-1]


def test_a_server_tells_its_statistics(path):
    async def run():
        llm = AsyncLLM(LLM(path, threads=1))
        _ = [piece async for piece in llm.generate([5] * 3, greedy(4))]
        await llm.close()
        return llm.stats(), llm.metrics()

    stats, text = asyncio.run(run())
    assert (stats.steps, stats.finished, stats.running) == (4, 1, 0)
    flops = 3 * 8 + 3 + 3 * (8 + 3)
    assert f'deepinfer:estimated_flops_per_gpu_total{{model_name="made"}} {flops}\n' in text
