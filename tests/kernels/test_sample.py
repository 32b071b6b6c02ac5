"""The sampler against section 3.18 written out here, and against the float64 reference."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer_compile.ir import ops
from deepinfer_compile.ir.types import DType, R, TensorType
from tests.kernels.checks import assert_rows_stand_alone
from tests.kernels.harness import run_kernel
from tests.kernels.sampling import check, kept_sets, op_for, padded, sample, words_of
from tests.sample_operands import operands

GOLD = 0x9E3779B97F4A7C15
WORD = 2**64 - 1


def uniform(seed: int, position: int) -> float:
    q = 3 * position * GOLD & WORD
    z = (seed + (q ^ (q << 13 & WORD)) & WORD) + GOLD & WORD
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & WORD
    z = (z ^ z >> 27) * 0x94D049BB133111EB & WORD
    return (z ^ z >> 31) / 2**64 // 2**-53 * 2**-53


def test_sample_draws_from_the_cumulative_distribution():
    torch.manual_seed(0)
    rows, vocab = 24, 2500
    logits = torch.randn(rows, vocab) * 3
    logits[3, 5::2] = -torch.inf  # a grammar's mask
    logits[4] = -torch.inf
    logits[4, 2499] = 2.0
    logits[5] = 0.0
    temperature = [(0.3, 1.0, 1.7, 0.0)[r % 4] for r in range(rows)]
    seed = [(0, 7, -1, 2**63 - 1, -(2**63))[r % 5] for r in range(rows)]
    position = [(0, 1, 129, 10_000_019 * 3, 2**40)[r // 5] for r in range(rows)]
    token, logprob, _, reference = sample(
        logits, splits=3, temperature=temperature, seed=seed, position=position
    )
    assert torch.equal(token, reference[0].flatten())
    torch.testing.assert_close(logprob, reference[1].flatten(), rtol=2.0**-23, atol=1e-12)
    for r in range(rows):
        divisor = torch.tensor(temperature[r] or 1.0).double()  # the fp32 the kernel is given
        p = torch.softmax(logits[r].double() / divisor, 0)
        if temperature[r] == 0:
            expect = int(p.argmax())
        else:
            cdf = p.cumsum(0)
            expect = int((cdf > uniform(seed[r] & WORD, position[r]) * cdf[-1]).int().argmax())
        assert token[r] == expect
        assert math.isclose(logprob[r], math.log(p[expect]), rel_tol=2e-7, abs_tol=1e-12)


def chi_square(token, probabilities):
    """Of observed tokens; every token with a probability must be expected a few times."""
    expected = probabilities * len(token)
    assert expected[expected > 0].min() > 5
    counts = torch.bincount(token, minlength=len(probabilities)).double()
    assert counts[expected == 0].sum() == 0, "a token that was filtered out"
    some = expected > 0
    return float(((counts - expected)[some] ** 2 / expected[some]).sum()), int(some.sum()) - 1


@pytest.mark.parametrize(
    "filters", [{}, {"top_p": 0.9}, {"top_k": 7}, {"min_p": 0.1}, {"top_p": 0.95, "top_k": 9}]
)
@pytest.mark.parametrize("over", ["seed", "position"])
def test_sample_follows_the_filtered_distribution(filters, over):
    """Chi-square over seeds, and over positions: a wrong stream or CDF shows here."""
    rows, temperature = 20_000, 1.3
    few = torch.linspace(2.0, -2.0, 24)[torch.randperm(24, generator=torch.manual_seed(3))]
    logits = padded(few[None])
    arrays = {over: list(range(rows)), "temperature": temperature, **filters}
    tensors, types = operands(logits.expand(rows, -1), **arrays)
    token, logprob, *_ = run_kernel(op_for(logits), tensors, types, rows)
    (kept,) = kept_sets(logits, temperature=temperature, **filters)
    p = torch.softmax(logits[0].double() / temperature, 0)
    p[[i for i in range(80) if i not in kept]] = 0
    p /= p.sum()
    found, freedom = chi_square(token.flatten().long(), p)
    assert found < freedom + 5 * math.sqrt(2 * freedom)
    torch.testing.assert_close(logprob.flatten(), p[token.flatten().long()].log().float())


def naive_kept(logits, temperature, top_p, top_k, min_p):
    """The filters as they are described, token by token, in exact fractions of a plain softmax."""
    scaled = [x / temperature for x in logits]
    shares = [math.exp(x - max(scaled)) for x in scaled]
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    kept, mass = [], 0.0
    for i in order:
        if mass > top_p * math.fsum(shares) and top_p < 1:
            break
        kept.append(i)
        mass += shares[i]
    if top_k > 0:
        kept = kept[:top_k]
    least = math.log(min_p) if min_p else -math.inf  # as a difference: e^-1e-45 rounds to one
    return {i for i in kept if scaled[i] - max(scaled) >= least}


ROW = st.one_of(
    st.lists(st.floats(-8, 8, width=32), min_size=1, max_size=80),
    st.lists(st.sampled_from([-2.0, 0.0, 1.0, 1.5]), min_size=1, max_size=300),  # ties
)


@given(
    ROW,
    st.sampled_from([0.25, 1.0, 3.0]),
    st.sampled_from([1.0, 0.9999, 0.9, 0.37, 0.01, 1e-7]),
    st.sampled_from([-1, 0, 1, 2, 7, 64, 65, 299, 300, 2**31 - 1]),
    st.sampled_from([0.0, 1e-3, 0.11, 0.9, 1.0]),
)
@settings(max_examples=400, deadline=None)
def test_filters_keep_what_their_description_says(row, temperature, top_p, top_k, min_p):
    width = 80 if len(row) <= 80 else 300
    logits = padded([row], width)
    p, m = (float(torch.tensor(x, dtype=torch.float32)) for x in (top_p, min_p))
    arrays = {"temperature": temperature, "top_p": top_p, "top_k": top_k, "min_p": min_p}
    (kept,) = kept_sets(logits, **arrays)
    assert kept == naive_kept(row, temperature, p, top_k, m)
    check(logits, top_count=width, seed=5, **arrays)


def test_filters_at_their_edges():
    # Halves of what is left: mass before token i is 1 - 2^-i, exactly.
    halves = padded(torch.tensor([[0.5, 0.25, 0.125, 0.0625, 0.0625]]).log())
    equal = padded(torch.zeros(1, 8))
    assert kept_sets(equal, temperature=1.0, top_p=0.5) == [{0, 1, 2, 3, 4}]  # 4/8 <= 0.5
    assert kept_sets(equal, temperature=1.0, top_p=0.49) == [{0, 1, 2, 3}]
    assert kept_sets(equal, temperature=1.0, top_p=1e-9) == [{0}]
    # The same masses, of tokens that differ: a temperature that leaves no difference.
    assert kept_sets(padded([[0.0, 1.0, 2.0, 3.0]]), temperature=1e30, top_p=0.5) == [{1, 2, 3}]
    assert kept_sets(halves, temperature=1.0, top_p=0.7) == [{0, 1}]
    assert kept_sets(halves, temperature=1.0, top_p=0.8) == [{0, 1, 2}]
    assert kept_sets(equal, temperature=1.0, top_k=3) == [{0, 1, 2}]
    assert kept_sets(equal, temperature=1.0, min_p=1.0) == [set(range(8))]
    assert kept_sets(halves, temperature=1.0, min_p=1.0) == [{0}]
    for k in (8, 9, 80, 81, 2**31 - 1):
        assert kept_sets(equal, temperature=1.0, top_k=k) == [set(range(8))]


def test_top_p_comes_before_top_k():
    """DeepInfer's order: top-k first would leave 0.5 and 0.3 of 0.8, and top-p drop the second."""
    logits = padded(torch.tensor([[0.5, 0.3, 0.2]]).log())
    assert kept_sets(logits, temperature=1.0, top_p=0.55, top_k=2) == [{0, 1}]
    _, logprob, (_, listed), _ = sample(
        logits, temperature=1.0, top_p=0.55, top_k=2, top_count=3, seed=1
    )
    expect = torch.tensor([[0.5 / 0.8, 0.3 / 0.8, 0.0]]).log()
    torch.testing.assert_close(listed[:, :3], expect)
    assert logprob[0] in listed[0, :2]


