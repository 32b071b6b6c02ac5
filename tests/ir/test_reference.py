"""Operators on small inputs whose results can be said in another way."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from deepinfer_compile.ir import codecs, ops
from deepinfer_compile.ir.reference import evaluate
from deepinfer_compile.ir.reference.sample import fresh_uniform
from deepinfer_compile.ir.types import DType
from tests.ir.given import bytes_of, given, one
from tests.sample_operands import operands

F32, BF16 = DType.F32, DType.BF16
INF = math.inf


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def records(dtype: DType, *shape: int, seed: int = 0) -> Tensor:
    return codecs.encode_records(noise(*shape, seed=seed), dtype)


def test_embed_broadcast_and_first_stream() -> None:
    table = noise(5, 8).to(torch.bfloat16)
    token = (ints(4, 0, 4), "i32[R]")
    x = one(ops.Embed(BF16), token, (table, "bf16[5,8]"))
    assert torch.equal(x, table[[4, 0, 4]])
    assert torch.equal(one(ops.Embed(F32), token, (table, "bf16[5,8]")), x.float())
    streams = one(ops.BroadcastStreams(3), (x, "bf16[R,8]"))
    assert all(torch.equal(streams[:, s], x) for s in range(3))
    pre = one(ops.FirstStream(3), (ints(7, 0), "i32[R]"))
    assert pre.tolist() == [[1, 0, 0], [1, 0, 0]]


def test_rmsnorm_rounds_once_and_survives_zeros() -> None:
    x = noise(4, 32).to(torch.bfloat16)
    x[1] = 0
    w = noise(32, seed=1).to(torch.bfloat16)
    y = one(ops.RmsNorm(1e-20), (x, "bf16[R,32]"), (w, "bf16[32]"))
    exact = x.double() / x.double().square().mean(1, keepdim=True).clamp(min=1e-30).sqrt()
    assert torch.equal(y, codecs.round_bf16(w.double() * exact))
    assert not y[1].any()


@pytest.mark.parametrize(("to", "text"), [(DType.MXFP8, "mxfp8"), (DType.MXFP4, "mxfp4")])
def test_linear_reads_records_as_their_values(to: DType, text: str) -> None:
    x, w = noise(3, 2, 64), noise(10, 128, seed=1).to(torch.bfloat16)
    record = one(ops.Quantize(to), (x, "f32[R,2,64]"))
    y = one(ops.Linear(F32, heads=5), (record, f"{text}[R,2,64]"), (w, "bf16[10,128]"))
    exact = codecs.decode_records(record, to).reshape(3, 128) @ w.double().T
    assert torch.equal(y, exact.float().reshape(3, 5, 2))


def test_scaled_linear_applies_a_scale_to_a_block_of_both_dims() -> None:
    x = noise(2, 64)
    codes = codecs.encode_e4m3(noise(40, 64, seed=1).double())
    scale = torch.tensor([[120, 127], [130, 125]], dtype=torch.uint8)
    y = one(ops.Linear(F32), (x, "f32[R,64]"), (codes, "e4m3[40,64]"), (scale, "ue8m0[2,2]"))
    w = codecs.decode_e4m3(codes)
    for n in (0, 31, 32, 39):
        exact = sum(
            float(x[1, k].double() * w[n, k] * 2.0 ** (int(scale[n // 32, k // 32]) - 127))
            for k in range(64)
        )
        assert y[1, n].item() == pytest.approx(exact, rel=1e-6)


def test_moe_combine_and_select_rows() -> None:
    routed, shared = noise(3, 2, 8).bfloat16(), noise(3, 8, seed=1).bfloat16()
    y = one(ops.MoeCombine(), (routed, "bf16[R,2,8]"), (shared, "bf16[R,8]"))
    assert torch.equal(y, codecs.round_bf16(routed.double().sum(1) + shared.double()))
    picked = one(ops.SelectRows(), (shared, "bf16[3,8]"), (ints(2, 0), "i32[R]"))
    assert torch.equal(picked, shared[[2, 0]])


def test_ring_store_keeps_the_last_of_rows_that_share_a_place() -> None:
    ring = torch.zeros(3, 4, 1, dtype=torch.int32)
    rows = torch.arange(10, 16, dtype=torch.int32).unsqueeze(1)
    slot = (ints(1, 1, 1, 1, 1, 2), "i32[R]")
    position = (ints(3, 4, 5, 6, 7, 3), "i32[R]")  # 3 and 7 share a place of slot 1
    after = one(ops.RingStore(), (ring, "!i32[3,4,1]"), slot, position, (rows, "i32[R,1]"))
    assert after.squeeze(2).tolist() == [[0, 0, 0, 0], [11, 12, 13, 14], [0, 0, 0, 15]]


def test_ring_store_lays_several_rows_in_an_entry() -> None:
    value, score = noise(2, 3), noise(2, 3, seed=1)
    tail = (torch.zeros(2, 2, 2, 3), "!f32[2,2,2,3]")
    rows = (value, "f32[R,3]"), (score, "f32[R,3]")
    after = one(ops.RingStore(), tail, (ints(1, 1), "i32[R]"), (ints(4, 5), "i32[R]"), *rows)
    assert torch.equal(after[1], torch.stack([value, score], dim=1))
    assert not after[0].any()


def test_page_store_takes_only_rows_that_complete_a_group() -> None:
    rows = records(DType.NVFP4, 5, 32)
    pages = torch.zeros(4, 2, 18, dtype=torch.uint8)
    table = torch.tensor([[0, 0, 0], [3, 1, 2]], dtype=torch.int32)
    after = one(
        ops.PageStore(ratio=2),
        (pages, "!nvfp4[4,2,32]"),
        (table, "i32[2,3]"),
        (ints(1, 1, 1, 1, 1), "i32[R]"),
        (ints(3, 4, 5, 6, 7), "i32[R]"),  # entries 1, 2, 3 are complete at 3, 5, 7
        (rows, "nvfp4[R,32]"),
    )
    assert torch.equal(after[3, 1], rows[0])
    assert torch.equal(after[1], rows[[2, 4]])
    assert not after[3, 0].any()
    assert not after[[0, 2]].any()


def test_attention_reads_window_and_selected_entries_in_one_softmax() -> None:
    """Against a dense softmax over lists of keys put together by hand."""
    heads, d, window, slots, length = 2, 32, 3, 3, 4
    q, sink = noise(2, heads, d), noise(heads, seed=1)
    ring = records(DType.MXFP8, slots, length, d, seed=2)
    pages = records(DType.NVFP4, 4, 2, d, seed=3)
    table = torch.tensor([[0, 0], [2, 1], [1, 3]], dtype=torch.int32)
    selected = torch.tensor([[0, 3, -1], [2, -1, -1]], dtype=torch.int32)
    o = one(
        ops.SparseAttention(window, d**-0.5, ratio=2),
        (q, f"f32[R,{heads},{d}]"),
        (ring, f"!mxfp8[{slots},{length},{d}]"),
        (ints(1, 2), "i32[R]"),
        (ints(9, 1), "i32[R]"),
        (sink, f"f32[{heads}]"),
        (pages, f"!nvfp4[4,2,{d}]"),
        (table, "i32[3,2]"),
        (selected, "i32[R,3]"),
    )
    near, far = codecs.decode_records(ring, DType.MXFP8), codecs.decode_records(pages, DType.NVFP4)
    keys = (
        [near[1, 3], near[1, 0], near[1, 1], far[2, 0], far[1, 1]],
        [near[2, 0], near[2, 1], far[3, 0]],  # position 1: two keys in the window
    )
    for row in range(2):
        k = torch.stack(keys[row])
        for head in range(heads):
            logits = (k @ q[row, head].double()) * d**-0.5
            p = torch.softmax(torch.cat([logits, sink[head : head + 1].double()]), 0)[:-1]
            assert torch.equal(o[row, head], (p @ k).float()) or torch.allclose(
                o[row, head].double(), p @ k, rtol=1e-6, atol=1e-9
            )


def score_operands(dtype: torch.dtype) -> tuple[tuple[Tensor, str], ...]:
    q = records(DType.MXFP4, 3, 8, 32)
    keys = records(DType.MXFP4, 4, 4, 32, seed=1)
    weight = noise(3, 8, seed=2).to(dtype)
    table = torch.tensor([[0, 0], [3, 1]], dtype=torch.int32)
    name = "bf16" if dtype is torch.bfloat16 else "f32"
    return (
        (q, "mxfp4[R,8,32]"),
        (weight, f"{name}[R,8]"),
        (keys, "!mxfp4[4,4,32]"),
        (table, "i32[2,2]"),
        (ints(1, 1, 1), "i32[R]"),
        (ints(0, 9, 15), "i32[R]"),
    )


def test_index_scores_round_only_where_they_say() -> None:
    operands = score_operands(torch.bfloat16)
    q = codecs.decode_records(operands[0][0], DType.MXFP4)
    keys = codecs.decode_records(operands[2][0], DType.MXFP4)[[3, 1]].flatten(0, 1)
    w = operands[1][0].double()
    dots = torch.einsum("rhd,cd->rhc", q, keys)
    exact = (w.unsqueeze(2) * 0.25 * dots.relu()).sum(1)
    visible = torch.tensor([0, 5, 8]).unsqueeze(1) > torch.arange(8)

    scores = one(ops.IndexScores(2, 0.25, F32), *operands)
    assert torch.equal(scores, exact.float().masked_fill(~visible, -INF))

    inner = (w.unsqueeze(2) * 0.25 * dots.bfloat16().double().relu()).bfloat16().double().sum(1)
    rounded = one(ops.IndexScores(2, 0.25, BF16), *operands)
    assert torch.equal(rounded, inner.bfloat16().masked_fill(~visible, -INF))
    assert not torch.equal(rounded, exact.bfloat16().masked_fill(~visible, -INF))


def test_candidate_scores_are_scores_of_the_blocks_entries() -> None:
    operands = score_operands(torch.float32)
    blocks = torch.tensor([[0, -1], [1, 2], [0, 3]], dtype=torch.int32)
    scores = one(ops.IndexScores(2, 0.25, F32), *operands)
    compact = one(ops.CandidateScores(2, 0.25, F32, 2), *operands, (blocks, "i32[R,2]"))
    for row in range(3):
        for at in range(4):
            block = int(blocks[row, at // 2])
            expect = scores[row, block * 2 + at % 2].item() if block >= 0 else -INF
            assert compact[row, at].item() == expect


def test_topk_takes_lower_entries_on_ties_and_pads() -> None:
    scores = torch.tensor([[1.0, 3, 3, 2, 3, 9], [1, 3, 3, 2, 3, 9], [-5, -6, 7, 7, 7, 7]])
    position = (ints(4, 9, 1), "i32[R]")
    chosen = one(ops.TopK(3, ratio=1), (scores, "f32[R,6]"), position)
    assert chosen.tolist() == [[1, 2, 4], [1, 2, 5], [0, 1, -1]]
    pairs = one(ops.TopK(3, ratio=2), (scores, "f32[R,6]"), position)
    assert pairs.tolist() == [[0, 1, -1], [1, 2, 4], [0, -1, -1]]
    assert one(ops.TopK(8, ratio=1), (scores, "f32[R,6]"), position)[2].tolist() == [
        0,
        1,
        *[-1] * 6,
    ]


def test_top_blocks_always_takes_the_newest_block() -> None:
    scores = torch.tensor([[5.0, 0, 4, 4, 3, 0, -9, 99]]).repeat(4, 1)
    position = (ints(6, 3, 0, 7), "i32[R]")
    kept = one(ops.TopBlocks(2, 2, ratio=1), (scores, "f32[R,8]"), position)
    assert kept.tolist() == [[0, 3], [0, 1], [0, -1], [0, 3]]
    ragged = one(ops.TopBlocks(3, 3, ratio=2), (scores, "f32[R,8]"), (ints(15, 1, 0, 0), "i32[R]"))
    assert ragged.tolist() == [[0, 1, 2], [0, -1, -1], [-1, -1, -1], [-1, -1, -1]]


def test_candidate_topk_gives_entry_numbers_and_never_takes_unseen_ones() -> None:
    blocks = torch.tensor([[1, 4], [2, -1]], dtype=torch.int32)
    scores = torch.tensor([[1.0, 2, 2, -INF], [3, 4, -INF, -INF]])
    chosen = one(ops.CandidateTopK(3, 1, 2), (scores, "f32[R,4]"), (blocks, "i32[R,2]"))
    assert chosen.tolist() == [[2, 3, 8], [4, 5, -1]]
    two = one(ops.CandidateTopK(1, 1, 2), (scores, "f32[R,4]"), (blocks, "i32[R,2]"))
    assert two.tolist() == [[3], [5]]


def test_gate_takes_lower_experts_on_ties_and_weights_sum_to_the_scale() -> None:
    logits = torch.tensor([[2.0, 30, 2, 2, -90]])
    expert, weight = given(ops.TopKGate(3, 1.5), (logits, "f32[R,5]"), (torch.zeros(5), "f32[5]"))
    assert expert.tolist() == [[0, 1, 2]]
    small, large = math.sqrt(math.log1p(math.exp(2))), math.sqrt(30)
    total = 2 * small + large
    expect = [1.5 * s / total for s in (small, large, small)]
    assert weight[0].tolist() == pytest.approx(expect, rel=1e-7)


def test_map_token_marks_image_rows() -> None:
    token_map = (ints(3, 1, 2), "i32[3]")
    mapped = one(ops.MapToken(), (ints(0, 2, 0), "i32[R]"), (ints(0, 0, 1), "i32[R]"), token_map)
    assert mapped.tolist() == [[3], [2], [-1]]


NANO_HASHES = {
    0: "0 77 163 271 321 432",
    1: "13 92 206 213 365 444",
    3: "27 114 142 235 299 414",
    4: "8 84 172 262 365 456",
    5: "62 106 173 264 325 460",
}


def test_engram_hash_equals_the_nano_table_with_an_image_at_2() -> None:
    """The check values of model_v41.md section 10.3, layer 1."""
    op = ops.ChunkEngramHash(
        (29662608052400909, 1873410163432121, 13919202536988139, 28638879857136817),
        (67, 71, 73, 79, 83, 89),
        pad=2,
    )
    ids = ints(11, 7, -1, 7, 11, 42).unsqueeze(1)
    zero = (torch.zeros(6, dtype=torch.int32), "i32[R]")
    rows = one(
        op,
        (torch.zeros(1, 4, 1, dtype=torch.int32), "!i32[1,4,1]"),
        zero,
        (torch.arange(6, dtype=torch.int32), "i32[R]"),
        zero,
        (ids, "i32[R,1]"),
    )
    for position, expect in NANO_HASHES.items():
        assert rows[position].tolist() == [int(word) for word in expect.split()]


def test_engram_lookup_gathers_codes_before_scales() -> None:
    table = codecs.encode_e4m3(noise(6, 32).double())
    scale = torch.arange(120, 126, dtype=torch.uint8).unsqueeze(1)
    rows = (torch.tensor([[5, 0], [1, 1]], dtype=torch.int32), "i32[R,2]")
    record = one(ops.EngramLookup(), rows, (table, "e4m3[6,32]"), (scale, "ue8m0[6,1]"))
    assert torch.equal(record[0], torch.cat([table[5], table[0], scale[5], scale[0]]))
    wide = codecs.decode_records(record, DType.MXFP8)
    exact = codecs.decode_e4m3(table) * codecs.decode_ue8m0(scale)
    assert torch.equal(wide[1], torch.cat([exact[1], exact[1]]))


def uniform_by_numpy(seed: int, position: int) -> float:
    """The fresh-sample stream again, in numpy's wrapping u64 arithmetic."""
    with np.errstate(over="ignore"):
        gold, q = np.uint64(0x9E3779B97F4A7C15), np.uint64(3 * position)
        q = q * gold
        z = np.uint64(seed % 2**64) + (q ^ (q << np.uint64(13))) + gold
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z = z ^ (z >> np.uint64(31))
        return float(z >> np.uint64(11)) * 2.0**-53


