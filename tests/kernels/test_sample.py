"""The sampler against section 3.18 written out here, and against the float64 reference."""

import math

import torch

from deepinfer_compile.ir import ops
from deepinfer_compile.ir.reference import evaluate
from deepinfer_compile.ir.types import DType, R, TensorType
from tests.kernels.harness import run_kernel

GOLD = 0x9E3779B97F4A7C15
WORD = 2**64 - 1


def uniform(seed: int, position: int) -> float:
    q = 3 * position * GOLD & WORD
    z = (seed + (q ^ (q << 13 & WORD)) & WORD) + GOLD & WORD
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & WORD
    z = (z ^ z >> 27) * 0x94D049BB133111EB & WORD
    return (z ^ z >> 31) / 2**64 // 2**-53 * 2**-53


def types_of(vocab: int) -> list[TensorType]:
    return [
        TensorType(DType.F32, (R, vocab)),
        TensorType(DType.F32, (R,)),
        TensorType(DType.I64, (R,)),
        TensorType(DType.I64, (R,)),
    ]


def sample(logits, temperature, seed, position, splits=1):
    tensors = [
        logits,
        torch.tensor(temperature, dtype=torch.float32),
        torch.tensor(seed, dtype=torch.int64),
        torch.tensor(position, dtype=torch.int64),
    ]
    types = types_of(logits.shape[1])
    token, logprob = run_kernel(ops.Sample(), tensors, types, len(logits), splits)
    return token.flatten(), logprob.flatten(), evaluate(ops.Sample(), tensors, types)


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
    token, logprob, reference = sample(logits, temperature, seed, position, splits=3)
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
    one = sample(logits[6:7], temperature[6:7], seed[6:7], position[6:7])
    assert (one[0], one[1]) == (token[6], logprob[6])


def test_sample_follows_the_distribution():
    """Frequencies over many positions: a wrong stream or an off-by-one CDF shows here."""
    rows = 4000
    logits = torch.full((rows, 2500), -torch.inf)
    chosen = torch.tensor([0, 1, 1023, 1024, 2499])
    logits[:, chosen] = torch.tensor([0.1, 0.2, 0.3, 0.25, 0.15]).log()
    token, logprob, _ = sample(logits, [1.0] * rows, [42] * rows, list(range(rows)))
    shares = (token.unsqueeze(1) == chosen).float().mean(0)
    # Four standard deviations of a share of 0.3 over 4000 draws are 0.029.
    torch.testing.assert_close(shares, logits[0, chosen].exp(), rtol=0, atol=0.03)
    torch.testing.assert_close(logprob, logits[0, token.long()], rtol=0, atol=1e-6)


def test_sample_at_temperature_zero_takes_the_lowest_highest():
    logits = torch.randn(3, 2500)
    logits[0, [77, 1500, 2499]] = 9.0
    logits[1] = -2.5
    logits[2, 2499] = 50.0
    token, logprob, _ = sample(logits, [0.0] * 3, [1] * 3, [5] * 3)
    assert token.tolist() == [77, 0, 2499]
    assert math.isclose(logprob[1], -math.log(2500), rel_tol=1e-6)


def test_sample_never_leaves_the_vocabulary():
    logits = torch.randn(4, 2500)
    logits[0] = torch.nan
    logits[1, 100] = torch.nan
    logits[2] = -torch.inf
    logits[3, 7] = torch.inf
    token, _, _ = sample(logits, [0.0, 1.0, 1.0, 0.0], [3] * 4, [9] * 4)
    assert ((token >= 0) & (token < 2500)).all()
    assert token[3] == 7


def test_sample_at_the_real_vocabulary():
    torch.manual_seed(1)
    logits = torch.randn(6, 129280) * 4
    temperature = [0.0, 1e-5, 0.7, 1.0, 2.0, 100.0]
    token, logprob, reference = sample(logits, temperature, [11] * 6, list(range(6)))
    assert torch.equal(token, reference[0].flatten())
    torch.testing.assert_close(logprob, reference[1].flatten(), rtol=2.0**-22, atol=1e-12)
    assert token[:2].tolist() == logits[:2].argmax(1).tolist()
    assert token[5] > 1000  # nearly uniform


def test_select_rows_gathers():
    x = torch.randn(7, 48)
    row = torch.tensor([6, 0, 0, 3, 5], dtype=torch.int32)
    for dtype, stored in ((DType.F32, x), (DType.BF16, x.bfloat16())):
        types = [TensorType(dtype, (7, 48)), TensorType(DType.I32, (R,))]
        (got,) = run_kernel(ops.SelectRows(), [stored, row], types, rows=5, splits=3)
        assert torch.equal(got, stored[row.long()])
