"""What a request may ask of its distribution, end to end through a real model, against NumPy."""

from __future__ import annotations

import math
from contextlib import closing

import numpy as np
import pytest

from deepinfer_compile.runtime import LLM, SamplingParams

VOCAB = 256


def prompt_of(length, seed=0):
    return [(i * i * 31 + seed * 101 + 7) % 251 + 3 for i in range(length)]


def ask(llm, batch, params):
    return llm.generate(prompt_token_ids=batch, sampling_params=params)


def ids(outputs):
    return [token.token_id for token in outputs]


def distributions(outputs):
    return [(token.token_id, token.top_token_ids, token.top_logprobs) for token in outputs]


def listed(token):
    """Log probabilities of the whole vocabulary, by id."""
    row = np.empty(VOCAB)
    row[list(token.top_token_ids)] = token.top_logprobs
    return row


@pytest.fixture(scope="module")
def llm(nano_engine):
    llm = LLM(nano_engine, decode_sequence=False)
    yield llm
    llm.close()


@pytest.mark.parametrize(
    "shape", [{"temperature": 0}, {"temperature": 1.7}, {"temperature": 0.8, "top_p": 0.9}]
)
def test_golden_tokens_have_the_log_probabilities_of_a_prompt(llm, shape):
    """The same bits: one token at a time after the first, or all of them in chunks; alone, or cut
    by other prompts."""
    prompt = prompt_of(200)
    forced = SamplingParams(
        golden_token_ids=prompt[1:], max_tokens=199, ignore_eos=True, top_logprobs=VOCAB, **shape
    )
    (golden,) = ask(llm, [prompt[:1]], forced)
    assert ids(golden) == prompt[1:]
    scored = SamplingParams(max_tokens=1, prompt_logprobs=True, **shape)
    (alone,) = ask(llm, [prompt], scored)
    expect = [token.token_logprobs for token in golden]
    assert list(alone[0].prompt_logprobs) == expect
    assert [listed(token)[token.token_id] for token in golden] == expect
    batch = [prompt_of(37, 1), prompt, prompt_of(150, 2)]
    assert ask(llm, batch, scored)[1][0].prompt_logprobs == alone[0].prompt_logprobs
    filtered = sum(logprob == -9999 for logprob in expect)
    assert (filtered > 0) == ("top_p" in shape)


def test_a_sequence_that_is_forced_with_its_own_tokens_is_itself(llm):
    """Whatever is forced of it; the random numbers of the free tokens stay the same."""
    asked = {"max_tokens": 30, "seq_seed": 9, "temperature": 1.2, "ignore_eos": True}
    (free,) = ask(llm, [prompt_of(9)], SamplingParams(**asked))
    for kept in (range(30), range(10), range(1, 30, 3)):
        golden = [t if i in kept else -1 for i, t in enumerate(ids(free))]
        (again,) = ask(llm, [prompt_of(9)], SamplingParams(golden_token_ids=golden, **asked))
        assert [(t.token_id, t.token_logprobs) for t in again] == [
            (t.token_id, t.token_logprobs) for t in free
        ]


def test_penalties_stop_what_a_greedy_model_repeats(llm):
    """A biased model says one token for ever, until the count times the penalty outweighs it."""
    asked = {"temperature": 0, "max_tokens": 40, "ignore_eos": True, "logit_bias": {77: 20.0}}
    (plain,) = ask(llm, [prompt_of(9)], SamplingParams(**asked))
    assert ids(plain) == [77] * 40
    (held,) = ask(llm, [prompt_of(9)], SamplingParams(frequency_penalty=2.0, **asked))
    said = next(i for i, token in enumerate(ids(held)) if token != 77)
    assert 5 <= said <= 15  # 20 of bias, 2 for each, and the model's own opinion
    assert len(set(ids(held))) > 10
    (once,) = ask(llm, [prompt_of(9)], SamplingParams(repetition_penalty=100.0, **asked))
    assert ids(once).count(77) == 1
    (never,) = ask(llm, [[77]], SamplingParams(repetition_penalty=100.0, **asked))
    assert 77 not in ids(never)


@pytest.mark.parametrize("repetition", [2.0**-64, 2.0**64])
@pytest.mark.parametrize("temperature", [0, 1e-5, 3e38])
@pytest.mark.parametrize("bias", [-100, 100])
def test_changes_of_all_logits_to_their_bounds_leave_numbers(llm, repetition, temperature, bias):
    asked = {"temperature": temperature, "max_tokens": 5, "ignore_eos": True, "top_logprobs": VOCAB}
    changes = {"repetition_penalty": repetition, "logit_bias": dict.fromkeys(range(VOCAB), bias)}
    (out,) = ask(llm, [list(range(VOCAB))], SamplingParams(**asked, **changes))
    for token in out:
        assert np.isfinite([token.token_logprobs, *token.top_logprobs]).all()
        assert np.exp(token.top_logprobs).sum() == pytest.approx(1, abs=1e-3)


