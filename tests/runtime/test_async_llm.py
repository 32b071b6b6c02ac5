"""`AsyncLLM` and its metrics over a pretended model: many tasks, and every way to end."""

from __future__ import annotations

import asyncio
import random
import threading
import time

import pytest

from deepinfer_compile.runtime import LLM, AsyncLLM, EngineError, RequestError, SamplingParams
from deepinfer_compile.runtime.grammar.library import Library
from deepinfer_compile.runtime.grammar.pool import GrammarPool
from deepinfer_compile.runtime.metrics import Metrics
from deepinfer_compile.runtime.scheduler import Choice, Emitted, Finish, Load
from tests.runtime.pretend import answer, pretend_engine


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return pretend_engine(tmp_path_factory.mktemp("engines") / "pretend.engine")


def greedy(count=16, **more):
    return SamplingParams(temperature=0, max_tokens=count, **more)


async def collect(llm, prompt, params, **more):
    return [piece async for piece in llm.generate(prompt, params, **more)]


def tokens(pieces):
    return [piece.token.token_id for piece in pieces]


def slow(path):
    """An engine whose steps take a while: what is asked while it runs finds it running."""
    llm = LLM(path, threads=1)
    forward = llm.engine.executor.forward
    llm.engine.executor.forward = lambda *step: (time.sleep(0.01), forward(*step))
    return llm


def serve(path, work, load=lambda path: LLM(path, threads=1)):
    """What `work(llm)` returns, on an engine that is closed afterwards."""

    async def run():
        llm = AsyncLLM(load(path))
        try:
            return await work(llm)
        finally:
            await llm.close()

    return asyncio.run(run())


def test_tasks_get_the_answers_of_their_prompts_alone(path):
    rng = random.Random(3)
    batch = [[rng.randrange(2, 256) for _ in range(rng.randrange(1, 40))] for _ in range(30)]

    async def one(llm, prompt):
        await asyncio.sleep(rng.random() / 50)
        return tokens(await collect(llm, prompt, greedy(12, ignore_eos=True)))

    found = serve(path, lambda llm: asyncio.gather(*(one(llm, prompt) for prompt in batch)))
    assert found == [answer(prompt, 12, ignore_eos=True) for prompt in batch]


def test_pieces_come_before_the_last_one_exists(path):
    async def work(llm):
        pieces = llm.generate([5], greedy(50, ignore_eos=True))
        first = await anext(pieces)
        running = llm.metrics()
        await pieces.aclose()
        return first, running

    first, running = serve(path, work, slow)
    assert not first.token.finished
    assert 'num_requests_running{model_name="made"} 1' in running


def test_text_is_that_of_the_batch_interface(path):
    llm = LLM(path, threads=1)
    params = greedy(20, ignore_eos=True, stop=["q"])
    (text,) = llm.generate("Hello", params)
    llm.close()
    pieces = serve(path, lambda llm: collect(llm, "Hello", params))
    assert "".join(piece.text for piece in pieces) == text
    assert pieces[-1].token.finished


def test_abort_ends_a_request_with_its_reason_and_frees_its_place(path):
    async def work(llm):
        slow = asyncio.create_task(
            collect(llm, [5], greedy(60, ignore_eos=True), request_id="slow")
        )
        while not llm.abort("slow"):
            await asyncio.sleep(0)
        pieces = await slow
        return pieces, llm.abort("slow"), await collect(llm, [7], greedy(3, ignore_eos=True))

    pieces, again, after = serve(path, work, slow)
    assert (pieces[-1].token.finish_reason, again) == ("abort", False)
    assert tokens(after) == answer([7], 3, ignore_eos=True)


def test_leaving_early_or_cancelling_frees_the_place(path):
    async def work(llm):
        async for _ in llm.generate([5], greedy(60, ignore_eos=True)):
            break
        task = asyncio.create_task(collect(llm, [6], greedy(60, ignore_eos=True)))
        await asyncio.sleep(0.02)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await collect(llm, [7], greedy(3))
        while 'num_requests_running{model_name="made"} 0' not in llm.metrics():
            await asyncio.sleep(0.001)
        return True

    assert serve(path, work, slow)


