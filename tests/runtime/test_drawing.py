"""Penalties, bias, forced tokens, prompts' log probabilities and answers side by side, over a
pretended model whose tokens depend on every operand: what reaches a wrong row shows."""

from __future__ import annotations

import asyncio
import dataclasses
from contextlib import closing

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer_compile.runtime import LLM, AsyncLLM, EngineError, RequestError, SamplingParams
from deepinfer_compile.runtime.token_mask import TokenMask
from tests.runtime.pretend import EOS, PLAN, mix, next_token, penalty_of, pretend_engine


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return pretend_engine(tmp_path_factory.mktemp("engines") / "pretend.engine")


@pytest.fixture(scope="module", params=[True, False], ids=["asynchronous", "synchronous"])
def llm(path, request):
    llm = LLM(path, threads=1, decode_sequence=False, async_scheduling=request.param)
    yield llm
    llm.close()


def expected(prompt, params):
    """(token, log probability) of every output, by the rule of the pretended model."""
    known, out = list(prompt), []
    filters = (params.top_p, params.top_k, params.min_p)
    penalties = (params.repetition_penalty, params.frequency_penalty, params.presence_penalty)
    for i in range(params.max_tokens):
        answer = known[len(prompt) :]

        def change(h, answer=answer):
            for token in sorted(params.logit_bias or {}):
                h = mix(mix(h, token), int(params.logit_bias[token] * 1024))
            return penalty_of(h, prompt, answer, penalties) if params.penalises else h

        token, logprob = next_token(known, params.temperature, params.seed, filters, change)
        golden = params.golden_token_ids or ()
        token = golden[i] if i < len(golden) and golden[i] >= 0 else token
        known.append(token)
        out.append((token, logprob))
        if len(known) == PLAN.limits.max_context or (token == EOS and not params.ignore_eos):
            break
    return out


def prompt_logprobs(prompt):
    return tuple(next_token(prompt[:i])[1] for i in range(1, len(prompt)))


def found(outputs):
    return [(one.token_id, one.token_logprobs) for one in outputs]


quarters = st.integers(-8, 8).map(lambda n: n / 4)
params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.5]),
    seq_seed=st.integers(0, 2**64 - 1),
    max_tokens=st.integers(1, 24),
    ignore_eos=st.booleans(),
    presence_penalty=st.one_of(st.just(0.0), quarters),
    frequency_penalty=st.one_of(st.just(0.0), quarters),
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.25, 0.5]),
    logit_bias=st.one_of(st.none(), st.dictionaries(st.integers(0, 255), quarters, max_size=12)),
    golden_token_ids=st.one_of(st.none(), st.lists(st.integers(-1, 255), max_size=30)),
)
prompts = st.lists(st.integers(2, 255), min_size=1, max_size=36)


@given(st.lists(st.tuples(prompts, params), min_size=1, max_size=7))
@settings(max_examples=80, deadline=None)
def test_any_batch_of_any_parameters(llm, batch):
    outputs = llm.generate(
        prompt_token_ids=[prompt for prompt, _ in batch],
        sampling_params=[one for _, one in batch],
    )
    assert [found(one) for one in outputs] == [expected(*one) for one in batch]


@pytest.mark.parametrize("pages", [6, 9])
def test_what_was_counted_and_scored_survives_preemption(tmp_path, pages):
    """Requests lose their slots to each other, with tokens generated and before the first."""
    limits = dataclasses.replace(PLAN.limits, pages=pages)
    engine = pretend_engine(tmp_path / "e", dataclasses.replace(PLAN, limits=limits))
    more = {"temperature": 0, "ignore_eos": True, "prompt_logprobs": True}
    batch = [([7, 8] * 9, 40), ([9] * 17, 40), ([3, 4, 5], 55), ([6] * 30, 20)]
    asked = [
        SamplingParams(max_tokens=count, frequency_penalty=0.25 * i, **more)
        for i, (_, count) in enumerate(batch)
    ]
    with closing(LLM(engine, threads=1, decode_sequence=False)) as llm:
        outputs = llm.generate(prompt_token_ids=[p for p, _ in batch], sampling_params=asked)
    for (prompt, _), one, out in zip(batch, asked, outputs, strict=True):
        assert found(out) == expected(prompt, one)
        assert out[0].prompt_logprobs == prompt_logprobs(prompt)
        assert not any(token.prompt_logprobs for token in out[1:])


@given(st.lists(st.tuples(st.lists(st.integers(2, 255), min_size=1, max_size=60), st.booleans())))
@settings(max_examples=60, deadline=None)
def test_prompts_are_scored_however_they_are_cut(llm, batch):
    """Chunks of eight rows that prompts share, scored four rows at a time."""
    outputs = llm.generate(
        prompt_token_ids=[prompt for prompt, _ in batch],
        sampling_params=[
            SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=scored, top_logprobs=3)
            for _, scored in batch
        ],
    )
    for (prompt, scored), out in zip(batch, outputs, strict=True):
        assert out[0].prompt_logprobs == (prompt_logprobs(prompt) if scored else ())
        assert out[0].top_token_ids[0] == out[0].token_id == next_token(prompt)[0]


