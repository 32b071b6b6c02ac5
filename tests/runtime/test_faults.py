"""What fails ends what it belongs to, is told once, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from deepinfer_compile.runtime import LLM, AsyncLLM, EngineError, RequestError, SamplingParams
from deepinfer_compile.runtime.metrics import Metrics
from deepinfer_compile.runtime.reply import Reply
from deepinfer_compile.runtime.text_stream import TextStream
from deepinfer_compile.runtime.worker import Ticket, Worker
from tests.runtime.pretend import answer, pretend_engine


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return pretend_engine(tmp_path_factory.mktemp("engines") / "pretend.engine")


def greedy(count=16, **more):
    return SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, **more)


def tokens(outputs):
    return [[token.token_id for token in one] for one in outputs]


def failing(llm, failure, at):
    """Step number `at` from now on raises, as if the engine had."""

    def fail():
        raise failure

    planting(llm, fail, at)


def planting(llm, deed, at):
    """Something that happens once, when step number `at` begins."""
    forward, steps = llm.engine.executor.forward, iter(range(at))

    def planted(*step):
        if next(steps, None) is None:
            llm.engine.executor.forward = forward
            deed()
        forward(*step)

    llm.engine.executor.forward = planted


def collect(pieces):
    async def run():
        return [piece async for piece in pieces]

    return run()


def test_a_batch_whose_step_fails_is_refused_from_then_on(path):
    """Not answered from memory that a broken step left; another object of the engine is."""
    with LLM(path, threads=1, decode_sequence=False) as llm:
        failing(llm, MemoryError("planted"), at=3)
        asked = {"prompt_token_ids": [[5], [6]], "sampling_params": greedy()}
        for ask in (llm.generate, llm.generate, lambda **more: list(llm.stream(**more))):
            with pytest.raises(EngineError) as caught:
                ask(**asked)
            assert caught.value.code == "E071"
            assert caught.value.message == "the engine stopped: MemoryError: planted"
            assert "load the engine again" in caught.value.help
        with pytest.raises(EngineError, match="E071"):
            AsyncLLM(llm)
        with LLM(path, threads=1, decode_sequence=False) as fresh:
            assert tokens(fresh.generate(**asked)) == [
                answer([n], 16, ignore_eos=True) for n in (5, 6)
            ]


@pytest.mark.parametrize("at", [0, 1, 5])
def test_an_interrupted_batch_leaves_the_engine_usable(path, at):
    """Wherever the host is; also while whoever caught the interrupt still holds its traceback."""
    with LLM(path, threads=1, decode_sequence=False) as llm:
        main = threading.main_thread().ident
        planting(llm, lambda: signal.pthread_kill(main, signal.SIGINT), at)
        with pytest.raises(KeyboardInterrupt) as caught:
            llm.generate(prompt_token_ids=[[5] * 20, [6]], sampling_params=greedy())
        outputs = llm.generate(prompt_token_ids=[[6], [7] * 9], sampling_params=greedy())
        assert tokens(outputs) == [answer(p, 16, ignore_eos=True) for p in ([6], [7] * 9)]
        assert caught.tb is not None


def test_interrupts_do_not_leave_the_device_at_work(path):
    """Not the first, nor those that come while the batch is given up: the next one would share its
    memory with a step of the last."""
    with LLM(path, threads=1, decode_sequence=False) as llm:
        main, ended = threading.main_thread().ident, []

        def interrupt():
            for _ in range(3):
                signal.pthread_kill(main, signal.SIGINT)
                time.sleep(0.05)
            ended.append(True)

        planting(llm, interrupt, 2)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(prompt_token_ids=[[5] * 20, [6]], sampling_params=greedy())
        assert ended
        outputs = llm.generate(prompt_token_ids=[[6], [7] * 9], sampling_params=greedy())
        assert tokens(outputs) == [answer(p, 16, ignore_eos=True) for p in ([6], [7] * 9)]


def test_a_refused_batch_takes_nothing_from_the_next(path):
    """Neither what prompts share, nor the words for an empty one."""
    with LLM(path, threads=1, decode_sequence=False) as llm:
        asked = {"prompt_token_ids": [[5] * 33], "sampling_params": greedy(1)}
        llm.generate(**asked)
        for ask in (llm.generate, lambda *more: list(llm.stream(*more))):
            with pytest.raises(RequestError, match=r"E031.*stop_token_ids"):
                ask(None, [greedy(), greedy(stop_token_ids=[999])], [[6], [7]])
            with pytest.raises(RequestError, match="E030"):
                ask(None, greedy(), [[]])
        ((again,),) = llm.generate(**asked)
        assert again.num_cached_tokens == 32


def test_an_open_stream_says_that_its_engine_was_closed(path):
    llm = LLM(path, threads=1)
    pieces = llm.stream(prompt_token_ids=[[5]], sampling_params=greedy())
    next(pieces)
    llm.close()
    with pytest.raises(EngineError, match=r"E021.*the engine is closed"):
        list(pieces)


def test_a_fork_is_refused_and_leaves_its_parent_alone(path):
    """Where threads are missing nothing waits for them, and a new engine can be loaded."""
    script = (
        "import asyncio, os, signal, sys\n"
        "from deepinfer_compile.runtime import LLM, AsyncLLM, EngineError\n"
        "async def first(llm):\n"
        "    return [piece async for piece in llm.generate([5])]\n"
        "def ask(llm):\n"
        "    llm.generate(prompt_token_ids=[[5]])\n"
        "def refused(do, llm):\n"
        "    try:\n"
        "        do(llm)\n"
        "    except EngineError as error:\n"
        "        return error.code == 'E073'\n"
        "batch, served = LLM(sys.argv[1]), LLM(sys.argv[1])\n"
        "ask(batch)\n"
        "llm, wait = AsyncLLM(served), lambda llm: asyncio.run(first(llm))\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    signal.alarm(20)\n"
        "    assert refused(ask, batch) and refused(wait, llm)\n"
        "    batch.close()\n"
        "    asyncio.run(llm.close())\n"
        "    with LLM(sys.argv[1]) as own:\n"
        "        ask(own)\n"
        "    print('loaded')\n"
        "else:\n"
        "    assert os.waitpid(child, 0)[1] == 0\n"
        "    ask(batch), wait(llm), asyncio.run(llm.close()), batch.close()\n"
        "    print('unharmed')\n"
    )
    command = [sys.executable, "-c", script, str(path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (ended.stdout, ended.stderr) == ("loaded\nunharmed\n", "")


def broken(monkeypatch, name, at):
    """The first text that gets to its `at`-th call of `name` raises there."""
    real, seen = getattr(TextStream, name), []

    def planted(self, *arguments):
        seen.append(self)
        if self is seen[0] and seen.count(self) > at:
            raise ZeroDivisionError("planted")
        return real(self, *arguments)

    monkeypatch.setattr(TextStream, name, planted)


@pytest.mark.parametrize(("name", "at"), [("add", 0), ("add", 7), ("take", 2), ("close", 0)])
def test_a_text_that_fails_is_its_own_requests_trouble(path, monkeypatch, name, at):
    """While it runs, and with its last token."""
    broken(monkeypatch, name, at)

    async def run():
        llm = AsyncLLM(LLM(path, threads=1))
        asked = [collect(llm.generate([n], greedy(20))) for n in (5, 6, 7)]
        done = await asyncio.wait_for(asyncio.gather(*asked, return_exceptions=True), 20)
        after = await collect(llm.generate([8], greedy(3)))
        await llm.close()
        return *done, after

    bad, *good = asyncio.run(run())
    assert isinstance(bad, ZeroDivisionError)
    expect = [answer([n], 20, ignore_eos=True) for n in (6, 7)] + [answer([8], 3, ignore_eos=True)]
    assert [[piece.token.token_id for piece in one] for one in good] == expect


def test_a_batch_raises_what_its_text_fails_with_and_goes_on(path, monkeypatch):
    with LLM(path, threads=1) as llm:
        expect = llm.generate(["a", "b"], greedy())
        broken(monkeypatch, "add", 5)
        with pytest.raises(ZeroDivisionError):
            llm.generate(["a", "b"], greedy())
        monkeypatch.undo()
        assert llm.generate(["a", "b"], greedy()) == expect


def test_a_grammar_that_cannot_begin_is_its_own_requests_trouble(path):
    def refuse():
        raise EngineError("E464", "planted")

    async def run():
        batch = LLM(path, threads=1)
        batch._grammar_pool = refuse
        llm = AsyncLLM(batch)
        structured = greedy(so_args={"schema_type": "regex", "schema": "a"})
        asked = [collect(llm.generate([5], params)) for params in (structured, greedy())]
        done = await asyncio.wait_for(asyncio.gather(*asked, return_exceptions=True), 20)
        await llm.close()
        return done

    bad, good = asyncio.run(run())
    assert bad.code == "E464"
    assert [piece.token.token_id for piece in good] == answer([5], 16, ignore_eos=True)


def test_an_owner_who_does_not_listen_ends_his_request_alone(path):
    heard, done = [], threading.Event()

    def listen(piece):
        heard.append(piece.token.token_id)
        if piece.token.finished:
            done.set()

    def refuse(piece):
        raise RuntimeError("planted")

    with LLM(path, threads=1) as llm:
        metrics = Metrics()
        worker = Worker(llm.hand_over(), metrics)
        for prompt, deliver in (([5], refuse), ([6], listen)):
            worker.submit(Ticket(prompt, greedy(20), 0, Reply(1, prompt[-1], None), deliver, 0))
        assert done.wait(20)
        worker.close(drain=True)
    assert heard == answer([6], 20, ignore_eos=True)
    assert sorted(reason.value for reason in metrics.finished.elements()) == ["abort", "length"]


def test_a_failed_step_is_logged_once_with_its_header(path, caplog):
    async def run():
        batch = LLM(path, threads=1)
        failing(batch, MemoryError("planted"), at=2)
        llm = AsyncLLM(batch)
        asked = [collect(llm.generate([n], greedy())) for n in (5, 6, 7)]
        done = await asyncio.gather(*asked, return_exceptions=True)
        with pytest.raises(EngineError, match="E071"):
            await collect(llm.generate([5], greedy()))
        await llm.close()
        return [error.code for error in done]

    with caplog.at_level(logging.DEBUG):
        assert asyncio.run(run()) == ["E071"] * 3
    (record,) = (record for record in caplog.records if record.levelno >= logging.ERROR)
    assert record.getMessage().startswith("error[E071]: the engine stopped: MemoryError: planted\n")
    assert record.exc_info[0] is MemoryError


def threads():
    """Of this process, those of the engine's library included."""
    return {entry.name for entry in Path("/proc/self/task").iterdir()}