def test_the_batch_interface_is_refused_once_it_was_handed_over(path):
    async def run():
        batch = LLM(path, threads=1)
        llm = AsyncLLM(batch)
        with pytest.raises(RequestError) as refused:
            batch.generate("Hello")
        with pytest.raises(RequestError):
            AsyncLLM(batch)
        await llm.close()
        return refused.value.code

    assert asyncio.run(run()) == "E037"


def test_bad_requests_are_refused_before_they_are_queued(path):
    async def work(llm):
        for prompt, code in (([], "E030"), ([5, 999], "E031"), ([5] * 64, "E032")):
            with pytest.raises(RequestError) as caught:
                await collect(llm, prompt, greedy())
            assert caught.value.code == code
        twice = [collect(llm, [5], greedy(40, ignore_eos=True), request_id="a") for _ in range(2)]
        done = await asyncio.gather(*twice, return_exceptions=True)
        return [result.code for result in done if isinstance(result, RequestError)]

    assert serve(path, work, slow) == ["E036"]


def test_a_text_that_cannot_be_decoded_ends_its_request_alone(path, monkeypatch):
    from deepinfer_compile.runtime.text_stream import TextStream

    real, seen = TextStream.add, []

    def add(self, token):
        seen.append(self)
        if self is seen[0] and len(seen) > 3:
            raise ZeroDivisionError("planted")
        return real(self, token)

    monkeypatch.setattr(TextStream, "add", add)

    async def work(llm):
        asked = [collect(llm, [n], greedy(20, ignore_eos=True)) for n in (5, 6, 7)]
        return await asyncio.gather(*asked, return_exceptions=True)

    bad, *good = serve(path, work)
    assert isinstance(bad, ZeroDivisionError)
    assert [tokens(one) for one in good] == [answer([n], 20, ignore_eos=True) for n in (6, 7)]


def test_when_a_step_fails_everybody_hears_of_it_and_nobody_waits(path):
    async def work(llm):
        def fail(*_):
            raise MemoryError("planted")

        llm._llm.engine.executor.forward = fail
        asked = [collect(llm, [n], greedy()) for n in (5, 6, 7)]
        done = await asyncio.gather(*asked, return_exceptions=True)
        with pytest.raises(EngineError) as later:
            await collect(llm, [5], greedy())
        return [error.code for error in (*done, later.value)], str(later.value)

    codes, text = serve(path, work)
    assert codes == ["E071"] * 4
    assert "MemoryError: planted" in text


@pytest.mark.parametrize("drain", [True, False])
def test_close_answers_or_aborts_what_runs_and_takes_nothing_more(path, drain):
    async def run():
        llm = AsyncLLM(slow(path))
        task = asyncio.create_task(collect(llm, [5], greedy(50, ignore_eos=True)))
        while 'generation_tokens_total{model_name="made"} 0' in llm.metrics():
            await asyncio.sleep(0)
        await llm.close(drain=drain)
        with pytest.raises(RequestError) as refused:
            await collect(llm, [5], greedy())
        return await task, refused.value.code

    pieces, code = asyncio.run(run())
    assert code == "E072"
    whole = answer([5], 50, ignore_eos=True)
    assert pieces[-1].token.finish_reason == ("length" if drain else "abort")
    made = tokens(pieces) if drain else tokens(pieces)[:-1]
    assert made == whole[: len(made)]
    assert (len(made) == 50) == drain


