"""Bits of a real model do not depend on how a prompt was cut, who else ran, or where state lay."""

from __future__ import annotations

import dataclasses
import math

import pytest

from deepinfer_compile.format.plan import MemoryClass
from deepinfer_compile.runtime import LLM, SamplingParams
from deepinfer_compile.runtime.loader import load_engine
from deepinfer_compile.runtime.loop import StepLoop
from deepinfer_compile.runtime.request_rows import Span, fill_rows
from tests import engines
from tests.runtime.drive import Solo, chunks_of, poison

LENGTH = 230  # past the window, the candidate blocks and several pages; one chunk takes it all
NEW = 12


def prompt_of(length, seed=0):
    """Tokens with repeats, so that n-grams and index scores have something to find."""
    tokens = [(i * i * 31 + seed * 101 + 7) % 251 + 3 for i in range(length)]
    for i in range(60, length, 9):
        tokens[i : i + 4] = tokens[10:14]
    return tokens[:length]


@pytest.fixture(scope="module")
def executor(nano_engine):
    engine = load_engine(nano_engine, threads=2)
    yield engine.executor
    engine.close()


@pytest.fixture(scope="module")
def one_shot(executor):
    """The reference: the whole prompt in one chunk."""
    return run(executor, [LENGTH])


def run(executor, chunks):
    poison(executor)
    solo = Solo(executor, prompt_of(LENGTH)).feed(chunks)
    after_prompt = solo.save()
    tokens = solo.generate(NEW, chunks[-1])
    return tokens, solo.logprobs, after_prompt, solo.save()


def test_the_prompt_reaches_what_it_should_test(executor):
    rings = [s.length for s in executor.plan.states if s.name.endswith("window")]
    assert rings
    assert executor.phase("prefill").max_rows >= LENGTH > max(rings)
    assert 3 * executor.plan.limits.page_size < LENGTH


@pytest.mark.parametrize("size", [3, 17, 64, 100])
def test_chunks_give_the_same_tokens_and_the_same_state(executor, one_shot, size):
    assert run(executor, chunks_of(LENGTH, size)) == one_shot


def test_uneven_chunks_give_the_same_tokens_and_the_same_state(executor, one_shot):
    chunks = [1, 2, 1, 13, 16, 15, 33, 1, 128]
    assert run(executor, [*chunks, LENGTH - sum(chunks)]) == one_shot


def test_prefill_of_one_row_at_a_time_is_the_same(executor, one_shot):
    assert run(executor, [1] * LENGTH) == one_shot


def test_decode_of_the_prompt_is_the_same_as_prefill(executor, one_shot):
    poison(executor)
    solo = Solo(executor, prompt_of(LENGTH)).feed([1] * LENGTH, "decode")
    after_prompt = solo.save()
    tokens = solo.generate(NEW, 1)
    assert (tokens, solo.logprobs, after_prompt, solo.save()) == one_shot


@pytest.mark.parametrize("cut", [1, 2, 15, 16, 17, 63, 64, 129, 200, 229])
def test_a_request_resumes_from_its_saved_state(executor, one_shot, cut):
    prompt = prompt_of(LENGTH)
    poison(executor)
    saved = Solo(executor, prompt).feed(chunks_of(cut, 50)).save()
    count = len(executor.rows["page_table"][0])
    pages = tuple(range(executor.plan.limits.pages - 1, 0, -7))[:count]  # scattered, backwards
    assert len(pages) == count
    resumed = Solo(executor, prompt).moved(saved, 3, pages)
    resumed.known = list(prompt)
    rest = chunks_of(LENGTH - cut, 41)
    resumed.feed(rest)
    tokens = resumed.generate(NEW, rest[-1])
    assert (tokens, resumed.logprobs) == one_shot[:2]
    assert resumed.save() == one_shot[3]


def test_threads_do_not_change_bits(nano_engine, one_shot):
    engine = load_engine(nano_engine, threads=1)
    assert run(engine.executor, [LENGTH]) == one_shot
    engine.close()


def result(token):
    return token.token_id, token.token_logprobs, token.top_token_ids, token.top_logprobs


