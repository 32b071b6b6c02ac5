"""Bias, penalties, shortlist, forced tokens and the mass of less likely ones, against NumPy."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.checks import assert_rows_stand_alone
from tests.kernels.harness import run_kernel
from tests.kernels.sampling import check, op_for, sample, words_of
from tests.sample_operands import operands

IN_PROMPT = -(2**31)
F = np.float32


def changed(row, bias, prompt, answer, repetition, frequency, presence, allowed):
    """vLLM's definition, token by token, in fp32."""
    out = []
    for token, x in enumerate(row):
        x = F(x)
        if token in bias:
            x = F(x + F(bias[token]))
        if token in prompt or token in answer:
            x = F(x / F(repetition)) if x > 0 else F(x * F(repetition))
        x = F(x - F(F(frequency) * F(answer.count(token))))
        if token in answer:
            x = F(x - F(presence))
        out.append(x if token in allowed else F(-np.inf))
    return np.array(out, dtype=F)


def bias_arrays(biases, vocab):
    """Operands of a dict for each row, ascending as the host writes them."""
    width = min(300, vocab)
    ids, values = np.zeros((len(biases), width), int), np.zeros((len(biases), width))
    for r, bias in enumerate(biases):
        ids[r, : len(bias)] = sorted(bias)
        values[r, : len(bias)] = [bias[token] for token in sorted(bias)]
    return {
        "biased": [len(bias) for bias in biases],
        "bias_token": torch.from_numpy(ids),
        "bias": torch.from_numpy(values),
    }


def counts_of(vocab, slots):
    """The table: a prompt and an answer for each slot from 1 on; slot 0 would spoil a row."""
    table = torch.full((3, vocab), 77)
    for slot, (prompt, answer) in slots.items():
        row = np.bincount(np.array(answer, int), minlength=vocab)
        row[sorted(set(prompt))] += IN_PROMPT
        table[slot] = torch.from_numpy(row)
    return table


def log_softmax(x):
    shifted = x.astype(np.float64) - x.max()
    return shifted - math.log(np.exp(shifted).sum())


tokens = st.lists(st.integers(0, 79), max_size=30)
logit = st.one_of(st.floats(-30, 30, width=32), st.sampled_from([0.0, -0.0, 2.5, -2.5]))


@given(
    st.lists(logit, min_size=80, max_size=80),
    st.dictionaries(st.integers(0, 79), st.floats(-100, 100, width=32), max_size=80),
    tokens,
    tokens,
    st.floats(0.25, 4, width=32),
    st.floats(-2, 2, width=32),
    st.floats(-2, 2, width=32),
    st.one_of(st.none(), st.sets(st.integers(0, 79), min_size=1)),
)
@settings(max_examples=300, deadline=None)
def test_changes_are_vllms(row, bias, prompt, answer, repetition, frequency, presence, allowed):
    """The whole distribution, greedy and at a temperature, beside a row that asks for nothing."""
    kept = set(range(80)) if allowed is None else allowed
    expect = changed(row, bias, prompt, answer, repetition, frequency, presence, kept)
    logits = torch.tensor([row, row, row], dtype=torch.float32)
    mask = torch.zeros(3, 80, dtype=torch.bool)
    mask[:, sorted(kept)] = True
    token, logprob, top, top_logprob = check(
        logits,
        **bias_arrays([bias, bias, {}], 80),
        counted=[2, 2, 0],
        token_counts=counts_of(80, {1: ([], []), 2: (prompt, answer)}),
        repetition=repetition,
        frequency=frequency,
        presence=presence,
        masked=[allowed is not None] * 2 + [False],
        allowed=words_of(mask),
        temperature=[0.0, 1.0, 0.0],
        top_count=80,
        seed=5,
    )
    assert token[0] == expect.argmax()
    assert token[2] == np.array(row, F).argmax()
    for r in (0, 1):
        found = np.empty(80)
        found[top[r].numpy()] = top_logprob[r].numpy()
        np.testing.assert_allclose(found, log_softmax(expect), rtol=1e-6, atol=1e-6)
        assert logprob[r] == found[token[r]].astype(F)