def test_metrics_say_what_happened_by_an_injected_clock():
    now = 100.0
    metrics = Metrics(lambda: now)
    metrics.arrived(1, prompt_tokens=30)
    metrics.arrived(2, prompt_tokens=5)
    for seconds, event in (
        (0.02, Emitted(1, Choice(5, -1.0), None)),
        (0.3, Emitted(1, Choice(6, -1.0), Finish.STOP)),
        (9.0, Emitted(2, None, Finish.ABORT)),
    ):
        now += seconds
        metrics.emitted(event)
    load = Load(1, 2, 0.25, 3, 700, 512)
    text = metrics.text(load, 4000, {"model_name": 'a"b\\c'})
    samples = dict(line.rsplit(" ", 1) for line in text.splitlines() if line[0] != "#")
    assert len(samples) == sum(line[0] != "#" for line in text.splitlines())
    label = 'model_name="a\\"b\\\\c"'

    def value(name, more=""):
        return float(samples[f"deepinfer:{name}{{{label}{more}}}"])

    assert value("num_requests_running") == 1
    assert value("num_requests_waiting") == 2
    assert value("kv_cache_usage_perc") == 0.25
    assert value("num_preemptions_total") == 3
    assert value("prefix_cache_queries_total") == 700
    assert value("prefix_cache_hits_total") == 512
    assert value("estimated_flops_per_gpu_total") == 4000
    assert (value("prompt_tokens_total"), value("generation_tokens_total")) == (35, 2)
    reasons = {r: value("request_success_total", f',finished_reason="{r.value}"') for r in Finish}
    assert {r for r, count in reasons.items() if count} == {Finish.STOP, Finish.ABORT}
    first = "time_to_first_token_seconds"
    assert value(f"{first}_bucket", ',le="0.01"') == 0
    assert value(f"{first}_bucket", ',le="0.05"') == value(f"{first}_bucket", ',le="+Inf"') == 1
    assert value("inter_token_latency_seconds_sum") == pytest.approx(0.3)
    assert value("e2e_request_latency_seconds_count") == 2
    assert value("e2e_request_latency_seconds_sum") == pytest.approx(0.32 + 9.32)
    helped = {line.split()[2] for line in text.splitlines() if line.startswith("# HELP")}
    typed = {line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")}
    assert helped == typed


def held(schema, **keys):
    return greedy(30, so_args={"schema_type": "regex", "schema": schema} | keys)


def test_a_request_is_served_that_comes_while_a_grammar_compiles(path):
    """With nothing else to run the loop waits for the grammar, but never for long."""
    release = threading.Event()

    def load(path):
        llm = LLM(path, threads=1)
        library = Library(llm.get_tokenizer(), llm.engine.plan.limits.vocab_size)

        def compile(type, schema):
            assert release.wait(60)
            return library.compile(type, schema)

        llm._grammars = GrammarPool(compile)
        return llm

    async def work(llm):
        waiting = asyncio.create_task(collect(llm, [3], held("ab{2}c")))
        await asyncio.sleep(0.1)
        free = await asyncio.wait_for(collect(llm, [5, 6], greedy(ignore_eos=True)), 5)
        assert not waiting.done()
        release.set()
        return tokens(free), "".join(piece.text for piece in await waiting)

    assert serve(path, work, load) == (answer([5, 6], 16, ignore_eos=True), "abbc")


def test_bad_so_args_are_their_own_requests_trouble(path):
    async def work(llm):
        with pytest.raises(RequestError, match="so_args has token ids outside the vocabulary: 256"):
            await collect(llm, [3], held("a", trigger_token_ids=[256]))
        bad = await collect(llm, [3], held("a("))
        return bad, "".join(piece.text for piece in await collect(llm, [3], held("abc")))

    (bad,), good = serve(path, work)
    assert (bad.token.finish_reason, bad.text) == ("xgrammar runtime errors or timeout", "")
    assert "unclosed group" in bad.token.error
    assert good == "abc"


def test_a_scrape_in_the_middle_of_a_step_agrees_with_itself():
    """The loop's thread counts another token while the text is written."""
    metrics = Metrics(lambda: 0.0)
    histogram = metrics.first_token
    histogram.add(0.2)

    class Counting(list):
        def __iter__(self):
            yield from list.__iter__(self)
            histogram.counts[0] += 1

    histogram.counts = Counting(histogram.counts)
    lines = metrics.text(Load(0, 0, 0.0, 0, 0, 0), 0, {"model_name": "m"}).splitlines()
    (last,) = (
        line for line in lines if "time_to_first_token_seconds_bucket" in line and "+Inf" in line
    )
    (count,) = (line for line in lines if "time_to_first_token_seconds_count" in line)
    assert last.split()[1] == count.split()[1]
