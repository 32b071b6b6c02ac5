"""The codecs, on every code and at every boundary, against torch's float8 types and the golden
records."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from deepinfer_compile.ir import codecs
from deepinfer_compile.ir.types import DType
from tests.ir.given import golden_op

ALL_BYTES = torch.arange(256, dtype=torch.int16).to(torch.uint8)
RECORDS = (DType.MXFP8, DType.NVFP4, DType.MXFP4)


def same(a: Tensor, b: Tensor) -> bool:
    """Equal with NaN equal to itself and the sign of zero told apart."""
    a, b = a.double(), b.double()
    alike = (a == b) & (torch.signbit(a) == torch.signbit(b))
    return bool((alike | (a.isnan() & b.isnan())).all())


def every_bf16() -> Tensor:
    return torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)


def test_e4m3_decodes_every_code_as_torch_does() -> None:
    assert same(codecs.decode_e4m3(ALL_BYTES), ALL_BYTES.view(torch.float8_e4m3fn).float())
    assert same(
        codecs.decode_e4m3(ALL_BYTES.view(torch.float8_e4m3fn)), codecs.decode_e4m3(ALL_BYTES)
    )


def test_e4m3_encodes_every_bf16_as_torch_does_once_clamped() -> None:
    x = every_bf16()
    expect = x.float().clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    assert torch.equal(codecs.encode_e4m3(x.double()), expect)


def test_e4m3_breaks_ties_to_even_and_nothing_else() -> None:
    values = codecs.decode_e4m3(torch.arange(127, dtype=torch.uint8))
    middle = (values[1:] + values[:-1]) / 2
    lower = torch.arange(126, dtype=torch.uint8)
    even = lower + (lower & 1)
    tiny = torch.full_like(middle, math.inf)
    assert torch.equal(codecs.encode_e4m3(middle), even)
    assert torch.equal(codecs.encode_e4m3(-middle), even | 128)
    assert torch.equal(codecs.encode_e4m3(torch.nextafter(middle, -tiny)), lower)
    assert torch.equal(codecs.encode_e4m3(torch.nextafter(middle, tiny)), lower + 1)


def test_e4m3_saturates_and_keeps_nan_and_the_sign_of_zero() -> None:
    x = torch.tensor([448, 464, 480, 1e9, math.inf, -math.inf, math.nan, 0.0, -0.0, -1e-9])
    expect = [0x7E, 0x7E, 0x7E, 0x7E, 0x7E, 0xFE, 0x7F, 0x00, 0x80, 0x80]
    assert codecs.encode_e4m3(x.double()).tolist() == expect


def test_e2m1_codes_are_the_published_table() -> None:
    magnitudes = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    codes = torch.arange(16, dtype=torch.uint8)
    table = torch.tensor(magnitudes + [-m for m in magnitudes], dtype=torch.float64)
    assert same(codecs.decode_e2m1(codes), table)
    assert torch.equal(codecs.encode_e2m1(table), codes)


@pytest.mark.parametrize(
    ("value", "rounded"),
    [(0.25, 0.0), (0.75, 1), (1.25, 1), (1.75, 2), (2.5, 2), (3.5, 4), (5, 4), (7, 6), (1e9, 6)],
)
def test_e2m1_ties_and_saturation_are_those_of_section_4_3(value: float, rounded: float) -> None:
    x = torch.tensor([value, -value], dtype=torch.float64)
    expect = torch.tensor([rounded, -rounded], dtype=torch.float64)
    assert same(codecs.decode_e2m1(codecs.encode_e2m1(x)), expect)
    near = torch.tensor([math.nextafter(value, 0), math.nextafter(value, 9)], dtype=torch.float64)
    below, above = codecs.decode_e2m1(codecs.encode_e2m1(near)).tolist()
    assert below < above or value >= 6


def test_nibbles_hold_the_even_channel_low() -> None:
    codes = torch.tensor([[1, 2, 15, 8]], dtype=torch.uint8)
    assert codecs.pack_nibbles(codes).tolist() == [[0x21, 0x8F]]
    assert torch.equal(codecs.unpack_nibbles(codecs.pack_nibbles(codes)), codes)
    assert torch.equal(codecs.pack_nibbles(codecs.unpack_nibbles(ALL_BYTES)), ALL_BYTES)


def test_ue8m0_decodes_every_code_as_torch_does() -> None:
    decoded = codecs.decode_ue8m0(ALL_BYTES)
    assert same(decoded, ALL_BYTES.view(torch.float8_e8m0fnu).float())
    assert decoded[0] == 2.0**-127
    assert torch.equal(codecs.encode_ue8m0(decoded[1:255].float()), ALL_BYTES[1:255])


def test_ue8m0_rounds_any_mantissa_up() -> None:
    one = torch.tensor(1.0)
    above, below = torch.nextafter(one, one * 2), torch.nextafter(one, one * 0)
    t = torch.stack([one, above, one * 1.5, one * 2, below, one * 0.5])
    assert codecs.encode_ue8m0(t).tolist() == [127, 128, 128, 128, 127, 126]
    assert codecs.encode_ue8m0(torch.tensor([math.inf, 3e38])).tolist() == [255, 255]


def test_bf16_rounds_once() -> None:
    just_above_tie = 1 + 2.0**-8 + 2.0**-40  # f32 drops the last term and leaves a tie
    x = torch.tensor([just_above_tie, -just_above_tie, 1 + 2.0**-8], dtype=torch.float64)
    assert codecs.round_bf16(x).tolist() == [1 + 2.0**-7, -1 - 2.0**-7, 1.0]
    assert x[:1].to(torch.bfloat16).item() == 1.0  # why the codec exists


def test_bf16_of_f32_is_torch_s_cast() -> None:
    generator = torch.Generator().manual_seed(1)
    bits = torch.randint(-(2**31), 2**31, (1 << 16,), generator=generator).to(torch.int32)
    edges = torch.tensor([math.inf, -math.inf, math.nan, 0.0, -0.0, 3.4e38, 1e-45, -1e-40])
    x = torch.cat([bits.view(torch.float32), edges])
    assert same(codecs.round_bf16(x.double()), x.to(torch.bfloat16))
    assert same(codecs.round_bf16(every_bf16().double()), every_bf16())
    assert codecs.round_bf16(torch.tensor([1e300, -1e300]).double()).tolist() == [
        math.inf,
        -math.inf,
    ]


def test_records_equal_the_golden_bytes() -> None:
    golden = golden_op("kv_cache_records")
    index = torch.cat([golden["index_fp4_codes_64"], golden["index_ue8m0_scales_4"]], dim=1)
    for rows, dtype, record, decoded in (
        ("kv", DType.MXFP8, golden["swa_fp8_record_528"], "swa_dequant_bf16"),
        ("kv", DType.NVFP4, golden["main_fp4_record_288_div"], "main_dequant_f32"),
        ("index_k", DType.MXFP4, index, "index_dequant_bf16"),
    ):
        assert torch.equal(codecs.encode_records(golden[rows], dtype), record), dtype
        assert same(codecs.decode_records(record, dtype), golden[decoded]), dtype


def rows_of_every_size(dtype: DType) -> Tensor:
    """f32 rows: sizes from far below the floor to past saturation, one size a group."""
    generator = torch.Generator().manual_seed(2)
    groups = torch.randn(200, 4, dtype.group, generator=generator)
    size = torch.randint(-40, 16, (200, 4, 1), generator=generator)
    return torch.ldexp(groups, size).flatten(1)


@pytest.mark.parametrize("dtype", RECORDS)
def test_record_codes_are_nearest_under_their_scale(dtype: DType) -> None:
    """Every channel decodes to a value no code of its group comes closer than."""
    rows = rows_of_every_size(dtype)
    record = codecs.encode_records(rows, dtype)
    codes, scales = codecs.split_records(record, dtype)
    assert record.shape == (200, dtype.row_bytes(rows.shape[1]))
    table = (
        codecs.decode_e4m3(ALL_BYTES)
        if dtype is DType.MXFP8
        else codecs.decode_e2m1(ALL_BYTES % 16)
    )
    table = table[~table.isnan()].unique()
    scale = codecs.decode_scales(scales, dtype).repeat_interleave(dtype.group, dim=1)
    value = codecs.decode_records(record, dtype)
    exact = rows.double()
    best = (exact.unsqueeze(-1) - table * scale.unsqueeze(-1)).abs().amin(-1)
    assert torch.equal((exact - value).abs(), best)
    assert torch.equal(torch.signbit(value), torch.signbit(exact))
    assert codes.shape[1] + scales.shape[1] == record.shape[1]


@pytest.mark.parametrize("dtype", [DType.MXFP8, DType.MXFP4])
def test_power_of_two_scales_are_the_smallest_that_do_not_saturate(dtype: DType) -> None:
    """Up to the f32 reciprocal, which lies above 1/6 and below 1/448 by less than an f32 ulp."""
    rows = rows_of_every_size(dtype)
    largest = 448 if dtype is DType.MXFP8 else 6
    floor = 1e-4 if dtype is DType.MXFP8 else 6 * 2.0**-126
    _, scales = codecs.split_records(codecs.encode_records(rows, dtype), dtype)
    amax = rows.double().abs().reshape(200, 4, -1).amax(-1).clamp(min=floor)
    ratio = amax / largest / codecs.decode_ue8m0(scales)
    assert bool(((ratio > 0.5 * (1 - 1e-6)) & (ratio <= 1 + 1e-6)).all())


@pytest.mark.parametrize(
    ("dtype", "scale", "zero", "minus_zero"),
    [(DType.MXFP8, 105, 0x00, 0x80), (DType.NVFP4, 0x01, 0, 8), (DType.MXFP4, 1, 0, 8)],
)
def test_records_of_zeros_keep_signs_under_the_floor_scale(
    dtype: DType, scale: int, zero: int, minus_zero: int
) -> None:
    row = torch.zeros(1, 64)
    row[:, 1::2] = -0.0
    codes, scales = codecs.split_records(codecs.encode_records(row, dtype), dtype)
    assert set(scales.flatten().tolist()) == {scale}
    codes = codes if dtype is DType.MXFP8 else codecs.unpack_nibbles(codes)
    assert codes[0, :4].tolist() == [zero, minus_zero, zero, minus_zero]


def test_scale_boundaries() -> None:
    """amax exactly at a power of two of the format's largest value, and one ulp beyond."""
    row = torch.zeros(2, 32)
    row[:, 0] = torch.tensor([448.0, torch.nextafter(torch.tensor(448.0), torch.tensor(1e9))])
    _, scales = codecs.split_records(codecs.encode_records(row, DType.MXFP8), DType.MXFP8)
    assert scales.flatten().tolist() == [127, 128]
    row[:, 0] = torch.tensor([6.0, 12.0])  # fp32(1/6) is above 1/6, but 6 times it rounds to 1
    _, scales = codecs.split_records(codecs.encode_records(row, DType.MXFP4), DType.MXFP4)
    assert scales.flatten().tolist() == [127, 128]
    row[:, 0] = torch.tensor([6 * 448.0, 1e9])  # the nvfp4 scale saturates, then the code does
    record = codecs.encode_records(row, DType.NVFP4)
    assert codecs.decode_records(record, DType.NVFP4)[:, 0].tolist() == [2688.0, 2688.0]


@pytest.mark.parametrize("dtype", RECORDS)
def test_a_nan_spoils_its_own_group_only(dtype: DType) -> None:
    row = torch.full((1, 2 * dtype.group), 6.0)
    row[0, 3] = math.nan
    value = codecs.decode_records(codecs.encode_records(row, dtype), dtype)
    assert bool(value[0, : dtype.group].isnan().all())
    assert value[0, dtype.group :].tolist() == [6.0] * dtype.group


def test_mxfp8_equals_torch_s_cast_of_scaled_rows() -> None:
    rows = rows_of_every_size(DType.MXFP8)
    codes, scales = codecs.split_records(codecs.encode_records(rows, DType.MXFP8), DType.MXFP8)
    scale = codecs.decode_ue8m0(scales).float().repeat_interleave(32, dim=1)
    cast = (rows / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
    assert torch.equal(codes, cast.view(torch.uint8))
