"""Pooling of token groups: a softmax written here, the float64 reference, released latents."""

import pytest
import torch
from safetensors.torch import load_file

from deepinfer_compile.ir import ops
from deepinfer_compile.ir.reference import evaluate
from deepinfer_compile.ir.types import DType, R, TensorType
from tests.golden_data import golden_root
from tests.kernels.checks import assert_rounds, same_bits
from tests.kernels.harness import run_kernel

BF16, F32, I32 = DType.BF16, DType.F32, DType.I32
INTS = TensorType(I32, (R,))


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def tail_type(slots: int, length: int, channels: int) -> TensorType:
    return TensorType(F32, (slots, length, 2, channels), state=True)


def pooled(tokens: list[torch.Tensor]) -> torch.Tensor:
    """float64 [N] of one group's (value, score)."""
    value, score = torch.stack(tokens).double().unbind(1)
    weight = (score - score.amax(0)).exp()
    return (weight * value).sum(0) / weight.sum(0)


def request(tokens: int, channels: int, seed: int) -> torch.Tensor:
    """(value, score) of every token of a request, of all sizes."""
    torch.manual_seed(seed)
    x = torch.randn(tokens, 2, channels)
    x[2] *= 1e-3
    x[3] *= 1e-3
    x[6:8] = 0
    x[8, 1, 1] = 1000
    x[9, 0, 5] = 1000
    x[10:12, 1] *= 60  # one token takes all
    return x


@pytest.mark.parametrize(
    ("out", "channels", "ratio", "length"), [(BF16, 512, 2, 2), (F32, 64, 4, 7)]
)
def test_decode_and_prefill_pool_a_group_alike(out, channels, ratio, length):
    tokens = {1: request(23, channels, 1), 2: request(40, channels, 2), 3: request(12, channels, 3)}
    tokens[0] = torch.full((1, 2, channels), torch.nan)  # padding rows
    tail = torch.full((5, length, 2, channels), torch.nan)
    rows = []  # slot, position, row_start
    for slot, first, past in [(2, 17, 40), (1, 0, 23), (3, 7, 10), *[(0, 0, 1)] * 3]:
        for p in range(max(0, first - ratio + 1), first):
            tail[slot, p % length] = tokens[slot][p]
        rows += [(slot, p, len(rows)) for p in range(first, past)]
    slot, position, row_start = torch.tensor(rows, dtype=torch.int32).unbind(1)
    value, score = torch.stack([tokens[s][p] for s, p, _ in rows]).unbind(1)
    exact = torch.zeros(len(rows), channels, dtype=torch.float64)
    for r, (s, p, _) in enumerate(rows):
        if p % ratio == ratio - 1:
            exact[r] = pooled([tokens[s][q] for q in range(p - ratio + 1, p + 1)])

    rows_type = TensorType(F32, (R, channels))
    types = [tail_type(5, length, channels), INTS, INTS, INTS, rows_type, rows_type]
    operands = [tail, slot, position, row_start, value, score]
    op = ops.ChunkPoolGroup(ratio, out)
    (chunk,) = run_kernel(op, operands, types, len(rows))
    assert_rounds(chunk, exact)
    assert_rounds(chunk, evaluate(op, operands, types)[0].double())
    assert same_bits(run_kernel(op, operands, types, len(rows), splits=3)[0], chunk)

    # The same tokens one at a time, each stored first.
    op, types = ops.PoolGroup(ratio, out), types[:3]
    for r, (s, p, _) in enumerate(rows):
        for q in range(max(0, p - ratio + 1), p + 1):
            tail[s, q % length] = tokens[s][q]
        (one,) = run_kernel(op, [tail, ints(s), ints(p)], types, rows=1)
        assert same_bits(one[0], chunk[r])


def test_decode_of_many_requests_with_padding():
    channels, ratio, rows = 512, 2, 9
    torch.manual_seed(4)
    tail = torch.randn(rows, 2, 2, channels)
    tail[0] = torch.nan
    slot, position = torch.arange(rows).int(), ints(0, 1, 2, 3, 1000, 1001, 1048575, 7, 7)
    types = [tail_type(rows, 2, channels), INTS, INTS]
    op = ops.PoolGroup(ratio, BF16)
    (y,) = run_kernel(op, [tail, slot, position], types, rows)
    assert not y[[0, 2, 4]].any()
    for r in (1, 3, 5, 6, 7, 8):
        group = [tail[r, (position[r] - 1) % 2], tail[r, position[r] % 2]]
        assert_rounds(y[r], pooled(group), rate=0.99)
    assert same_bits(run_kernel(op, [tail, slot, position], types, rows, splits=3)[0], y)
    (one,) = run_kernel(op, [tail, slot[5:6], position[5:6]], types, rows=1)
    assert same_bits(one, y[5:6])


def test_released_latents():
    golden = load_file(golden_root() / "ops" / "compressor_ratio2.safetensors")
    h, first = golden["h"].double(), int(golden["prefill_len"])
    value, score = ((h @ golden[name].double().T).float() for name in ("wkv", "wgate"))
    rows_type = TensorType(F32, (R, 512))
    types = [tail_type(2, 2, 512), INTS, INTS, INTS, rows_type, rows_type]

    def normed(pooled: torch.Tensor) -> torch.Tensor:
        y = pooled.double()
        return y * (y.square().mean(-1, keepdim=True) + 1e-20).rsqrt() * golden["norm_weight"]

    tail = torch.full((2, 2, 2, 512), torch.nan)
    position, ones = torch.arange(first).int(), torch.ones(first).int()
    operands = [tail, ones, position, 0 * ones, value[:first], score[:first]]
    (chunk,) = run_kernel(ops.ChunkPoolGroup(2, F32), operands, types, first)
    kept = chunk[1::2][golden["prefill_latent_ids"]]
    expect = golden["prefill_latents_f32"].double()
    torch.testing.assert_close(normed(kept), expect, rtol=1e-4, atol=1e-4)

    tail[1, (first - 1) % 2] = torch.stack([value[first - 1], score[first - 1]])
    emitted = []
    for p in range(first, len(h)):
        tail[1, p % 2] = torch.stack([value[p], score[p]])
        (one,) = run_kernel(ops.PoolGroup(2, F32), [tail, ints(1), ints(p)], types[:3], rows=1)
        assert bool(one.any()) == bool(golden["decode_emitted"][p - first])
        emitted += [one] if one.any() else []
    expect = golden["decode_latents_f32"].double()
    torch.testing.assert_close(normed(torch.cat(emitted)), expect, rtol=1e-4, atol=1e-4)
