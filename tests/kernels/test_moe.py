"""Router, gated activation and combination against the float64 reference and the golden pairs."""

import pytest
import torch
from safetensors.torch import load_file

from deepinfer_compile.ir import ops
from deepinfer_compile.ir.reference import evaluate
from deepinfer_compile.ir.types import DType, R, TensorType
from tests.golden_data import golden_root
from tests.kernels.harness import run_kernel

STORED = {DType.F32: torch.float32, DType.BF16: torch.bfloat16}
EPS = {DType.F32: 2.0**-24, DType.BF16: 2.0**-8}
ELEMENTS = pytest.mark.parametrize("dtype", [DType.F32, DType.BF16], ids=lambda d: d.value)
I32_ROWS = TensorType(DType.I32, (R,))


def check(got: torch.Tensor, exact: torch.Tensor, dtype: DType) -> None:
    """The format's bound, and nearly always the float64 value rounded once."""
    exact = exact.double()
    largest = exact.abs().amax(-1, keepdim=True)
    bound = 2 * EPS[dtype] * exact.abs() + 4 * 2.0**-23 * largest
    assert (got.double() - exact).abs().le(bound).all()
    if dtype is DType.BF16:
        assert (got == exact.to(torch.bfloat16)).float().mean() > 0.999


def swiglu(gate: torch.Tensor, up: torch.Tensor, weight: torch.Tensor | None, limit: float):
    g, u = gate.double().clamp(max=limit), up.double().clamp(-limit, limit)
    h = g / (1 + (-g).exp()) * u
    return h if weight is None else h * weight.double().unsqueeze(-1)


@ELEMENTS
@pytest.mark.parametrize("experts", [0, 6])
@pytest.mark.parametrize("scale", [1.0, 1e-3, 30.0])
def test_swiglu_clamps_and_rounds_once(dtype, experts, scale):
    torch.manual_seed(experts)
    lead = (5, experts) if experts else (5,)
    gate, up = (torch.randn(*lead, 2304) * scale for _ in range(2))
    gate[0], up[1] = 0, 0
    gate[2, ..., 7], gate[2, ..., 8], up[2, ..., 9] = 1000, -1000, -1e30
    gate, up = gate.to(STORED[dtype]), up.to(STORED[dtype])
    types = [TensorType(dtype, (R, *lead[1:], 2304))] * 2
    weight = torch.rand(lead) if experts else None
    tensors = [gate, up]
    if weight is not None:
        tensors.append(weight)
        types.append(TensorType(DType.F32, (R, experts)))
    op = ops.SwiGlu(10.0)
    (got,) = run_kernel(op, tensors, types, rows=5, splits=3)
    check(got, swiglu(gate, up, weight, 10.0), dtype)
    assert (got == evaluate(op, tensors, types)[0]).float().mean() > (
        0.999 if dtype is DType.BF16 else 0.4
    )
    (one,) = run_kernel(op, [t[2:3] for t in tensors], types, rows=1)
    assert torch.equal(one, got[2:3])


def test_swiglu_of_every_gate_value():
    """All bf16 gates at once: the exponential overflows, underflows and meets NaN."""
    gate = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
    gate = gate[gate.abs() < torch.inf].reshape(1, -1)
    gate = torch.cat([gate, torch.zeros(1, -gate.shape[1] % 2304)], 1).reshape(-1, 2304)
    up = torch.ones_like(gate)
    types = [TensorType(DType.F32, (R, 2304))] * 2
    op = ops.SwiGlu(10.0)
    (got,) = run_kernel(op, [gate, up], types, rows=len(gate))
    exact = swiglu(gate, up, None, 10.0)
    # Where e^-gate is no normal fp32 the quotient is as good as zero.
    assert (got.double() - exact).abs().le(4 * 2.0**-24 * exact.abs() + 2e-36).all()
    gate[0, :4] = torch.tensor([torch.nan, -torch.inf, torch.inf, 1])
    up[0, 3] = torch.nan
    (got,) = run_kernel(op, [gate[:1], up[:1]], types, rows=1)
    assert got[0, :4].isnan().tolist() == [True, True, False, True]


def test_swiglu_matches_the_released_pairs():
    golden = load_file(golden_root() / "ops" / "swiglu_clamp.safetensors")
    gate, up = (half.contiguous().unsqueeze(1) for half in golden["gate_up"].chunk(2, dim=1))
    weight = golden["topk_weights"].unsqueeze(1)
    rows, _, channels = gate.shape
    types = [TensorType(DType.F32, (R, 1, channels))] * 2 + [TensorType(DType.F32, (R, 1))]
    op = ops.SwiGlu(float(golden["clamp"]))
    (got,) = run_kernel(op, [gate, up, weight], types, rows)
    torch.testing.assert_close(got.squeeze(1), golden["out"], rtol=1e-5, atol=1e-7)


