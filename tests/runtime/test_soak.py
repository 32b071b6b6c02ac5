"""Random requests by the thousand: every counter is where it was, and nobody changed another."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from deepinfer_compile.runtime import LLM, SamplingParams
from deepinfer_compile.runtime.grammar.library import Library
from deepinfer_compile.runtime.grammar.pool import GrammarPool
from deepinfer_compile.runtime.loop import StepLoop
from deepinfer_compile.runtime.scheduler import Finish
from tests.runtime.structured_cases import REGEXES

POOL = 24  # pages of 64 tokens for 8 requests of up to 300: it runs full now and then
STARTS = [[random.Random(i).randrange(3, 256) for _ in range(200)] for i in range(3)]


def request(rng):
    """Mostly short, some as long as several pages, some beginning like others; every setting that a
    request has."""
    length = rng.choice([rng.randrange(1, 12), rng.randrange(1, 70), rng.randrange(100, 180)])
    shared = rng.choice(STARTS)[: rng.choice([0, 0, 64, 100, 128])]
    prompt = [*shared, *(rng.randrange(3, 256) for _ in range(length))]
    structure = None
    if rng.random() < 0.1:
        pattern = rng.choice([*REGEXES[:5], "(", "[a-z]{3}"])
        structure = {"schema_type": "regex", "schema": pattern}
    params = SamplingParams(
        temperature=rng.choice([0.0, 0.7, 1.5]),
        top_p=rng.choice([1.0, 0.9]),
        top_k=rng.choice([-1, 5, 40]),
        max_tokens=rng.choice([1, 2, 9, 30]),
        top_logprobs=rng.choice([0, 0, 3]),
        ignore_eos=structure is None and rng.random() < 0.5,
        stop_token_ids=rng.choice([None, [7, 99]]),
        seq_seed=rng.getrandbits(64),
        so_args=structure,
        presence_penalty=rng.choice([0, 0, 0, 1.5]),
        repetition_penalty=rng.choice([1, 1, 1, 1.3]),
        logit_bias=rng.choice([None, None, {9: 5.0, 200: -100}]),
        golden_token_ids=rng.choice([None, None, [-1, 40, 41]]) if structure is None else None,
        prompt_logprobs=rng.random() < 0.1,
    )
    return prompt, params, rng.choice([0, 0, 0, 1, -1])


@pytest.fixture
def llm(nano_engine):
    llm = LLM(nano_engine, threads=1)
    yield llm
    llm.close()


@pytest.mark.parametrize("count", [150, pytest.param(10_000, marks=pytest.mark.slow)])
def test_soak_ends_with_every_counter_at_its_start_value(llm, count):
    engine = llm.engine
    pool = GrammarPool(Library(llm.get_tokenizer(), engine.plan.limits.vocab_size).compile)
    plan = replace(engine.plan, limits=replace(engine.plan.limits, pages=POOL + 1))
    loop = StepLoop(plan, engine.executor, grammars=lambda: pool)
    start = loop.load
    rng = random.Random(count)
    asked, tokens, ends = {}, {}, {}
    while len(asked) < count or loop.busy:
        for _ in range(rng.choice([0, 0, 1, 2, 6]) if len(asked) < count else 0):
            made = request(rng)
            asked[loop.submit(made[0], made[1], None, made[2])] = made
        if rng.random() < 0.05 and asked:
            loop.abort(rng.choice(list(asked)[-20:]))
        for event in loop.step():
            if event.choice is not None:
                tokens.setdefault(event.id, []).append(event.choice.token)
            if event.finish is not None:
                assert event.id not in ends
                ends[event.id] = event.finish
    assert ends.keys() == asked.keys()
    end = loop.load
    assert replace(end, preemptions=0, prefix_queries=0, prefix_hits=0) == start
    assert end.preemptions > 0
    assert end.prefix_hits > 0
    assert {Finish.STOP, Finish.LENGTH, Finish.ABORT, Finish.GRAMMAR} == {*ends.values()}
    whole = [id for id, end in ends.items() if end in (Finish.STOP, Finish.LENGTH)]
    for id in rng.sample(whole, 25):
        prompt, params, _ = asked[id]
        alone = StepLoop(engine.plan, engine.executor, grammars=lambda: pool, asynchronous=False)
        alone.submit(prompt, params)
        found = []
        while alone.busy:
            found += [event.choice.token for event in alone.step()]
        assert tokens[id] == found, id
    loop.close()
    pool.close()
