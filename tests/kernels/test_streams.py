"""Embedding and residual streams: formulas written here, the float64 reference, released values."""

import pytest
import torch
from safetensors.torch import load_file

from deepinfer_compile.ir import ops
from deepinfer_compile.ir.reference import evaluate
from deepinfer_compile.ir.types import DType, R, TensorType
from tests.golden_data import golden_root
from tests.kernels.checks import assert_rounds, assert_rows_stand_alone, same_bits
from tests.kernels.harness import run_kernel

BF16, F32, I32 = DType.BF16, DType.F32, DType.I32
STORED = {F32: torch.float32, BF16: torch.bfloat16}
SHAPES = pytest.mark.parametrize(("dtype", "channels"), [(BF16, 5120), (F32, 256)])
COEFFICIENTS = ops.MhcCoefficients(iterations=20, eps=1e-6, norm_eps=1e-20)
STREAMS = 4


def streams_of(rows: int, channels: int, dtype: DType, seed: int) -> torch.Tensor:
    """Rows of every size: unit scale, 1e-3, 1e-12, zeros, one huge value."""
    torch.manual_seed(seed)
    x = torch.randn(rows, STREAMS, channels)
    x[1 % rows] *= 1e-3
    x[2 % rows] *= 1e-12
    x[3 % rows] = 0
    x[4 % rows, 1, 3] = 1000
    return x.to(STORED[dtype])


@SHAPES
def test_embed_reads_the_tokens_row(dtype, channels):
    torch.manual_seed(1)
    table = torch.randn(50, channels).bfloat16()
    table[7, 3], table[7, 4] = -0.0, torch.inf
    token = torch.tensor([3, 7, 49, 0, 7], dtype=torch.int32)
    types = [TensorType(I32, (R,)), TensorType(BF16, (50, channels))]
    (y,) = run_kernel(ops.Embed(dtype), [token, table], types, rows=5, splits=3)
    assert same_bits(y, table[token].to(STORED[dtype]))


@SHAPES
def test_every_stream_starts_as_the_embedding(dtype, channels):
    torch.manual_seed(2)
    x = torch.randn(5, channels).to(STORED[dtype])
    types = [TensorType(dtype, (R, channels))]
    (y,) = run_kernel(ops.BroadcastStreams(STREAMS), [x], types, rows=5, splits=3)
    assert same_bits(y, x.unsqueeze(1).expand(5, STREAMS, channels).contiguous())


def test_the_first_collapse_reads_stream_0():
    position = torch.tensor([0, 9, 4], dtype=torch.int32)
    (pre,) = run_kernel(ops.FirstStream(STREAMS), [position], [TensorType(I32, (R,))], rows=3)
    assert pre.tolist() == [[1, 0, 0, 0]] * 3


def coefficient_types(dtype: DType, channels: int) -> list[TensorType]:
    return [
        TensorType(dtype, (R, STREAMS, channels)),
        TensorType(F32, (24, STREAMS * channels)),
        TensorType(F32, (24,)),
        TensorType(F32, (3,)),
    ]


def coefficients(x, fn, base, scale):
    """Section 3.4 once more, row by row with scalars where the reference uses tensors."""
    pres, posts, combs = [], [], []
    for row in x.double().flatten(1):
        m = (fn.double() @ row) / (row.square().mean() + 1e-20).sqrt()
        pres.append(1 / (1 + (-(m[:4] * scale[0].double() + base[:4])).exp()) + 1e-6)
        posts.append(2 / (1 + (-(m[4:8] * scale[1].double() + base[4:8])).exp()))
        comb = (m[8:] * scale[2].double() + base[8:]).reshape(4, 4).exp()
        comb = comb / comb.sum(1, keepdim=True) + 1e-6
        for step in range(20):
            if step:
                for i in range(4):
                    comb[i] /= comb[i].sum() + 1e-6
            for j in range(4):
                comb[:, j] /= comb[:, j].sum() + 1e-6
        combs.append(comb)
    return torch.stack(pres), torch.stack(posts), torch.stack(combs)


