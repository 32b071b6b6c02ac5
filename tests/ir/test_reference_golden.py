"""Operators against the golden operator files, at the tolerances of their README.

`dspark_draft_metadata` is in `test_reference_draft.py`, `kv_cache_records` in `test_codecs.py`.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from deepinfer_compile.ir import codecs, ops
from deepinfer_compile.ir.reference.attention import attend
from deepinfer_compile.ir.reference.dense import rope_frequencies, weight_reals
from deepinfer_compile.ir.reference.operand import Operand
from deepinfer_compile.ir.text import parse_type
from deepinfer_compile.ir.types import DType
from tests.ir.given import given, golden_op, one

F32 = DType.F32
EPS = 1e-20


def worst(a: Tensor, b: Tensor) -> float:
    """The largest difference, relative where values exceed 1."""
    return float(((a.double() - b.double()).abs() / b.double().abs().clamp(min=1)).max())


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def test_quantize_and_scaled_linears_equal_the_golden_products() -> None:
    g = golden_op("quant_linear")
    record = one(ops.Quantize(DType.MXFP8), (g["x"], "bf16[R,256]"))
    codes, scales = codecs.split_records(record, DType.MXFP8)
    assert torch.equal(codes, g["x_fp8"].view(torch.uint8))
    assert torch.equal(scales, g["x_scale_ue8m0"])

    fp8 = (g["w_fp8"], "e4m3[96,256]"), (g["w_fp8_scale_ue8m0"], "ue8m0[3,8]")
    y = one(ops.Linear(F32), (record, "mxfp8[R,256]"), *fp8)
    assert worst(y, g["y_fp8_f32"]) < 1e-5
    weight, scale = (Operand(tensor, parse_type(text)) for tensor, text in fp8)
    assert torch.equal(weight_reals(weight, scale), g["w_fp8_dequant"].double())


def test_expert_linear_equals_the_golden_product() -> None:
    g = golden_op("quant_linear")
    record = one(ops.Quantize(DType.MXFP8), (g["x"], "bf16[R,256]"))
    other = torch.full_like(g["w_fp4_packed"], 0x77)
    packed = torch.stack([other, g["w_fp4_packed"], other])
    scale = g["w_fp4_scale_ue8m0"].repeat(3, 1, 1)
    expert = torch.ones(8, 1, dtype=torch.int32)
    experts = (expert, "i32[R,1]"), (packed, "e2m1[3,96,256]"), (scale, "ue8m0[3,96,8]")
    y = one(ops.ExpertLinear(F32), (record, "mxfp8[R,256]"), *experts)
    assert worst(y[:, 0], g["y_fp4_f32"]) < 1e-5
    per_expert = one(ops.ExpertLinear(F32), (record.unsqueeze(1), "mxfp8[R,1,256]"), *experts)
    assert torch.equal(per_expert, y)


def test_grouped_linear_equals_the_golden_output_projection() -> None:
    g = golden_op("o_lora")
    o = (g["o"], "bf16[R,4,512]")
    u = one(ops.Linear(F32, groups=int(g["groups"])), o, (g["wo_a"], "bf16[128,1024]"))
    y = one(ops.Linear(F32), (u, "f32[R,128]"), (g["wo_b"], "bf16[256,128]"))
    assert worst(y, g["out_f32"]) < 1e-4
    interleaved = g["wo_a"].reshape(2, 64, 1024).transpose(0, 1).reshape(128, 1024).contiguous()
    wrong = one(ops.Linear(F32, groups=2), o, (interleaved, "bf16[128,1024]"))
    assert worst(wrong, u) > 1e-2


def test_mhc_equals_the_golden_coefficients_and_streams() -> None:
    g = golden_op("mhc")
    op = ops.MhcCoefficients(iterations=20, eps=1e-6, norm_eps=EPS)
    x = (g["residual"], "bf16[R,4,256]")
    pre, post, comb = given(
        op, x, (g["fn"], "f32[24,1024]"), (g["base"], "f32[24]"), (g["scale"], "f32[3]")
    )
    for got, name in ((pre, "pre"), (post, "post"), (comb, "comb")):
        assert worst(got, g[name]) < 1e-5, name

    wide = (g["residual"].float(), "f32[R,4,256]")
    y = one(ops.MhcCollapse(), wide, (g["prev_pre_mix"], "f32[R,4]"))
    assert worst(y, g["pre_apply_f32"]) < 1e-5
    o = (g["sublayer_out"].float(), "f32[R,256]")
    mixes = (g["post"], "f32[R,4]"), (g["comb"], "f32[R,4,4]")
    assert worst(one(ops.MhcExpand(), o, wide, *mixes), g["post_apply_f32"]) < 1e-5


@pytest.mark.parametrize(
    ("table", "op"),
    [
        ("swa", ops.RopeAngles(64, 1e4)),
        ("compressed", ops.RopeAngles(64, 1.6e5, 1, 16.0, 32.0, 1.0, 65536)),
    ],
)
def test_rope_equals_the_golden_tables(table: str, op: ops.RopeAngles) -> None:
    g = golden_op("rope_released_params")
    assert torch.equal(rope_frequencies(op), g[f"{table}.inv_freq"])
    angles = one(op, (g["positions"], "i32[R]"))
    assert float((angles[:, 0] - g[f"{table}.cos"]).abs().max()) < 1e-6
    assert float((angles[:, 1] - g[f"{table}.sin"]).abs().max()) < 1e-6

    x = (g[f"{table}.x"].float(), "f32[R,2,512]")
    turned = one(ops.Rope(), x, (angles, "f32[R,2,32]"))
    assert worst(turned, g[f"{table}.x_rot_f32"]) < 1e-6
    back = one(ops.Rope(inverse=True), (turned, "f32[R,2,512]"), (angles, "f32[R,2,32]"))
    assert worst(back, g[f"{table}.x"]) < 1e-6


def test_rope_position_of_a_pair_is_its_first_token() -> None:
    single, pair = ops.RopeAngles(64, 1e4), ops.RopeAngles(64, 1e4, ratio=2)
    odd = one(pair, (ints(0, 1, 2, 3, 101), "i32[R]"))
    assert torch.equal(odd, one(single, (ints(0, 0, 2, 2, 100), "i32[R]")))


def test_pooling_equals_the_golden_latents_in_prefill_and_decode() -> None:
    g = golden_op("compressor_ratio2")
    cut, rows, channels = int(g["prefill_len"]), len(g["h"]), 512
    h = (g["h"], "bf16[R,256]")
    value = one(ops.Linear(F32), h, (g["wkv"], "bf16[512,256]"))
    score = one(ops.Linear(F32), h, (g["wgate"], "bf16[512,256]"))
    position = torch.arange(rows, dtype=torch.int32)
    tail = torch.full((2, 3, 2, channels), torch.nan)

    def latents(pooled: Tensor) -> Tensor:
        w = (g["norm_weight"], f"bf16[{channels}]")
        return one(ops.RmsNorm(EPS), (pooled, f"f32[R,{channels}]"), w)

    def step(first: int, last: int) -> tuple[tuple[Tensor, str], ...]:
        slot = torch.ones(last - first, dtype=torch.int32)
        return (slot, "i32[R]"), (position[first:last], "i32[R]")

    def parts(first: int, last: int) -> tuple[tuple[Tensor, str], ...]:
        return (value[first:last], "f32[R,512]"), (score[first:last], "f32[R,512]")

    start = (torch.zeros(cut, dtype=torch.int32), "i32[R]")
    before = (tail, "!f32[2,3,2,512]")
    pooled = one(ops.ChunkPoolGroup(2, F32), before, *step(0, cut), start, *parts(0, cut))
    ends = 2 * g["prefill_latent_ids"] + 1
    assert worst(latents(pooled[ends]), g["prefill_latents_f32"]) < 1e-4
    assert not pooled[0::2].any(), "rows that complete no group are zero"

    tail = one(ops.RingStore(), before, *step(0, cut), *parts(0, cut))
    emitted = []
    for row in range(cut, rows):
        now = step(row, row + 1)
        tail = one(ops.RingStore(), (tail, "!f32[2,3,2,512]"), *now, *parts(row, row + 1))
        pooled = one(ops.PoolGroup(2, F32), (tail, "!f32[2,3,2,512]"), *now)
        if g["decode_emitted"][row - cut]:
            emitted.append(latents(pooled))
        else:
            assert not pooled.any()
    assert worst(torch.cat(emitted), g["decode_latents_f32"]) < 1e-4


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("masked", [False, True])
def test_engram_hash_equals_the_released_rows(layer: int, masked: bool) -> None:
    g = golden_op("engram_hash_released_params")
    multipliers = tuple(g["multipliers"][layer].tolist())
    primes = tuple(g["primes"][layer].flatten().tolist())
    assert sum(primes) == (384006168, 384016682)[layer]
    ids = g["compressed_ids"].clone()
    if masked:
        ids[g["text_mask"] == 0] = -1
    rows = len(ids)
    zero = torch.zeros(rows, dtype=torch.int32)
    position = (torch.arange(rows, dtype=torch.int32), "i32[R]")
    expect = g["hash_ids_with_mask" if masked else "hash_ids"][:, layer]

    history = torch.full((1, rows, 1), -7, dtype=torch.int32)
    chunk = (zero, "i32[R]"), (ids.unsqueeze(1), "i32[R,1]")
    op = ops.ChunkEngramHash(multipliers, primes, int(g["pad_id"]))
    before = (history, f"!i32[1,{rows},1]"), (zero, "i32[R]"), position
    assert torch.equal(one(op, *before, *chunk), expect)

    stored = one(ops.RingStore(), *before, chunk[1])
    decode = ops.EngramHash(multipliers, primes, int(g["pad_id"]))
    after = (stored, f"!i32[1,{rows},1]"), (zero, "i32[R]"), position
    assert torch.equal(one(decode, *after), expect)


def test_engram_gate_equals_the_golden_streams() -> None:
    g = golden_op("engram_gate")
    rows = len(g["h"])
    weights = (g["q_weight"], "bf16[4,256]"), (g["k_weight"], "bf16[4,256]")
    text = (torch.zeros(rows, dtype=torch.int32), "i32[R]")
    kv = (g["kv"].flatten(1), "bf16[R,1280]")
    op = ops.EngramGate(EPS)
    wide = one(op, (g["h"].float(), "f32[R,4,256]"), kv, *weights, text)
    assert worst(wide, g["out_f32"]) < 1e-5

    # A product of exactly zero has its own gate in TileKernels, which made the bf16 file.
    dot = (g["h"].double() * g["q_weight"] * g["k_weight"] * g["kv"][:, :4]).sum(-1)
    narrow = one(op, (g["h"], "bf16[R,4,256]"), kv, *weights, text)
    ulp = 2.0 ** (torch.floor(torch.log2(g["out_bf16"].double().abs())) - 7)
    off = (narrow.double() - g["out_bf16"].double()).abs() > ulp
    assert not off[dot != 0].any()

    image = (torch.ones(rows, dtype=torch.int32), "i32[R]")
    untouched = one(op, (g["h"], "bf16[R,4,256]"), kv, *weights, image)
    assert torch.equal(untouched, g["h"])


def test_router_equals_the_golden_choice() -> None:
    g = golden_op("router")
    gate = (g["logits"], "f32[R,384]"), (g["bias"], "f32[384]")
    expert, weight = given(ops.TopKGate(k=6, scale=1.5), *gate)
    sure = g["margin"] > 1e-5
    assert bool(sure.sum() > 50)
    assert torch.equal(expert[sure], g["topk_idx"][sure])
    assert worst(weight[sure], g["topk_weights"][sure]) < 1e-6

    # On image rows the other bias decides.
    image = (torch.arange(64) % 2).to(torch.int32)
    flipped = (g["bias"], "f32[384]"), (image, "i32[R]")
    zero = (torch.zeros(384), "f32[384]")
    mixed, _ = given(ops.TopKGate(k=6, scale=1.5), gate[0], zero, *flipped)
    unbiased, _ = given(ops.TopKGate(k=6, scale=1.5), gate[0], zero)
    assert torch.equal(mixed[1::2], expert[1::2])
    assert torch.equal(mixed[0::2], unbiased[0::2])


def test_swiglu_equals_the_golden_clamp() -> None:
    g = golden_op("swiglu_clamp")
    gate, up = g["gate_up"].reshape(16, 1, 256).chunk(2, dim=2)
    halves = (gate.contiguous(), "f32[R,1,128]"), (up.contiguous(), "f32[R,1,128]")
    op = ops.SwiGlu(float(g["clamp"]))
    h = one(op, *halves, (g["topk_weights"].reshape(16, 1), "f32[R,1]"))
    assert worst(h[:, 0], g["out"]) < 1e-5
    plain = one(op, *halves)
    assert worst(plain[:, 0] * g["topk_weights"].unsqueeze(1), g["out"]) < 1e-5


def test_attend_equals_the_golden_attention() -> None:
    g = golden_op("sparse_attn_sink")
    keys, sink = g["kv"].double(), g["sink"].double()
    for q, chosen, expect in zip(g["q"].double(), g["indices"].long(), g["out_f32"], strict=True):
        o = attend(q, keys[chosen.clamp(min=0)], chosen >= 0, sink, 512**-0.5)
        assert worst(o, expect) < 1e-5
        without = attend(q, keys[chosen.clamp(min=0)], chosen >= 0, sink - 1e9, 512**-0.5)
        assert worst(without, expect) > 1e-2


def index_operands(g: dict[str, Tensor]) -> tuple[tuple[Tensor, str], ...]:
    """The golden keys paged 8 entries a page, pages in a scrambled order, one slot a query."""
    rows, entries, pages = len(g["q"]), 8, 51
    q = one(ops.Quantize(DType.MXFP4), (g["q"], "bf16[R,32,128]"))
    assert torch.equal(codecs.decode_records(q, DType.MXFP4), g["q_fp4_dequant"].double())
    k = one(ops.Quantize(DType.MXFP4), (g["k"], "bf16[R,128]"))
    assert torch.equal(codecs.decode_records(k, DType.MXFP4), g["k_fp4_dequant"].double())

    generator = torch.Generator().manual_seed(3)
    table = torch.stack([torch.randperm(pages, generator=generator) for _ in range(rows)])
    store = torch.full((rows * pages, entries, 68), 0xFF, dtype=torch.uint8)
    table += torch.arange(rows).unsqueeze(1) * pages
    for row in range(rows):
        for entry, record in enumerate(k):
            store[table[row, entry // entries], entry % entries] = record
    slot = torch.arange(rows, dtype=torch.int32)
    position = g["visible_len"] - 1
    return (
        (q, "mxfp4[R,32,128]"),
        (g["weights_proj_out"], "bf16[R,32]"),
        (store, f"!mxfp4[{rows * pages},8,128]"),
        (table.to(torch.int32), f"i32[{rows},{pages}]"),
        (slot, "i32[R]"),
        (position, "i32[R]"),
    )


def as_set(row: Tensor, visible: int) -> set[int]:
    return {entry for entry in row.tolist() if 0 <= entry < visible}


def test_index_scores_and_both_selections_equal_the_golden_ones() -> None:
    g = golden_op("indexer")
    size, blocks, k = g["params"].tolist()
    operands = index_operands(g)
    position = operands[5]
    factor = 128**-0.5 * 32**-0.5
    scores = one(ops.IndexScores(1, factor, F32), *operands)
    seen = torch.arange(408) < g["visible_len"].unsqueeze(1)
    assert bool((scores[~seen] == -torch.inf).all())
    visible = seen[:, :403]
    assert worst(scores[:, :403][visible], g["score_f32"][visible]) < 1e-3

    listed = (scores, "f32[R,408]")
    chosen = one(ops.TopK(k, ratio=1), listed, position)
    kept = one(ops.TopBlocks(blocks, size, ratio=1), listed, position)
    candidate = one(ops.CandidateScores(1, factor, F32, size), *operands, (kept, "i32[R,16]"))
    confined = one(ops.CandidateTopK(k, 1, size), (candidate, "f32[R,128]"), (kept, "i32[R,16]"))
    for row, n in enumerate(g["visible_len"].tolist()):
        mask = g["candidate_block_mask"][row].nonzero().flatten()
        assert as_set(kept[row], 51) == set(mask.tolist())
        if g["topk_margin"][row] > 1e-3:
            assert as_set(chosen[row], n) == as_set(g["topk_without_candidates"][row], n)
            assert as_set(confined[row], n) == as_set(g["topk_with_candidates"][row], n)


def test_bf16_scores_pick_the_golden_candidate_blocks_up_to_ties() -> None:
    """That column of the file rounds the f32 score once; equal scores may be broken either way."""
    g = golden_op("indexer")
    size, blocks, _ = g["params"].tolist()
    operands = index_operands(g)
    scores = one(ops.IndexScores(1, 1 / 64, F32), *operands).to(torch.bfloat16)
    kept = one(ops.TopBlocks(blocks, size, ratio=1), (scores, "bf16[R,408]"), operands[5])
    best = scores.reshape(len(scores), 51, size).amax(2)

    def ranked(chosen: Tensor) -> Tensor:
        found = best.gather(1, chosen.long().clamp(min=0)).masked_fill(chosen < 0, -torch.inf)
        return found.sort(dim=1).values

    expect = g["candidate_blocks_bf16_deepinfer"]
    assert torch.equal(ranked(kept), ranked(expect))
    assert int((kept != expect).any(1).sum()) <= 1