def test_greedy_is_the_argmax_whatever_the_filters():
    torch.manual_seed(2)
    logits = torch.randn(4, 2500)
    logits[1, 40:80] = 9.0
    token, logprob, _, _ = check(
        logits, top_p=[1.0, 0.01, 0.5, 0.0], top_k=[1, 3, 0, 9], min_p=[0.0, 0.5, 1.0, 0.2], seed=7
    )
    assert token.tolist() == logits.argmax(1).tolist()
    assert token[1] == 40
    plain = torch.log_softmax(logits.double(), 1).amax(1)
    torch.testing.assert_close(logprob, plain.float(), rtol=2.0**-22, atol=0)


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e4, 3e38])
def test_filters_of_huge_tiny_and_negative_logits(scale):
    torch.manual_seed(4)
    logits = (torch.rand(12, 300) * 2 - 1) * scale
    logits[1] = -logits[1].abs()
    logits[2, ::3] = logits[2, 0]
    logits[3, 5:] = -torch.inf
    logits[4] = scale
    logits[5, ::2] = 0.0
    logits[5, 1::2] = -0.0
    for t, p, k, m in itertools.product((1e-5, 0.7, 1e30), (0.001, 0.9), (0, 33), (0.0, 0.3)):
        check(logits, temperature=t, top_p=p, top_k=k, min_p=m, top_count=300, seed=3)


