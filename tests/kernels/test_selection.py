"""Top-k lists and candidate blocks: exact against a sort written here and the float64 reference."""

import pytest
import torch
from safetensors.torch import load_file

from deepinfer_compile.ir import ops
from deepinfer_compile.ir.reference import evaluate
from deepinfer_compile.ir.types import DType, R, TensorType
from tests.golden_data import golden_root
from tests.kernels.harness import run_kernel

STORED = {DType.F32: torch.float32, DType.BF16: torch.bfloat16}
ELEMENTS = pytest.mark.parametrize("dtype", [DType.F32, DType.BF16], ids=lambda d: d.value)
FULL = 1 << 20  # entries of the longest request


RATIO = {DType.F32: 1, DType.BF16: 2}


def scores_of(rows: int, entries: int, dtype: DType, seed: int) -> torch.Tensor:
    torch.manual_seed(seed)
    return torch.randn(rows, entries).to(STORED[dtype])


def types_of(dtype: DType, width: int, lists: int = 0) -> list[TensorType]:
    """Scores beside positions or, when `lists` is given, lists of that many blocks."""
    second = TensorType(DType.I32, (R, lists) if lists else (R,))
    return [TensorType(dtype, (R, width)), second]


def best(scores: torch.Tensor, k: int) -> list[int]:
    """Indices of the k best, ascending; of equal scores the lower index."""
    order = sorted(range(len(scores)), key=lambda i: (-float(scores[i]), i))
    return sorted(order[:k])


def padded(lists: list[list[int]], width: int) -> torch.Tensor:
    return torch.tensor([row + [-1] * (width - len(row)) for row in lists], dtype=torch.int32)


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