def test_requests_together_equal_each_alone(nano_engine):
    llm = LLM(nano_engine, decode_sequence=False)
    lengths = (1, 2, 5, 33, 140, 64, 90, 17, 200, 3)
    batch = [prompt_of(n, seed) for seed, n in enumerate(lengths)]
    params = [
        SamplingParams(
            temperature=0.0 if i % 2 else 1.0,
            top_p=(1.0, 0.9)[i // 2 % 2],
            top_k=(-1, 20, 3)[i % 3],
            min_p=(0.0, 0.02)[i % 4 // 2],
            top_logprobs=7 * i,
            max_tokens=4 + 3 * i,
            seq_seed=i,
            ignore_eos=True,
        )
        for i in range(len(batch))
    ]
    together = llm.generate(prompt_token_ids=batch, sampling_params=params)
    for prompt, one, found in zip(batch, params, together, strict=True):
        (alone,) = llm.generate(prompt_token_ids=[prompt], sampling_params=one)
        assert [result(token) for token in found] == [result(token) for token in alone]
        assert len(found) == one.max_tokens
    llm.close()


def test_seeds_repeat_and_differ(nano_engine):
    llm = LLM(nano_engine, decode_sequence=False)

    def sampled(seed):
        params = SamplingParams(max_tokens=24, seq_seed=seed, ignore_eos=True)
        (one,) = llm.generate(prompt_token_ids=[prompt_of(9)], sampling_params=params)
        return [token.token_id for token in one]

    assert sampled(5) == sampled(5) != sampled(6)
    llm.close()


def test_what_is_sampled_is_in_the_list_and_the_list_adds_up(nano_engine):
    """A list of the whole vocabulary is the distribution that was sampled from."""
    llm = LLM(nano_engine, decode_sequence=False)
    cases = (
        (0.0, 1.0, -1, range(256, 257)),
        (1.3, 1.0, -1, range(256, 257)),
        (1.3, 0.8, -1, range(2, 256)),
        (1.3, 1.0, 9, range(9, 10)),
    )
    for temperature, top_p, top_k, counts in cases:
        params = SamplingParams(
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            top_logprobs=1000,
            max_tokens=20,
            seq_seed=4,
            ignore_eos=True,
        )
        (one,) = llm.generate(prompt_token_ids=[prompt_of(9)], sampling_params=params)
        for token in one:
            listed = dict(zip(token.top_token_ids, token.top_logprobs, strict=True))
            assert sorted(listed) == list(range(256))
            assert list(listed.values()) == sorted(listed.values(), reverse=True)
            assert listed[token.token_id] == token.token_logprobs > -9999
            kept = [logprob for logprob in listed.values() if logprob > -9999]
            assert sum(map(math.exp, kept)) == pytest.approx(1, abs=1e-5)
            assert len(kept) in counts
            assert temperature > 0 or token.token_id == token.top_token_ids[0]
        assert temperature == 0 or len({token.token_id for token in one}) > 3
    llm.close()


@pytest.mark.parametrize("kind", ["window", "tail", "history", "kv_pages", "index_pages"])
def test_every_kind_of_state_is_needed_to_resume(executor, one_shot, kind):
    """Else the tests above would not notice a state that is neither saved nor restored."""
    cut = 129  # odd: the pending group of a pair is in the tail
    prompt = prompt_of(LENGTH)
    poison(executor)
    saved = Solo(executor, prompt).feed(chunks_of(cut, 50)).save()
    for name, content in saved.states.items():
        if name.rpartition(".")[2] == kind:
            saved.states[name] = bytes(len(content))
    pages = tuple(range(1, 17))
    resumed = Solo(executor, prompt).moved(saved, 3, pages)
    resumed.known = list(prompt)
    resumed.feed([LENGTH - cut])
    tokens = resumed.generate(NEW, LENGTH - cut)
    assert (tokens, resumed.logprobs, resumed.save()) != (*one_shot[:2], one_shot[3])
    assert resumed.logprobs != one_shot[1]


def test_a_pool_that_runs_full_gives_the_same_tokens(nano_engine):
    """Preempted requests go through the model again: in chunks what came token by token."""
    engine = load_engine(nano_engine, threads=2)
    limits = engine.plan.limits
    small = dataclasses.replace(engine.plan, limits=dataclasses.replace(limits, pages=13))
    lengths = [100, 17, 230, 64, 5, 128, 63, 190]
    found = []
    for plan in (engine.plan, small):
        loop, tokens = StepLoop(plan, engine.executor), {}
        for seed, length in enumerate(lengths):
            temperature = (seed % 2) * 0.8
            params = SamplingParams(temperature, max_tokens=80, seq_seed=seed, ignore_eos=True)
            loop.submit(prompt_of(length, seed), params)
        while loop.busy:
            for event in loop.step():
                tokens.setdefault(event.id, []).append(event.choice.token)
        found.append(tokens)
        assert (loop.load.preemptions > 0) == (plan is small)
    engine.close()
    assert found[0] == found[1]
    assert [len(tokens) for _, tokens in sorted(found[0].items())] == [80] * len(lengths)


def logits_of(executor, spans, wanted):
    """Run decode rows together; the logits of the row of slot `wanted`."""
    fill_rows(executor, spans)
    executor.forward("decode", len(spans))
    row = next(i for i, span in enumerate(spans) if span.slot == wanted)
    executor.rows["sample_row"][0] = row
    probe = executor.probe("sample", "logits")
    executor.run("sample", 1, 0, probe.step)
    return executor.read(probe, 1).tobytes()


def test_logits_have_the_same_bits_beside_any_number_of_neighbours():
    """1 to 64 requests in a step: both row classes and every decode bucket up to 64."""
    overrides = ["engine.batch_invariant=true", "engine.probes=true", "engine.max_requests=64"]
    path = engines.example_engine("v41_nano", *overrides, "engine.cache_tokens=8192")
    engine = load_engine(path, threads=2)
    assert engine.plan.batch_invariant
    executor = engine.executor
    solos = []
    for slot in range(1, 65):
        solo = Solo(executor, prompt_of(33, seed=slot), slot=slot, pages=(2 * slot - 1, 2 * slot))
        solos.append(solo.feed([32]))
    before = executor.memory[MemoryClass.STATE].copy()
    found = set()
    for count in [1, 2, 3, 4, 5, 7, 8, 9, 16, 33, 63, 64]:
        for first in {0, min(5, count - 1), count - 1}:  # ours is the first, in between, the last
            executor.memory[MemoryClass.STATE][...] = before
            slots = [*range(2, 2 + first), 1, *range(2 + first, count + 1)]
            spans = [Span(s, 32, (solos[s - 1].known[32],)) for s in slots]
            found.add(logits_of(executor, spans, wanted=1))
    executor.memory[MemoryClass.STATE][...] = before
    other = logits_of(executor, [Span(2, 32, (solos[1].known[32],))], wanted=2)
    engine.close()
    assert len(found) == 1
    assert other not in found


def test_nothing_ends_before_its_least_tokens(nano_engine):
    """What would have ended the request does not come; the most likely of the others does."""
    llm = LLM(nano_engine, decode_sequence=False)
    plan = llm.engine.plan

    def run(**more):
        params = SamplingParams(temperature=0, max_tokens=6, top_logprobs=2, **more)
        (outputs,) = llm.generate(prompt_token_ids=[prompt_of(20)], sampling_params=params)
        return outputs

    first, second = run(ignore_eos=True)[0].top_token_ids
    assert [output.token_id for output in run(stop_token_ids=[first])] == [first]
    held = run(stop_token_ids=[first], min_tokens=3)
    assert held[0].token_id == second
    assert {first, plan.limits.eos_token_id}.isdisjoint(o.token_id for o in held[:3])
    assert len(held) >= 3
    seeds, found = range(1000), {}
    for held in (0, 1):
        params = [
            SamplingParams(50.0, max_tokens=1, first_n_token_no_eos=held, seq_seed=seed)
            for seed in seeds
        ]
        outputs = llm.generate(None, params, [prompt_of(3)] * len(seeds))
        found[held] = [one[0].token_id for one in outputs]
    eos = plan.limits.eos_token_id
    assert eos in found[0]
    assert eos not in found[1]
    llm.close()