@ELEMENTS
def test_moe_combine_sums_in_fp32_and_rounds_once(dtype):
    torch.manual_seed(0)
    routed, shared = torch.randn(9, 6, 5120), torch.randn(9, 5120)
    routed[1] *= 1e-3
    shared[1] = 0
    routed[2] = 0
    routed[3, 4, 100] = 1e4
    routed, shared = routed.to(STORED[dtype]), shared.to(STORED[dtype])
    types = [TensorType(dtype, (R, 6, 5120)), TensorType(dtype, (R, 5120))]
    (got,) = run_kernel(ops.MoeCombine(), [routed, shared], types, rows=9, splits=3)
    exact = routed.double().sum(1) + shared.double()
    check(got, exact, dtype)
    in_order = shared.float()
    total = routed[:, 0].float()
    for e in range(1, 6):
        total = total + routed[:, e].float()
    assert torch.equal(got, (total + in_order).to(STORED[dtype]))
    (one,) = run_kernel(ops.MoeCombine(), [routed[3:4], shared[3:4]], types, rows=1)
    assert torch.equal(one, got[3:4])


def gate_types(experts: int, images: bool) -> list[TensorType]:
    bias = TensorType(DType.F32, (experts,))
    both = [TensorType(DType.F32, (R, experts)), bias]
    return [*both, bias, I32_ROWS] if images else both


def route(logits: torch.Tensor, bias: torch.Tensor, k: int, scale: float):
    """Section 3.11 in float64, one row at a time; also how far the k-th is from the next."""
    experts, weights, margins = [], [], []
    for z, b in zip(logits.double().tolist(), bias.double().tolist(), strict=True):
        z = torch.tensor(z, dtype=torch.float64)
        score = torch.where(z > 20, z, z.clamp(max=20).exp().log1p()).sqrt()
        key = (score + torch.tensor(b, dtype=torch.float64)).tolist()
        order = sorted(range(len(key)), key=lambda e: (-key[e], e))
        margins.append(key[order[k - 1]] - key[order[k]])
        chosen = score[sorted(order[:k])]
        experts.append(sorted(order[:k]))
        weights.append(scale * chosen / (chosen.sum() + 1e-20))
    return torch.tensor(experts, dtype=torch.int32), torch.stack(weights), torch.tensor(margins)


@pytest.mark.parametrize("scale", [1.0, 1e-3, 30.0])
def test_topk_gate_chooses_with_the_bias_of_the_row(scale):
    torch.manual_seed(1)
    logits = torch.randn(40, 384) * scale
    bias, bias_vl = torch.randn(384) * 0.3, torch.randn(384) * 0.3
    image = (torch.arange(40) % 3 == 0).int()
    logits[4] = -90.0  # scores near zero: the quotient needs its 1e-20 no more than it hurts
    logits[5, 7] = 25.0
    types = gate_types(384, images=True)
    op = ops.TopKGate(k=6, scale=1.5)
    tensors = [logits, bias, bias_vl, image]
    expert, weight = run_kernel(op, tensors, types, rows=40, splits=3)
    moved = torch.where(image.unsqueeze(1) != 0, bias_vl, bias)
    expect, exact, margin = route(logits, moved, 6, 1.5)
    sure = margin > 1e-5 * logits.abs().amax(1).clamp(min=1)
    assert sure.float().mean() > 0.9
    assert torch.equal(expert[sure], expect[sure])
    torch.testing.assert_close(weight[sure].double(), exact[sure], rtol=1e-6, atol=0)
    reference = evaluate(op, tensors, types)
    assert torch.equal(expert[sure], reference[0][sure])
    torch.testing.assert_close(weight[sure], reference[1][sure], rtol=1e-6, atol=0)
    one = run_kernel(op, [logits[9:10], bias, bias_vl, image[9:10]], types, rows=1)
    assert torch.equal(one[0], expert[9:10])
    assert torch.equal(one[1], weight[9:10])


def test_topk_gate_matches_the_released_pairs():
    golden = load_file(golden_root() / "ops" / "router.safetensors")
    logits, bias = golden["logits"], golden["bias"]
    expert, weight = run_kernel(
        ops.TopKGate(k=6, scale=1.5), [logits, bias], gate_types(384, images=False), len(logits)
    )
    sure = golden["margin"] > 1e-5
    assert torch.equal(expert[sure], golden["topk_idx"][sure])
    torch.testing.assert_close(weight[sure], golden["topk_weights"][sure], rtol=1e-6, atol=1e-7)


def test_topk_gate_breaks_ties_low_and_survives_nan():
    logits, bias = torch.zeros(8, 384), torch.zeros(384)
    logits[1, 300:] = 1.0
    logits[2] = torch.nan
    logits[3, ::2] = torch.nan
    logits[4] = -torch.inf
    logits[5, 380] = torch.inf
    logits[6] = torch.arange(384) / 10
    logits[7] = -torch.arange(384) / 10
    expert, weight = run_kernel(
        ops.TopKGate(k=6, scale=1.5), [logits, bias], gate_types(384, images=False), rows=8
    )
    assert expert.tolist() == [
        [0, 1, 2, 3, 4, 5],
        [300, 301, 302, 303, 304, 305],
        [0, 1, 2, 3, 4, 5],
        [1, 3, 5, 7, 9, 11],
        [0, 1, 2, 3, 4, 5],
        [0, 1, 2, 3, 4, 380],
        [378, 379, 380, 381, 382, 383],
        [0, 1, 2, 3, 4, 5],
    ]
    assert torch.equal(weight[0], torch.full((6,), 0.25))
    assert weight[4].tolist() == [0] * 6