def test_prompts_that_others_have_are_scored_whole(llm):
    """What is in the cache does not run, so it is not used for them; the others still share."""
    prompt = [(i * 13) % 250 + 2 for i in range(50)]
    plain = SamplingParams(temperature=0, max_tokens=2)
    scored = SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=True)
    outputs = [
        llm.generate(prompt_token_ids=[prompt], sampling_params=one)[0]
        for one in (plain, scored, plain)
    ]
    assert [out[0].num_cached_tokens for out in outputs] == [0, 0, 48]
    assert outputs[1][0].prompt_logprobs == prompt_logprobs(prompt)
    assert found(outputs[0]) == found(outputs[1]) == found(outputs[2])


def test_forced_ends_are_ends(llm):
    prompt, more = [5, 6], {"temperature": 0, "max_tokens": 9}
    cases = [
        ({"golden_token_ids": [9, EOS, 9]}, 2, "stop"),
        ({"golden_token_ids": [9, EOS, 9], "ignore_eos": True}, 9, "length"),
        ({"golden_token_ids": [9, EOS, 9], "min_tokens": 5}, 2, "stop"),
        ({"golden_token_ids": [9, 9, 44], "stop_token_ids": [44]}, 3, "stop"),
        ({"golden_token_ids": [65, 66, 67], "stop": "BC"}, 3, "stop"),
        ({"golden_token_ids": [9] * 20}, 9, "length"),
    ]
    for given_, count, reason in cases:
        (out,) = llm.generate(
            prompt_token_ids=[prompt], sampling_params=SamplingParams(**more, **given_)
        )
        forced = given_["golden_token_ids"][:count]
        assert [one.token_id for one in out][: len(forced)] == forced
        assert (len(out), out[-1].finish_reason) == (count, reason)


def test_answers_stand_together_and_are_those_of_single_runs(llm):
    batch = [[7, 8], [9], [3, 4, 5]]
    asked = [
        SamplingParams(seq_seed=2**64 - 2, max_tokens=6, n=n, presence_penalty=0.5, ignore_eos=True)
        for n in (3, 1, 5)
    ]
    together = llm.generate(prompt_token_ids=batch, sampling_params=asked, priority=[2, 1, 0])
    single = [
        found(llm.generate(prompt_token_ids=[prompt], sampling_params=one)[0])
        for prompt, params in zip(batch, asked, strict=True)
        for one in params.answers
    ]
    assert [found(one) for one in together] == single
    assert len({tuple(one) for one in single[:3]}) == 3
    assert single[1] == expected([7, 8], dataclasses.replace(asked[0], n=1, seq_seed=2**64 - 1))


def test_streams_number_answers(path):
    async def gather(llm, params):
        return [piece async for piece in llm.generate([7, 8], params, request_id="a")]

    asked = SamplingParams(seq_seed=5, max_tokens=6, n=3, ignore_eos=True)
    with closing(LLM(path, threads=1)) as llm:
        texts = llm.generate(prompt_token_ids=[[7, 8], [9]], sampling_params=asked)
        pieces = list(llm.stream(prompt_token_ids=[[7, 8], [9]], sampling_params=asked))
    assert len(texts) == 6
    for i, text in enumerate(texts):
        assert "".join(piece.text for piece in pieces if piece.index == i) == text

    async def serve():
        llm = AsyncLLM(LLM(path, threads=1))
        try:
            return await gather(llm, asked)
        finally:
            await llm.close()

    served = asyncio.run(serve())
    assert sum(piece.token.finished for piece in served) == 3
    for i in range(3):
        assert "".join(piece.text for piece in served if piece.index == i) == texts[i]


def test_abort_ends_all_answers(path):
    async def serve():
        llm = AsyncLLM(LLM(path, threads=1))
        ends = []
        try:
            asked = SamplingParams(max_tokens=60, n=3, ignore_eos=True)
            async for piece in llm.generate([7], asked, request_id="a"):
                if not ends and not piece.token.finished:
                    llm.abort("a")
                if piece.token.finished:
                    ends.append((piece.index, piece.token.finish_reason))
        finally:
            await llm.close()
        return ends

    ends = asyncio.run(serve())
    assert sorted(ends) == [(0, "abort"), (1, "abort"), (2, "abort")]


def test_ids_outside_the_vocabulary_are_refused(llm, monkeypatch, path):
    cases = [
        ({"golden_token_ids": [5, -1, 256]}, "golden_token_ids outside the vocabulary: 256"),
        ({"logit_bias": {7: 1, 900: 1}}, "logit_bias has token ids outside the vocabulary: 900"),
    ]
    for given_, message in cases:
        with pytest.raises(RequestError) as caught:
            llm.generate(prompt_token_ids=[[5]], sampling_params=SamplingParams(**given_))
        assert (caught.value.code, caught.value.message) == ("E031", message)
    monkeypatch.setenv("DEEPINFER_DECODE_TOKEN_BLACKLIST", "5,256,999")
    with pytest.raises(RequestError, match=r"BLACKLIST has token ids outside .*: 256, 999"):
        LLM(path)


