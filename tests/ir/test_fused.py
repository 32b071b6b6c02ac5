"""A fused operator is its parts: types, meaning with every rounding, and what no longer moves."""

from __future__ import annotations

import torch

from deepinfer_compile.ir import codecs, fused, ops
from deepinfer_compile.ir.ops import Cost
from deepinfer_compile.ir.reference import evaluate
from deepinfer_compile.ir.text import parse_type
from deepinfer_compile.ir.types import DType


def test_meaning_keeps_the_rounding_between_parts() -> None:
    """Quantising unrounded rows would give other codes."""
    g = torch.Generator().manual_seed(1)
    x, w = torch.randn(50, 64, generator=g), (1 + torch.randn(64, generator=g) / 10).bfloat16()
    types = [parse_type("bf16[R,64]"), parse_type("bf16[64]")]
    op = fused.RmsNormQuantize(1e-6, DType.MXFP8)
    (got,) = evaluate(op, [x.bfloat16(), w], types)
    reals = x.bfloat16().double()
    normed = reals * (reals.square().mean(1, keepdim=True) + 1e-6).rsqrt() * w.double()
    assert torch.equal(got, codecs.encode_records(codecs.round_bf16(normed), DType.MXFP8))
    assert not torch.equal(got, codecs.encode_records(normed, DType.MXFP8))


def test_results_of_several_parts_come_in_order() -> None:
    texts = ("bf16[R,64]", "bf16[R,4,64]", "f32[R,4]", "f32[R,4,4]", "f32[24,256]", "f32[24]")
    types = [parse_type(text) for text in (*texts, "f32[3]", "f32[R,4]", "bf16[64]")]
    op = fused.MhcExpandEnter(20, 1e-6, 1e-20, 1e-20, DType.MXFP8)
    shown = [str(t) for t in op.infer(tuple(types))]
    vectors = ["f32[R,4]", "f32[R,4]", "f32[R,4,4]"]
    assert shown == ["bf16[R,4,64]", *vectors, "bf16[R,64]", "mxfp8[R,64]"]
    (pair,) = fused.ChunkRopeAttention(16, 0.125).compose(
        lambda part, *xs: (f"{part.name}({', '.join(xs)})",), ["q", "window", "kv", "angles"]
    )
    assert pair == "rope(chunk_attention(rope(q, angles), window, kv), angles)"


def test_cost_counts_an_operand_once_and_nothing_in_between() -> None:
    x, w = parse_type("bf16[R,64]"), parse_type("bf16[64]")
    record = 64 + 2
    assert fused.RmsNormQuantize(1e-6, DType.MXFP8).cost((x, w)) == Cost(
        bytes_fixed=128, bytes_per_row=128 + record, flops_per_row=4 * 64 + 3 * 64
    )
    matrix, scale = parse_type("e4m3[96,64]"), parse_type("ue8m0[3,2]")
    rows = parse_type("mxfp8[R,64]")
    gated = fused.LinearSwiGlu(10.0, DType.BF16, DType.MXFP8)
    assert gated.cost((rows, matrix, scale, matrix, scale)) == Cost(
        bytes_fixed=2 * (96 * 64 + 6),
        bytes_per_row=record + 96 + 3,
        flops_per_row=2 * 2 * 64 * 96 + 8 * 96 + 3 * 96,
    )
    two = fused.LinearPair(DType.F32).cost((rows, matrix, scale, matrix, scale))
    assert two.bytes_per_row == record + 2 * 4 * 96


def test_cost_of_experts_counts_those_a_row_chose() -> None:
    x, expert, weight = (parse_type(t) for t in ("mxfp8[R,64]", "i32[R,2]", "f32[R,2]"))
    w, scale = parse_type("e2m1[8,32,64]"), parse_type("ue8m0[8,32,2]")
    op = fused.ExpertSwiGlu(10.0, DType.BF16, DType.MXFP8)
    cost = op.cost((x, expert, w, scale, w, scale, weight))
    matrices = 2 * 2 * (32 * 32 + 32 * 2)
    assert (cost.bytes_fixed, cost.bytes_per_row) == (0, 66 + 8 + 8 + 2 * 33)
    assert (cost.picked_per_row, cost.pool_bytes) == (matrices, matrices // 2 * 8)


def test_what_is_read_twice_and_kept_is_written_once() -> None:
    texts = ("bf16[R,4,64]", "f32[24,256]", "f32[24]", "f32[3]", "f32[R,4]", "bf16[64]")
    op = fused.MhcEnter(20, 1e-6, 1e-20, 1e-20, DType.MXFP8)
    cost = op.cost(tuple(map(parse_type, texts)))
    streams, coefficients, y = 4 * 128, 4 * (4 + 4 + 16), 128
    assert cost.bytes_per_row == streams + 16 + coefficients + y + 66
    assert cost.bytes_fixed == 4 * (24 * 256 + 24 + 3) + 128
    assert cost.flops_per_row > ops.MhcCoefficients(20, 1e-6, 1e-20).flops_per_row(
        tuple(map(parse_type, texts[:4]))
    )
