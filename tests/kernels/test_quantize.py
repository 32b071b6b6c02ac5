"""Records of codes and scales: exact against the codecs, the released bytes, and a search."""

import pytest
import torch
from safetensors.torch import load_file
from torch.nn.functional import pad

from deepinfer_compile.ir import codecs, ops
from deepinfer_compile.ir.reference import evaluate
from deepinfer_compile.ir.types import DType, R, TensorType
from tests.golden_data import golden_root
from tests.kernels.checks import same_bits
from tests.kernels.harness import run_kernel

BF16, F32 = DType.BF16, DType.F32
STORED = {F32: torch.float32, BF16: torch.bfloat16}
RECORDS = pytest.mark.parametrize(
    "to", [DType.MXFP8, DType.NVFP4, DType.MXFP4], ids=lambda to: to.value
)
ELEMENTS = pytest.mark.parametrize("dtype", [BF16, F32], ids=lambda d: d.value)


def quantized(x: torch.Tensor, dtype: DType, to: DType, splits: int = 1) -> torch.Tensor:
    types = [TensorType(dtype, (R, *x.shape[1:]))]
    (records,) = run_kernel(ops.Quantize(to), [x], types, rows=len(x), splits=splits)
    (expect,) = evaluate(ops.Quantize(to), [x], types)
    assert records.shape == expect.shape
    assert same_bits(records, expect), f"{(records != expect).sum()} of {expect.numel()} bytes"
    return records


@RECORDS
@ELEMENTS
def test_quantize_is_the_codec(to, dtype):
    torch.manual_seed(1)
    x = torch.randn(40, 3, 512)
    x[1] = 0
    x[2] *= -0.0
    x[3] *= 1e-3
    x[4] *= 1e-6  # below the mxfp8 floor, at that of nvfp4
    x[5] *= 1e-38  # subnormal numbers, at the floor of mxfp4
    x[6] *= 1e30
    x[7, :, ::97] = 3e38
    x[8, 0, 5] = 1000
    x[9] = x[9].sign() * 448 * 2.0 ** torch.arange(-40, 56)[torch.arange(512) // 32 * 3]
    x = x.to(STORED[dtype])
    records = quantized(x, dtype, to)
    assert same_bits(quantized(x, dtype, to, splits=3), records)
    for r in (0, 8, 39):
        assert same_bits(quantized(x[r : r + 1], dtype, to), records[r : r + 1])


@RECORDS
@ELEMENTS
def test_every_tie_goes_to_the_even_code(to, dtype):
    """A group whose scale is known, and in it every number halfway between two codes, the numbers
    next to it, and both signs."""
    e4m3 = to is DType.MXFP8
    codes = torch.arange(127 if e4m3 else 8).byte()
    magnitudes = (codecs.decode_e4m3 if e4m3 else codecs.decode_e2m1)(codes).float()
    ties = (magnitudes[1:] + magnitudes[:-1]) / 2
    near = torch.cat([ties, ties.nextafter(ties * 2), ties.nextafter(ties * 0), magnitudes])
    values = torch.cat([near, -near])
    room = to.group - 1  # one channel of each group holds the largest number
    values = pad(values, (0, -len(values) % room)).reshape(-1, room)
    groups = torch.cat([magnitudes[-1].expand(len(values), 1), values], dim=1).flatten()
    rows = pad(groups, (0, -len(groups) % 512)).reshape(-1, 512)
    scales = 2.0 ** torch.arange(-3, 5).reshape(-1, 1, 1)
    quantized((rows * scales).reshape(-1, 512).to(STORED[dtype]), dtype, to)


@RECORDS
def test_scales_step_where_they_should(to):
    """Groups whose largest number is at a step between two scales, just below it, just above it."""
    if to is DType.NVFP4:
        scales = codecs.decode_e4m3(torch.arange(127).byte()).float()
        steps = (scales[1:] + scales[:-1]) / 2 * 6
    else:
        steps = (448 if to is DType.MXFP8 else 6) * 2.0 ** torch.arange(-100, 100)
    peaks = torch.cat([steps, steps.nextafter(steps * 2), steps.nextafter(steps * 0)])
    groups = peaks.unsqueeze(1) * torch.linspace(-0.99, 1, to.group)
    rows = pad(groups.flatten(), (0, -groups.numel() % 512)).reshape(-1, 512)
    quantized(rows, F32, to)


@RECORDS
@ELEMENTS
def test_a_group_with_a_nan_decodes_to_nan_alone(to, dtype):
    torch.manual_seed(2)
    clean = torch.randn(4, 512).to(STORED[dtype])
    x = clean.clone()
    x[1, 70], x[2, 70] = torch.nan, torch.inf
    (records,) = run_kernel(ops.Quantize(to), [x], [TensorType(dtype, (R, 512))], rows=4)
    groups = codecs.decode_records(records, to).reshape(4, -1, to.group)
    others = codecs.decode_records(quantized(clean, dtype, to), to).reshape(4, -1, to.group)
    hit = 70 // to.group
    assert groups[1, hit].isnan().all()
    if to is DType.NVFP4:
        assert groups[2, hit].abs().max() == 6 * 448  # an e4m3 scale saturates
    else:
        assert groups[2, hit].isnan().all()
    groups[1:3, hit] = others[1:3, hit]
    assert torch.equal(groups, others)


@RECORDS
def test_quantize_takes_every_exponent(to):
    """Random fp32 bits, finite: scales over the whole range, products that underflow."""
    torch.manual_seed(3)
    bits = torch.randint(-(2**31), 2**31, (300, 3, 512), dtype=torch.int64).int()
    x = bits.view(torch.float32)
    x = torch.where(x.isfinite(), x, 1.0)
    base = torch.randint(-120, 120, (300, 3, 1))
    x[100:] = torch.ldexp(torch.randn(200, 3, 512), base[100:])
    quantized(x, F32, to)


def test_released_cache_records():
    golden = load_file(golden_root() / "ops" / "kv_cache_records.safetensors")
    kv = golden["kv"].unsqueeze(1)
    assert torch.equal(quantized(kv, BF16, DType.MXFP8).squeeze(1), golden["swa_fp8_record_528"])
    assert torch.equal(
        quantized(kv, BF16, DType.NVFP4).squeeze(1), golden["main_fp4_record_288_div"]
    )
    keys = quantized(golden["index_k"], BF16, DType.MXFP4)
    assert torch.equal(keys[:, :64], golden["index_fp4_codes_64"])
    assert torch.equal(keys[:, 64:], golden["index_ue8m0_scales_4"])


def test_released_activations():
    golden = load_file(golden_root() / "ops" / "quant_linear.safetensors")
    records = quantized(golden["x"], BF16, DType.MXFP8)
    assert torch.equal(records[:, :256], golden["x_fp8"].view(torch.uint8))
    assert torch.equal(records[:, 256:], golden["x_scale_ue8m0"])