@ELEMENTS
@pytest.mark.parametrize("kind", ["spread", "ties", "equal", "zeros", "tiny", "huge"])
def test_topk_takes_the_highest_visible_entries(dtype, kind):
    ratio = RATIO[dtype]
    op = ops.TopK(k=64, ratio=ratio)
    # Around k, around whole vectors and chunks, past the last entry.
    position = ints(0, 1, 2, 62, 63, 64, 65, 126, 127, 128, 300, 402, 403, 805, 806, 5000)
    scores = scores_of(len(position), 403, dtype, seed=1)
    match kind:
        case "ties":
            scores = (scores * 2).round()
        case "equal":
            scores = torch.full_like(scores, -0.75)
        case "zeros":
            scores = torch.where(scores > 0, 0.0, -0.0).to(scores.dtype)
        case "tiny":
            scores = scores * 1e-39  # subnormal
        case "huge":
            scores[:, ::7] *= 1e38
    visible = ((position + 1) // ratio).clamp(max=403).tolist()
    expect = padded([best(row[:n], 64) for row, n in zip(scores, visible, strict=True)], 64)
    hidden = scores.clone()
    for row, n in zip(hidden, visible, strict=True):
        row[n:] = torch.nan  # must not matter
    types = types_of(dtype, 403)
    (got,) = run_kernel(op, [hidden, position], types, rows=len(position), splits=3)
    assert torch.equal(got, expect)
    assert torch.equal(got, evaluate(op, [hidden, position], types)[0])
    for r in (1, 5, 11):
        (one,) = run_kernel(op, [hidden[r : r + 1], position[r : r + 1]], types, rows=1)
        assert torch.equal(one, got[r : r + 1])


@ELEMENTS
def test_topk_of_a_million_entries(dtype):
    op = ops.TopK(k=512, ratio=1)
    position = ints(FULL - 1, 0, 700_001)
    scores = scores_of(3, FULL, dtype, seed=2)
    scores[1] = torch.nan  # a padding row sees one entry
    scores[2].relu_()
    types = types_of(dtype, FULL)
    (got,) = run_kernel(op, [scores, position], types, rows=3, splits=3)
    assert got[1].tolist() == [0] + [-1] * 511
    for r in (0, 2):
        row = scores[r, : position[r] + 1].float()
        order = row.argsort(descending=True, stable=True)[:512]
        assert torch.equal(got[r].long(), order.sort().values)


def test_topk_survives_values_that_do_not_order():
    scores = scores_of(2, 403, DType.F32, seed=3)
    scores[0, ::3] = torch.nan
    scores[0, 1::3] = -torch.inf
    scores[1] = torch.nan
    types = types_of(DType.F32, 403)
    (got,) = run_kernel(ops.TopK(k=64, ratio=1), [scores, ints(402, 402)], types, rows=2)
    assert torch.equal(got[:1], padded([best(scores[0].nan_to_num(nan=-torch.inf), 64)], 64))
    assert got[1].tolist() == list(range(64))


@ELEMENTS
def test_candidate_topk_names_entries(dtype):
    op = ops.CandidateTopK(k=64, ratio=1, block_size=8)
    torch.manual_seed(4)
    rows, width = 6, 16
    lists = [sorted(torch.randperm(900)[:n].tolist()) for n in (16, 0, 1, 8, 9, 15)]
    blocks = padded(lists, width)
    scores = (scores_of(rows, width * 8, dtype, seed=5) * 3).round() / 2
    scores[:, 3::11] = -torch.inf
    scores[5, : 15 * 8] = -torch.inf
    scores[5, 17] = -1e30
    expect = []
    for row, ids in zip(scores, lists, strict=True):
        live = [i for i in range(len(ids) * 8) if row[i] > -torch.inf]
        chosen = [live[j] for j in best(row[live], 64)]
        expect.append([ids[i // 8] * 8 + i % 8 for i in chosen])
    for row, ids in zip(scores, lists, strict=True):
        row[len(ids) * 8 :] = torch.nan  # slots of missing blocks
    types = types_of(dtype, width * 8, width)
    (got,) = run_kernel(op, [scores, blocks], types, rows=rows, splits=3)
    assert torch.equal(got, padded(expect, 64))
    assert torch.equal(got, evaluate(op, [scores, blocks], types)[0])


def test_candidate_topk_at_the_real_shape():
    op = ops.CandidateTopK(k=512, ratio=1, block_size=8)
    torch.manual_seed(6)
    blocks = torch.stack([torch.randperm(FULL // 8)[:2048].sort().values for _ in range(2)]).int()
    blocks[1, 1024:] = -1
    scores = scores_of(2, 2048 * 8, DType.BF16, seed=7)
    types = types_of(DType.BF16, 2048 * 8, 2048)
    (got,) = run_kernel(op, [scores, blocks], types, rows=2)
    assert torch.equal(got, evaluate(op, [scores, blocks], types)[0])


@pytest.mark.parametrize(("dtype", "size"), [(DType.F32, 8), (DType.BF16, 8), (DType.BF16, 16)])
@pytest.mark.parametrize("kind", ["spread", "ties", "equal"])
def test_top_blocks_pins_the_newest(dtype, size, kind):
    ratio = RATIO[dtype]
    op = ops.TopBlocks(blocks=16, block_size=size, ratio=ratio)
    position = ints(0, 1, 7, 8, 9, 127, 128, 129, 135, 300, 400, 402)
    scores = scores_of(len(position), 403, dtype, seed=8)
    if kind == "ties":
        scores = scores.round()
    if kind == "equal":
        scores = torch.full_like(scores, -2.0)
    visible = ((position + 1) // ratio).tolist()
    expect = []
    for row, n in zip(scores, visible, strict=True):
        newest = (n - 1) // size
        row[n:] = torch.nan
        row[newest * size : n] = -3e38  # pinned whatever it scores
        full = row[: max(newest, 0) * size].float().reshape(-1, size).amax(1)
        expect.append([*best(full, 15), newest] if n else [])
    types = types_of(dtype, 403)
    (got,) = run_kernel(op, [scores, position], types, rows=len(position), splits=3)
    assert torch.equal(got, padded(expect, 16))
    assert torch.equal(got, evaluate(op, [scores, position], types)[0])


def test_top_blocks_of_a_million_entries():
    op = ops.TopBlocks(blocks=2048, block_size=8, ratio=1)
    position = ints(FULL - 1, 0, 16_383, 16_384)
    scores = scores_of(4, FULL, DType.BF16, seed=9)
    types = types_of(DType.BF16, FULL)
    (got,) = run_kernel(op, [scores, position], types, rows=4)
    assert torch.equal(got, evaluate(op, [scores, position], types)[0])
    assert got[2].tolist() == list(range(2048))
    assert len(set(range(2049)) - set(got[3].tolist())) == 1


def test_selections_match_the_released_indexer():
    golden = load_file(golden_root() / "ops" / "indexer.safetensors")
    scores, visible = golden["score_f32"], golden["visible_len"]
    size, count, k = golden["params"].tolist()
    rows, entries = scores.shape
    position = visible - 1
    for row, n in zip(scores, visible.tolist(), strict=True):
        row[n:] = -torch.inf
    types = types_of(DType.F32, entries)
    (dense,) = run_kernel(ops.TopK(k, 1), [scores, position], types, rows)
    expect = golden["topk_without_candidates"]
    expect = torch.where(expect < visible.unsqueeze(1), expect, -1)
    assert torch.equal(dense, expect)

    (blocks,) = run_kernel(ops.TopBlocks(count, size, 1), [scores, position], types, rows)
    masks = golden["candidate_block_mask"]
    assert torch.equal(blocks, padded([m.nonzero().flatten().tolist() for m in masks], count))

    slots = (blocks.unsqueeze(2) * size + torch.arange(size)).flatten(1)
    inside = (slots >= 0) & (slots < visible.unsqueeze(1))
    chosen = scores.gather(1, slots.clamp(0, entries - 1)).masked_fill(~inside, -torch.inf)
    types = types_of(DType.F32, count * size, count)
    (sparse,) = run_kernel(ops.CandidateTopK(k, 1, size), [chosen, blocks], types, rows)
    assert torch.equal(sparse, golden["topk_with_candidates"])