def test_uniforms_wrap_around_and_are_uniform() -> None:
    seeds = (0, 1, 2**63 + 5, -3)
    for seed in seeds:
        for position in (0, 1, 17, 1 << 20):
            assert fresh_uniform(seed % 2**64, position) == uniform_by_numpy(seed, position)
            assert fresh_uniform(seed, position) == uniform_by_numpy(seed, position)
    draws = [fresh_uniform(s, p) for s in range(40) for p in range(50)]
    assert abs(np.mean(draws) - 0.5) < 0.02
    assert abs(np.var(draws) - 1 / 12) < 0.005


def sampled(logits: Tensor, listed: int = 1, **arrays: object) -> tuple[Tensor, ...]:
    """The sampler with nothing filtered but what `arrays` say: per row, or one value for all."""
    tensors, types = operands(logits, **arrays)
    return evaluate(ops.Sample(listed), tensors, types)


def test_sample_inverts_the_cdf_in_vocabulary_order() -> None:
    rows, vocab = 64, 11
    logits = 2 * noise(rows, vocab)
    temperature = torch.linspace(0.5, 2, rows)
    token, logprob, *_ = sampled(
        logits, temperature=temperature, seed=torch.arange(rows), position=torch.arange(rows) * 7
    )
    for row in range(rows):
        p = np.exp(logits[row].double().numpy() / float(temperature[row]))
        cdf = np.cumsum(p / p.sum())
        u = uniform_by_numpy(row, 7 * row) * cdf[-1]
        assert token[row].item() == np.searchsorted(cdf, u, side="right")
        expect = math.log(p[int(token[row])] / p.sum())
        assert logprob[row].item() == pytest.approx(expect, abs=1e-6)