@pytest.mark.parametrize("fails", [False, True])
def test_no_thread_is_left_after_close(nano_engine, fails):
    """Nor after a failure: the engine's own four, the step loop's, and the grammars'."""
    before = threads()

    async def run():
        batch = LLM(nano_engine, threads=4)
        llm = AsyncLLM(batch)
        so_args = {"schema_type": "regex", "schema": "[ab]{3}"}
        await collect(llm.generate("Hello", greedy(4, so_args=so_args)))
        assert len(threads() - before) >= 5
        if fails:
            failing(batch, MemoryError("planted"), at=0)
            with pytest.raises(EngineError, match="E071"):
                await collect(llm.generate("Hello", greedy(4)))
        await llm.close()

    asyncio.run(run())
    for _ in range(1000):
        if threads() <= before:
            return
        threading.Event().wait(0.01)  # grammar threads end by themselves
    raise AssertionError(threads() - before)


def family(session):
    """Processes of a session, zombies not counted."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, _, sid, *_ = stat.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(sid) == session and state != "Z":
            found.append(int(stat.parent.name))
    return found


def test_a_killed_server_leaves_no_process(path):
    """It has no children to leave."""
    script = (
        "import sys; from deepinfer_compile.runtime import LLM, SamplingParams\n"
        "llm = LLM(sys.argv[1])\n"
        "while True:\n"
        "    llm.generate('a', SamplingParams(max_tokens=4), use_tqdm=False)\n"
        "    print(flush=True)\n"
    )
    command = [sys.executable, "-c", script, str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) as server:
        assert server.stdout.readline() == b"\n"
        assert family(server.pid) == [server.pid]
        os.kill(server.pid, signal.SIGKILL)
        server.wait(10)
    assert family(server.pid) == []