def test_penalties_are_taken_off_the_models_logits(llm):
    """The penalised run's distributions from those of the model after the same tokens."""
    asked = {"temperature": 0, "max_tokens": 40, "ignore_eos": True, "top_logprobs": VOCAB}
    changes = {
        "presence_penalty": 0.75,
        "frequency_penalty": -0.5,
        "logit_bias": {5: 3.0, 201: -2.0, 44: 1.5},
    }
    (out,) = ask(llm, [prompt_of(12)], SamplingParams(**asked, **changes))
    (plain,) = ask(llm, [prompt_of(12)], SamplingParams(golden_token_ids=ids(out), **asked))
    counts = np.zeros(VOCAB)
    for token, model in zip(out, plain, strict=True):
        logits = listed(model)
        for id, bias in changes["logit_bias"].items():
            logits[id] += bias
        logits += 0.5 * counts - 0.75 * (counts > 0)
        expect = logits - logits.max()
        expect -= math.log(np.exp(expect).sum())
        np.testing.assert_allclose(listed(token), expect, atol=2e-5)
        counts[token.token_id] += 1
    assert counts.max() > 1


def test_answers_are_those_of_single_runs(llm):
    asked = SamplingParams(n=4, seq_seed=100, max_tokens=12, ignore_eos=True)
    together = ask(llm, [prompt_of(9), prompt_of(5)], asked)
    for place, prompt in enumerate((prompt_of(9), prompt_of(5))):
        for i in range(4):
            one = SamplingParams(seq_seed=100 + i, max_tokens=12, ignore_eos=True)
            assert ids(together[4 * place + i]) == ids(ask(llm, [prompt], one)[0])
    assert len({tuple(ids(one)) for one in together}) == 8


def test_a_banned_token_never_comes(llm, nano_engine, monkeypatch):
    asked = SamplingParams(n=64, max_tokens=16, seq_seed=1, temperature=1.5, ignore_eos=True)
    free = ask(llm, [prompt_of(9)], asked)
    taken = [token for one in free for token in ids(one)]
    assert len(taken) == 1024
    banned = sorted(set(taken))[::2]
    monkeypatch.setenv("DEEPINFER_DECODE_TOKEN_BLACKLIST", ",".join(map(str, banned)))
    with closing(LLM(nano_engine, decode_sequence=False)) as other:
        held = [token for one in ask(other, [prompt_of(9)], asked) for token in ids(one)]
    assert len(held) == 1024
    assert not set(held).intersection(banned)
    assert len(set(held)) > 20


def test_a_shortlist_of_all_is_none_and_of_few_keeps_the_best(llm, nano_engine, monkeypatch):
    batch = [prompt_of(9), prompt_of(20, 3)]
    shape = {"max_tokens": 20, "ignore_eos": True, "seq_seed": 3, "top_logprobs": VOCAB}
    drawn, greedy = SamplingParams(**shape), SamplingParams(temperature=0, **shape)
    plain = ask(llm, batch, drawn)
    best = ask(llm, batch, greedy)
    for k in (VOCAB, 7):
        monkeypatch.setenv("DEEPINFER_SAMPLER_FORCE_TOPK", str(k))
        with closing(LLM(nano_engine, decode_sequence=False)) as other:
            short, sure = ask(other, batch, drawn), ask(other, batch, greedy)
        assert [ids(one) for one in sure] == [ids(one) for one in best]
        if k == VOCAB:
            assert [distributions(one) for one in short] == [distributions(one) for one in plain]
            continue
        for token in short[0] + short[1]:
            assert token.token_id in token.top_token_ids[:k]
            assert set(token.top_logprobs[k:]) == {-9999.0}


def test_the_mass_of_less_likely_tokens_is_that_of_the_list(nano_engine, monkeypatch):
    monkeypatch.setenv("DEEPINFER_COMPUTE_SUM_SMALLER_PROBS", "1")
    for shape in ({"temperature": 0}, {"temperature": 1.3}, {"top_k": 9}):
        asked = SamplingParams(
            max_tokens=20, ignore_eos=True, seq_seed=3, top_logprobs=VOCAB, **shape
        )
        with closing(LLM(nano_engine, decode_sequence=False)) as llm:
            (out,) = ask(llm, [prompt_of(9)], asked)
        for token in out:
            row = listed(token)
            own = row[token.token_id]
            up_to = (row == own) & (np.arange(VOCAB) <= token.token_id)
            expect = np.exp(row[(row < own) | up_to]).sum()
            assert token.sum_smaller_probs == pytest.approx(expect, rel=1e-5)