def test_sample_at_zero_temperature_is_the_first_maximum() -> None:
    logits = torch.tensor([[0.0, 3, 1, 3], [-INF, -1, -2, -INF]])
    token, logprob, *_ = sampled(logits, top_p=0.1, top_k=3, min_p=0.9)
    assert token.tolist() == [[1], [1]]
    expect = torch.log_softmax(logits.double(), 1)[:, 1]
    assert torch.equal(logprob[:, 0], expect.float())


def test_sample_never_draws_an_impossible_token() -> None:
    rows = 200
    logits = torch.tensor([[-INF, 0.0, -INF, 0.0, -INF]]).repeat(rows, 1)
    token, *_ = sampled(logits, temperature=1.0, seed=-1, position=torch.arange(rows))
    assert set(token.flatten().tolist()) == {1, 3}


def test_sample_reads_one_bit_per_token_lowest_first() -> None:
    """Of 67 tokens: 0, 31, 33 and 66."""
    words = torch.tensor([[1 - 2**31, 2, 4]])
    shares = torch.arange(1.0, 68)
    _, _, top, top_logprob, _ = sampled(
        shares[None].log(), listed=5, masked=1, allowed=words, temperature=1.0, top_count=5
    )
    assert top[0, :4].tolist() == [66, 33, 31, 0]
    expect = torch.tensor([67.0, 34, 32, 1]) / (67 + 34 + 32 + 1)
    torch.testing.assert_close(top_logprob[0, :4].exp(), expect)
    assert top_logprob[0, 4] == -INF