def test_the_blacklist_holds_for_everybody(monkeypatch, path):
    """The pretended model takes the next allowed token, with ends suppressed or not."""
    banned = [EOS, *range(60, 250)]
    monkeypatch.setenv("DEEPINFER_DECODE_TOKEN_BLACKLIST", ",".join(map(str, banned)))
    with closing(LLM(path, threads=1, decode_sequence=False)) as llm:
        for more in ({}, {"min_tokens": 9, "stop_token_ids": [4]}, {"frequency_penalty": 1.0}):
            asked = SamplingParams(max_tokens=50, seq_seed=3, n=4, **more)
            outputs = llm.generate(prompt_token_ids=[[7], [8]], sampling_params=asked)
            taken = {token.token_id for one in outputs for token in one}
            assert len(taken) > 20
            assert not taken.intersection(banned)
        asked = SamplingParams(golden_token_ids=[5, 60, EOS])
        with pytest.raises(RequestError) as caught:
            llm.generate(prompt_token_ids=[[7]], sampling_params=asked)
        assert caught.value.code == "E033"
        assert f"golden_token_ids holds [{EOS}, 60]" in caught.value.notes[0]


@given(
    st.sets(st.integers(0, 79)),
    st.sets(st.integers(0, 79)),
    st.one_of(st.none(), st.sets(st.integers(0, 79))),
)
def test_masks_are_what_all_allow(banned, early, grammar):
    """A grammar's words hold bits past the vocabulary, too."""
    words = np.full(3, -1, dtype=np.int32)
    for token in set(range(80)).difference(grammar or ()):
        words[token // 32] ^= np.array(1 << token % 32, np.uint32).view(np.int32)
    masked = TokenMask(80, sorted(banned)).fill(words, grammar is not None, early)
    assert masked == bool(banned or early or grammar is not None)
    if banned or early:
        allowed = set(range(80) if grammar is None else grammar) - banned - early
        assert {i for i in range(96) if words[i // 32] >> i % 32 & 1} == allowed


def test_the_blacklist_holds_beside_a_grammar(monkeypatch, path):
    grammar = {"schema_type": "regex", "schema": "[abc]{12}"}
    asked = SamplingParams(temperature=0, max_tokens=20, so_args=grammar)
    texts = []
    for banned in ("", str(ord("a"))):
        monkeypatch.setenv("DEEPINFER_DECODE_TOKEN_BLACKLIST", banned)
        with closing(LLM(path, threads=1)) as llm:
            texts += llm.generate("Hello", asked)
    assert [len(text) for text in texts] == [12, 12]
    assert ["a" in text for text in texts] == [True, False]


def test_a_request_that_nothing_may_follow_ends_alone(monkeypatch, path):
    banned = [token for token in range(256) if token not in (EOS, 77)]
    monkeypatch.setenv("DEEPINFER_DECODE_TOKEN_BLACKLIST", ",".join(map(str, banned)))
    with closing(LLM(path, threads=1, decode_sequence=False)) as llm:
        stuck = SamplingParams(max_tokens=5, min_tokens=3, stop_token_ids=[77])
        free = SamplingParams(max_tokens=5, min_tokens=3)
        one, other = llm.generate(prompt_token_ids=[[7], [8]], sampling_params=[stuck, free])
    assert "no token is left by so_args, min_tokens and the blacklist" in one[0].error
    assert [token.token_id for token in other][:3] == [77] * 3


def test_settings_of_the_process_reach_every_row(monkeypatch, path, llm):
    asked = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    (plain,) = llm.generate(prompt_token_ids=[[7]], sampling_params=asked)
    assert {token.sum_smaller_probs for token in plain} == {-1.0}
    monkeypatch.setenv("DEEPINFER_SAMPLER_FORCE_TOPK", "9")
    monkeypatch.setenv("DEEPINFER_COMPUTE_SUM_SMALLER_PROBS", "1")
    with closing(LLM(path, threads=1, decode_sequence=False)) as other:
        (out,) = other.generate(prompt_token_ids=[[7]], sampling_params=asked)
    token, logprob = next_token([7], change=lambda h: mix(h, 9))
    assert (out[0].token_id, out[0].token_logprobs) == (token, logprob)
    assert all(0 <= token.sum_smaller_probs < 1 for token in out)


def test_engines_without_these_operands_are_refused(tmp_path):
    from tests.runtime.made import edit_manifest

    engine = pretend_engine(tmp_path / "old.engine")
    edit_manifest(engine, schema=3)
    with pytest.raises(EngineError, match="the engine has schema 3, this runtime reads 4"):
        LLM(engine)
