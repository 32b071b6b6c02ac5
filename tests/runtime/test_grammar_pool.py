"""Grammars compile beside the loop: one slow or broken schema is its own request's matter."""

from __future__ import annotations

import threading
import time

import pytest

from deepinfer_compile.runtime import LLM, SamplingParams
from deepinfer_compile.runtime.grammar.asked import SchemaType, Structure
from deepinfer_compile.runtime.grammar.errors import GrammarError
from deepinfer_compile.runtime.grammar.library import Library
from deepinfer_compile.runtime.grammar.pool import GrammarPool
from deepinfer_compile.runtime.scheduler import Finish
from tests.runtime.pretend import PLAN, answer, pretend_engine

FREE = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


def regex(schema):
    return SamplingParams(
        so_args={"schema_type": "regex", "schema": schema}, temperature=0, max_tokens=30
    )


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    llm = LLM(pretend_engine(tmp_path_factory.mktemp("engines") / "pretend.engine"), threads=1)
    yield llm
    llm.close()


class Compiler:
    """The library, but schemas with an S wait for `release`; counts what it compiled."""

    def __init__(self, llm):
        self.release = threading.Event()
        self.compiled = []
        self.most = self.now = 0
        self._library = Library(llm.get_tokenizer(), PLAN.limits.vocab_size)
        self._lock = threading.Lock()

    def __call__(self, type, schema):
        with self._lock:
            self.compiled.append(schema)
            self.now += 1
            self.most = max(self.most, self.now)
        if "S" in schema:
            assert self.release.wait(60)
        with self._lock:
            self.now -= 1
        return self._library.compile(type, schema)


@pytest.fixture
def compiler(llm):
    compiler = Compiler(llm)
    yield compiler
    compiler.release.set()


@pytest.fixture(autouse=True)
def loop_of_its_own(llm):
    """A step loop keeps its pool."""
    llm._drop_loop()


@pytest.fixture
def use(llm, compiler, monkeypatch):
    """Makes the engine use a pool of this compiler."""
    pools = []

    def use(**options):
        pools.append(GrammarPool(compiler, **options))
        monkeypatch.setattr(llm, "_grammars", pools[-1])
        return pools[-1]

    yield use
    compiler.release.set()
    for pool in pools:
        pool.close()


def grammar_threads():
    return [t for t in threading.enumerate() if t.name.startswith("grammar")]


def run(loop, until=lambda events: False):
    events = []
    while loop.busy and not until(events):
        events += loop.step()
    return events


def tokens(events, id):
    return [e.choice.token for e in events if e.id == id and e.choice]


def test_a_slow_grammar_stalls_nobody_and_joins_when_it_is_there(llm, compiler, use):
    use()
    loop = llm._step_loop()
    slow = loop.submit([9, 9], regex("S+d"))
    quick = loop.submit([9, 9], regex("qu(i|c)k"))
    free = loop.submit([5, 6], FREE)
    events = run(loop, lambda events: {e.id for e in events if e.finish} == {quick, free})
    assert slow not in {e.id for e in events}
    assert tokens(events, free) == answer([5, 6], 12, ignore_eos=True)
    compiler.release.set()
    events = run(loop)
    assert {e.id for e in events} == {slow}
    assert bytes(tokens(events, slow)).startswith(b"S")


def test_a_grammar_that_takes_too_long_ends_its_request(llm, compiler, use):
    use(threads=2, seconds=0.2)
    loop = llm._step_loop()
    ids = [loop.submit([7], regex(f"S{i}")) for i in range(5)]  # more than there are threads
    begun = time.monotonic()
    events = run(loop)
    assert time.monotonic() - begun < 5
    assert [(e.id, e.choice, e.finish) for e in events] == [(i, None, Finish.GRAMMAR) for i in ids]
    assert {e.error for e in events} == {"so_args: the grammar did not compile within 0.2 s"}
    assert compiler.most <= 2


def test_threads_are_bounded_and_end(llm, compiler, use):
    before = set(grammar_threads())
    pool = use(threads=3)
    tickets = [pool.ask(Structure(SchemaType.REGEX, f"S{i}")) for i in range(20)]
    assert all(pool.answer(ticket) is None for ticket in tickets)
    mine = set(grammar_threads()) - before
    assert 1 <= len(mine) <= 3
    pool.close()
    compiler.release.set()
    for thread in mine:
        thread.join(10)
        assert not thread.is_alive()
    assert len(compiler.compiled) <= 3  # the others never began


def test_a_schema_compiles_once_and_each_request_has_its_own_place(llm, compiler, use):
    use()
    texts = llm.generate(["a", "b", "c"], [regex("x(y|z){3}")] * 3, use_tqdm=False)
    texts += llm.generate(["d"], [regex("x(y|z){3}")], use_tqdm=False)
    assert compiler.compiled == ["x(y|z){3}"]
    assert all(len(text) == 4 and text[0] == "x" and set(text[1:]) <= {"y", "z"} for text in texts)


def test_the_oldest_schemas_are_forgotten(compiler, use):
    pool = use(threads=1, kept=2)
    for schema in "abacb":  # a is used again, so b goes when c comes
        ticket = pool.ask(Structure(SchemaType.REGEX, schema))
        while pool.answer(ticket) is None:
            time.sleep(0.001)
    assert compiler.compiled == ["a", "b", "c", "b"]


def test_a_broken_schema_is_remembered_too(compiler, use):
    pool = use()
    for _ in range(2):
        ticket = pool.ask(Structure(SchemaType.REGEX, "("))
        while not ticket.future.done():
            time.sleep(0.001)
        with pytest.raises(GrammarError, match="unclosed group"):
            pool.answer(ticket)
    assert compiler.compiled == ["("]


def test_a_request_may_be_aborted_while_its_grammar_compiles(llm, compiler, use):
    use()
    loop = llm._step_loop()
    gone, stays = loop.submit([4], regex("S")), loop.submit([4], regex("Sx"))
    loop.step()
    loop.abort(gone)
    compiler.release.set()
    events = run(loop)
    assert [(e.finish, e.choice) for e in events if e.id == gone] == [(Finish.ABORT, None)]
    assert tokens(events, stays)[:2] == [ord("S"), ord("x")]
    assert not loop.busy


def test_an_unexpected_error_of_the_library_ends_its_request_alone(llm, monkeypatch):
    def broken(type, schema):
        raise RuntimeError("boom")

    pool = GrammarPool(broken)
    monkeypatch.setattr(llm, "_grammars", pool)
    loop = llm._step_loop()
    bad, free = loop.submit([3], regex("a")), loop.submit([5, 6], FREE)
    events = run(loop)
    pool.close()
    assert [e.error for e in events if e.id == bad] == ["so_args: RuntimeError: boom"]
    assert tokens(events, free) == answer([5, 6], 12, ignore_eos=True)


def test_a_grammar_that_cannot_go_on_ends_its_request_and_gives_its_place_back(llm):
    """Bytes 0 and 1 are special tokens here: no text holds them. More requests than slots."""
    loop = llm._step_loop()
    stuck = [loop.submit([3, i], regex(r"a[\x00\x01]b")) for i in range(2, 12)]
    good = loop.submit([3], regex("a{3}"))
    events = run(loop)
    for id in stuck:
        token, end = (event for event in events if event.id == id)
        assert (token.choice.token, token.finish) == (ord("a"), None)
        assert (end.choice, end.finish) == (None, Finish.GRAMMAR)
        assert end.error == (
            "so_args: the grammar needs text here that no token of the vocabulary has"
        )
    assert bytes(tokens(events, good)[:3]) == b"aaa"