@pytest.mark.parametrize(
    ("filters", "kept"),
    [
        ({}, [2, 0, 4, 1, 3]),
        ({"top_p": 0.41}, [2, 0]),  # what lies before a token counts, not what it adds
        ({"top_p": 0.39}, [2]),
        ({"top_p": 0.65}, [2, 0, 4]),
        ({"top_k": 2}, [2, 0]),  # of equal ones the lower id
        ({"top_p": 0.5, "top_k": 2}, [2, 0]),  # top-k first would leave the best alone
        ({"min_p": 0.49}, [2, 0, 4]),
        ({"min_p": 1.0}, [2]),
    ],
)
def test_sample_lists_what_the_filters_keep(filters: dict[str, float], kept: list[int]) -> None:
    shares = torch.tensor([0.2, 0.1, 0.4, 0.1, 0.2])
    _, _, top, top_logprob, _ = sampled(
        shares[None].log(), listed=5, temperature=1.0, top_count=5, **filters
    )
    assert top.tolist() == [[2, 0, 4, 1, 3]]
    assert top[0, top_logprob[0] > -INF].tolist() == kept
    expect = shares[kept] / shares[kept].sum()
    torch.testing.assert_close(top_logprob[0, : len(kept)].exp(), expect)


def test_states_are_not_changed_in_place() -> None:
    ring = torch.zeros(2, 2, 1, dtype=torch.int32)
    old = bytes_of(ring)
    row = (ints(5).unsqueeze(1), "i32[R,1]")
    after = one(
        ops.RingStore(), (ring, "!i32[2,2,1]"), (ints(1), "i32[R]"), (ints(0), "i32[R]"), row
    )
    assert bytes_of(ring) == old != bytes_of(after)