@pytest.mark.parametrize("vocab", [80, 300, 2500])
def test_a_mask_is_minus_infinity_in_the_logits(vocab):
    """Bit for bit: filters, probabilities and lists come after the mask."""
    torch.manual_seed(9)
    rows = 24
    logits = torch.randn(rows, vocab) * 3
    share = torch.tensor([0.5, 0.02, 0.98])[torch.arange(rows) % 3]
    allowed = torch.rand(rows, vocab) < share[:, None]
    allowed[:3, logits[:3].argmax(1)] = False  # what unmasked rows would take
    allowed[3] = False
    allowed[:, vocab - 1] = True
    allowed[4] = True
    arrays = {
        "temperature": [(0.0, 0.7, 1.0, 2.0)[r % 4] for r in range(rows)],
        "top_p": [(1.0, 0.8)[r // 12] for r in range(rows)],
        "top_k": [(-1, 40)[r // 6 % 2] for r in range(rows)],
        "min_p": [(0.0, 0.01)[r // 3 % 2] for r in range(rows)],
        "top_count": vocab,
        "seed": list(range(rows)),
        "position": list(range(rows)),
    }
    got = check(logits, masked=1, allowed=words_of(allowed), **arrays)
    expect = check(logits.masked_fill(~allowed, -torch.inf), **arrays)
    for a, b in zip(got, expect, strict=True):
        assert torch.equal(a, b)
    token = got[0].long()
    assert allowed[torch.arange(rows), token].all()
    assert token[3] == vocab - 1
    assert got[1][3] == 0.0  # the only token


def test_a_row_without_a_mask_does_not_read_its_words():
    torch.manual_seed(10)
    logits = torch.randn(4, 2500)
    arrays = {"temperature": [0.0, 1.0, 0.0, 1.0], "seed": 3, "top_count": 9}
    one = torch.zeros(4, 2500, dtype=torch.bool)
    one[:, 1234] = True
    mixed = check(logits, masked=[1, 0, 0, 1], allowed=words_of(one), **arrays)
    plain = check(logits, **arrays)
    assert mixed[0].tolist() == [1234, plain[0][1], plain[0][2], 1234]
    for a, b in zip(mixed, plain, strict=True):
        assert torch.equal(a[1:3], b[1:3])


def test_sample_rows_stand_alone():
    torch.manual_seed(6)
    rows = 12
    logits = torch.randn(rows, 2500) * 4
    tensors, types = operands(
        logits,
        masked=[r % 2 for r in range(rows)],
        allowed=words_of(torch.rand(rows, 2500) < 0.3),
        temperature=[(0.0, 0.6, 1.0)[r % 3] for r in range(rows)],
        top_p=[(1.0, 0.9)[r % 2] for r in range(rows)],
        top_k=[(-1, 50, 5)[r // 4] for r in range(rows)],
        min_p=[(0.0, 0.05)[r // 6] for r in range(rows)],
        top_count=[r * 20 for r in range(rows)],
        seed=list(range(rows)),
        position=list(range(rows)),
    )
    assert_rows_stand_alone(op_for(logits), tensors, types, rows, alone=range(rows))


def test_lists_are_in_order_and_as_long_as_asked():
    torch.manual_seed(8)
    logits = torch.randn(4, 2500)
    logits[2] = logits[2].round()  # ties
    counts = [0, 1, 1000, 17]
    token, logprob, top, top_logprob = check(logits, top_count=counts, temperature=[1, 0, 2, 1])
    for r, count in enumerate(counts):
        assert torch.all(top[r, count:] == 0)  # not written
        expect = sorted(range(2500), key=lambda i: (-float(logits[r, i]), i))[:count]
        assert top[r, :count].tolist() == expect
    assert (top[1, 0], top_logprob[1, 0]) == (token[1], logprob[1])


def test_sample_at_temperature_zero_takes_the_lowest_highest():
    logits = torch.randn(3, 2500)
    logits[0, [77, 1500, 2499]] = 9.0
    logits[1] = -2.5
    logits[2, 2499] = 50.0
    token, logprob, *_ = sample(logits, seed=1, position=5)
    assert token.tolist() == [77, 0, 2499]
    assert math.isclose(logprob[1], -math.log(2500), rel_tol=1e-6)


@pytest.mark.parametrize("filters", [{}, {"top_p": 0.5, "top_k": 20, "min_p": 0.1}])
def test_sample_never_leaves_the_vocabulary(filters):
    logits = torch.randn(6, 2500)
    logits[0] = torch.nan
    logits[1, 100] = torch.nan
    logits[2] = -torch.inf
    logits[3, 7] = torch.inf
    logits[4, 7] = torch.inf
    logits[5, ::2] = torch.nan
    tensors, types = operands(
        logits, temperature=[0.0, 1.0, 1.0, 0.0, 1.0, 1.0], top_count=50, seed=3, **filters
    )
    token, _, top, *_ = run_kernel(op_for(logits), tensors, types, 6)
    for ids in (token, top):
        assert ((ids >= 0) & (ids < 2500)).all()
    assert token[3] == token[4] == 7


def test_sample_at_the_real_vocabulary():
    torch.manual_seed(1)
    logits = torch.randn(11, 129280) * 4
    temperature = [0.0, 1e-5, 0.7, 1.0, 2.0, 100.0, 1.0, 1.0, 100.0, 100.0, 0.7]
    token, *_ = check(
        logits,
        temperature=temperature,
        top_p=[1.0] * 6 + [0.9, 0.999, 0.9, 1.0, 0.5],
        top_k=[-1] * 6 + [50, -1, -1, 20_000, 1000],
        min_p=[0.0] * 9 + [0.5, 0.01],
        top_count=[0, 1000] * 5 + [20],
        seed=11,
        position=list(range(11)),
    )
    assert token[:2].tolist() == logits[:2].argmax(1).tolist()
    assert token[5] > 1000  # nearly uniform


def test_select_rows_gathers():
    x = torch.randn(7, 48)
    row = torch.tensor([6, 0, 0, 3, 5], dtype=torch.int32)
    for dtype, stored in ((DType.F32, x), (DType.BF16, x.bfloat16())):
        types = [TensorType(dtype, (7, 48)), TensorType(DType.I32, (R,))]
        (got,) = run_kernel(ops.SelectRows(), [stored, row], types, rows=5, splits=3)
        assert torch.equal(got, stored[row.long()])