def test_each_penalty_alone():
    """Tokens 0, 1 in the prompt, 1, 2 (twice) in the answer, 3 in neither."""
    logits = torch.zeros(4, 300)
    logits[:, :4] = torch.tensor([3.0, -3.0, 3.0, 3.0])
    arrays = {
        "counted": 1,
        "token_counts": counts_of(300, {1: ([0, 1, 0], [1, 2, 2]), 2: ([], [])}),
        "repetition": [1.5, 1.0, 1.0, 1.0],
        "frequency": [0.0, 0.75, 0.0, -0.75],
        "presence": [0.0, 0.0, 1.25, 0.0],
        "top_count": 300,
    }
    _, _, top, top_logprob = check(logits, **arrays)
    expect = [[2.0, -4.5, 2.0, 3.0], [3.0, -3.75, 1.5, 3.0]]
    expect += [[3.0, -4.25, 1.75, 3.0], [3.0, -2.25, 4.5, 3.0]]
    for r in range(4):
        found = torch.empty(300).scatter(0, top[r].long(), top_logprob[r])
        torch.testing.assert_close(found[:4] - found[4], torch.tensor(expect[r]))


@pytest.mark.parametrize("vocab", [80, 300, 2500])
def test_three_hundred_biases_at_any_place(vocab):
    torch.manual_seed(3)
    logits = torch.randn(3, vocab)
    many = torch.randperm(vocab)[: min(300, vocab)].tolist()
    biases = [{vocab - 1: 90.0}, {}, {token: float(i % 7 - 3) for i, token in enumerate(many)}]
    token, *_ = check(logits, **bias_arrays(biases, vocab), temperature=1.0, seed=2, top_count=20)
    assert token[0] == vocab - 1
    added = logits.clone()
    for bias, row in zip(biases, added, strict=True):
        for place, value in bias.items():
            row[place] += value
    got = check(logits, **bias_arrays(biases, vocab), temperature=[0, 1, 2], top_count=20)
    for a, b in zip(got, check(added, temperature=[0, 1, 2], top_count=20), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("more", [{}, {"top_p": 0.7}, {"top_k": 9, "min_p": 0.01}])
def test_a_shortlist_leaves_the_best_logits(more):
    """As if the others were -inf, ties to the lower id; a list of all changes nothing."""
    torch.manual_seed(5)
    logits = torch.randn(6, 2500).mul(4).round().div(2)  # ties
    arrays = {"temperature": [0, 0.5, 1, 1, 2, 3], "seed": 4, "top_count": 100, **more}
    plain = check(logits, **arrays)
    for none in (0, 2500, 2501, 2**31 - 1):
        for a, b in zip(check(logits, shortlist=none, **arrays), plain, strict=True):
            assert torch.equal(a, b)
    for k in (1, 2, 17, 64, 2499):
        cut = torch.full_like(logits, -torch.inf)
        for r, row in enumerate(logits.tolist()):
            best = sorted(range(2500), key=lambda i: (-row[i], i))[:k]
            cut[r, best] = logits[r, best]
        got = check(logits, shortlist=k, **arrays)
        for a, b in zip(got, check(cut, **arrays), strict=True):
            assert torch.equal(a, b)
        assert got[0][0] == logits[0].argmax()


def test_a_shortlist_is_of_the_changed_logits():
    logits = torch.tensor([[3.0, 2.0, 1.0, 0.0] + [-9.0] * 76])
    bias = bias_arrays([{0: -50.0, 3: 5.0}], 80)
    _, _, top, top_logprob = check(logits, **bias, shortlist=2, temperature=1.0, top_count=80)
    assert top[0, :2].tolist() == [3, 1]
    assert (top_logprob[0, 2:] == -torch.inf).all()


def test_forced_tokens_keep_the_probability_they_had():
    """Every token of a row: its logprob is the list's, -inf for what the filters drop."""
    torch.manual_seed(6)
    logits = torch.randn(1, 300).mul(3).expand(300, -1).contiguous()
    for arrays in ({"temperature": 0.0}, {"temperature": 0.7, "top_k": 20, "top_p": 0.95}):
        ids = torch.arange(300)
        token, logprob, top, top_logprob = check(
            logits, forced=ids + 1, top_count=300, seed=1, **arrays
        )
        assert torch.equal(token, ids.int())
        listed = torch.empty(300).scatter(0, top[0].long(), top_logprob[0])
        assert torch.equal(logprob, listed)
        kept = 300 if arrays["temperature"] == 0 else 20
        assert int((logprob > -torch.inf).sum()) <= kept


@pytest.mark.parametrize("filters", [{}, {"top_p": 0.8}, {"top_k": 30}, {"min_p": 0.02}])
def test_the_mass_of_less_likely_tokens(filters):
    """A thousand rows against a sum over all pairs in float64."""
    torch.manual_seed(7)
    rows = 1000
    logits = torch.randn(rows, 300) * 2
    logits[::3] = logits[::3].round()  # equally likely tokens
    temperature = [(0.0, 0.6, 1.0, 2.0)[r % 4] for r in range(rows)]
    arrays = {"temperature": temperature, "seed": list(range(rows)), "top_count": 300, **filters}
    forced = [r % 300 + 1 if r % 5 == 0 else 0 for r in range(rows)]
    tensors, types = operands(logits, forced=forced, summed=1, **arrays)
    token, _, top, top_logprob, smaller = run_kernel(op_for(logits), tensors, types, rows)
    for r in range(rows):
        p = np.empty(300)
        p[top[r].numpy()] = np.exp(top_logprob[r].double().numpy())
        x, t = logits[r].numpy(), int(token[r])
        less = [i for i in range(300) if x[i] < x[t] or (x[i] == x[t] and i <= t)]
        expect = p[less].sum() if p[t] else 0.0
        assert math.isclose(smaller[r, 0], expect, rel_tol=1e-6, abs_tol=1e-9), r
    assert 0.2 < float(smaller.mean()) < 0.8


def test_the_mass_is_written_where_asked_and_agrees_with_the_reference():
    torch.manual_seed(8)
    logits = torch.randn(6, 2500).mul(2).round()
    arrays = {"temperature": [0, 1, 1, 1, 2, 1], "top_k": [0, 0, 5, 5, 0, 0], "seed": 3}
    asked, forced = [1, 1, 1, 0, 1, 1], [0, 0, 0, 0, 2000, 1]
    tensors, types = operands(logits, summed=asked, forced=forced, **arrays)
    *_, smaller = run_kernel(op_for(logits), tensors, types, 6)
    *_, reference = sample(logits, summed=asked, forced=forced, **arrays)[-1]
    torch.testing.assert_close(smaller, reference, rtol=1e-6, atol=1e-12)
    assert smaller[3] == 0
    assert smaller[0] > 0.5


def test_changed_rows_stand_alone():
    torch.manual_seed(9)
    rows = 12
    tensors, types = operands(
        torch.randn(rows, 2500) * 4,
        **bias_arrays([{r * 100 + i: 3.0 for i in range(r)} for r in range(rows)], 2500),
        counted=[r % 3 for r in range(rows)],
        token_counts=counts_of(2500, {1: (range(50), [3, 3, 900]), 2: ([], range(0, 2500, 2))}),
        repetition=1.3,
        frequency=[0.1 * r for r in range(rows)],
        presence=0.5,
        masked=[r % 2 for r in range(rows)],
        allowed=words_of(torch.rand(rows, 2500) < 0.3),
        shortlist=[0, 40, 0, 7] * 3,
        temperature=[(0.0, 0.6, 1.0)[r % 3] for r in range(rows)],
        top_p=[(1.0, 0.9)[r % 2] for r in range(rows)],
        top_count=[r * 20 for r in range(rows)],
        seed=list(range(rows)),
        forced=[0, 0, 0, 1500] * 3,
        summed=[r % 2 for r in range(rows)],
    )
    assert_rows_stand_alone(op_for(tensors[0]), tensors, types, rows, alone=range(rows))


def test_changes_at_the_real_vocabulary():
    torch.manual_seed(10)
    vocab = 129280
    ids = torch.randperm(vocab)
    logits = torch.randn(3, vocab) * 4
    bias = {token: float(i % 9 - 4) for i, token in enumerate(ids[:300].tolist())}
    arrays = {
        **bias_arrays([bias, bias, {}], vocab),
        "counted": [1, 2, 2],
        "token_counts": counts_of(
            vocab, {1: (ids[:9000].tolist(), ids[5000:7000].tolist()), 2: ([], ids[:99].tolist())}
        ),
        "repetition": 1.2,
        "frequency": 0.3,
        "presence": 0.4,
        "shortlist": [0, 500, 0],
    }
    check(logits, temperature=[0.0, 0.8, 1.0], top_p=[1, 0.9, 1], top_count=50, **arrays)