@pytest.mark.parametrize(("dtype", "channels"), [(BF16, 5120), (F32, 288)])
def test_coefficients_are_those_of_float64(dtype, channels):
    rows = 19  # a block of 16, then 3
    x = streams_of(rows, channels, dtype, seed=3)
    width = STREAMS * channels
    fn, base, scale = torch.randn(24, width) / width**0.5, torch.randn(24), torch.rand(3) + 0.3
    base[0], base[4] = -9, -9  # so small that eps shows
    base[8:] *= 3  # so uneven that the last iteration shows
    types = coefficient_types(dtype, channels)
    operands = [x, fn, base, scale]
    got = run_kernel(COEFFICIENTS, operands, types, rows)
    reference = evaluate(COEFFICIENTS, operands, types)
    for mine, exact, stored in zip(got, coefficients(*operands), reference, strict=True):
        error = ((mine.double() - exact) / exact).abs()
        assert error.max() < 5e-6
        assert error.median() < 5e-7
        assert ((stored.double() - exact) / exact).abs().max() < 1e-7
    assert_rows_stand_alone(COEFFICIENTS, operands, types, rows, alone=(0, 2, 3, 4, 15, 16, 18))
    for count in (2, 3, 6):  # the other tiles
        some = run_kernel(COEFFICIENTS, [x[:count], *operands[1:]], types, rows=count)
        assert all(same_bits(a, b[:count]) for a, b in zip(some, got, strict=True))


@SHAPES
def test_collapse_and_expand_round_once(dtype, channels):
    rows = 7
    x = streams_of(rows, channels, dtype, seed=4)
    o = torch.randn(rows, channels).to(STORED[dtype])
    pre, post = torch.rand(rows, STREAMS) + 0.1, 2 * torch.rand(rows, STREAMS)
    comb = torch.rand(rows, STREAMS, STREAMS)
    pre[5], post[5] = torch.tensor([1.0, 0, 0, 0]), torch.tensor([0.0, 0, 0, 1])
    comb[5] = 0
    types = [TensorType(dtype, (R, STREAMS, channels)), TensorType(F32, (R, STREAMS))]
    (y,) = run_kernel(ops.MhcCollapse(), [x, pre], types, rows)
    exact = torch.einsum("rs,rsd->rd", pre.double(), x.double())
    assert_rounds(y, exact)
    assert same_bits(y[5], x[5, 0])
    assert_rows_stand_alone(ops.MhcCollapse(), [x, pre], types, rows, alone=(0, 4, 6))

    types = [TensorType(dtype, (R, channels)), *types, TensorType(F32, (R, STREAMS, STREAMS))]
    operands = [o, x, post, comb]
    (y,) = run_kernel(ops.MhcExpand(), operands, types, rows)
    mixed = torch.einsum("rij,rid->rjd", comb.double(), x.double())
    exact = post.double().unsqueeze(2) * o.double().unsqueeze(1) + mixed
    assert_rounds(y, exact)
    assert same_bits(y[5, 3], o[5])
    assert not y[5, :3].any()
    assert_rows_stand_alone(ops.MhcExpand(), operands, types, rows, alone=(0, 4, 6))


def test_released_hyper_connections():
    golden = load_file(golden_root() / "ops" / "mhc.safetensors")
    x, rows = golden["residual"], 16
    operands = [x, golden["fn"], golden["base"], golden["scale"]]
    got = run_kernel(COEFFICIENTS, operands, coefficient_types(BF16, 256), rows)
    for mine, name in zip(got, ("pre", "post", "comb"), strict=True):
        torch.testing.assert_close(mine, golden[name], rtol=1e-5, atol=0)

    pre, (_, post, comb) = golden["prev_pre_mix"], got
    types = [TensorType(F32, (R, STREAMS, 256)), TensorType(F32, (R, STREAMS))]
    (y,) = run_kernel(ops.MhcCollapse(), [x.float(), pre], types, rows)
    torch.testing.assert_close(y, golden["pre_apply_f32"], rtol=1e-5, atol=1e-6)
    types = [TensorType(F32, (R, 256)), *types, TensorType(F32, (R, STREAMS, STREAMS))]
    operands = [golden["sublayer_out"].float(), x.float(), post, comb]
    (y,) = run_kernel(ops.MhcExpand(), operands, types, rows)
    torch.testing.assert_close(y, golden["post_apply_f32"], rtol=1e-5, atol=1e-5)
