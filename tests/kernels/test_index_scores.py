"""Index scores, of all entries and of candidates: sums written here, reference, released ones."""

from dataclasses import dataclass

import pytest
import torch
from safetensors.torch import load_file

from deepinfer_compile.ir import codecs, ops
from deepinfer_compile.ir.reference import evaluate
from deepinfer_compile.ir.types import DType, R, TensorType
from tests.golden_data import golden_root
from tests.kernels.checks import same_bits
from tests.kernels.harness import run_kernel

BF16, F32, I32, MXFP4 = DType.BF16, DType.F32, DType.I32, DType.MXFP4
STORED = {F32: torch.float32, BF16: torch.bfloat16}
INTS = TensorType(I32, (R,))
SLOTS = 4


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


@dataclass(frozen=True)
class Shape:
    out: DType
    heads: int
    dim: int
    entries: int  # of a page
    pages: int  # of a request
    ratio: int

    @property
    def factor(self) -> float:
        # Of the product: a power of two stays one, and ties of rounded products stay ties.
        return float((self.heads * self.dim) ** -0.5)

    @property
    def op(self) -> ops.IndexScores:
        return ops.IndexScores(self.ratio, self.factor, self.out)

    def candidates(self, size: int) -> ops.CandidateScores:
        return ops.CandidateScores(self.ratio, self.factor, self.out, size)

    @property
    def types(self) -> list[TensorType]:
        return [
            TensorType(MXFP4, (R, self.heads, self.dim)),
            TensorType(self.out, (R, self.heads)),
            TensorType(MXFP4, (SLOTS * self.pages + 1, self.entries, self.dim), state=True),
            TensorType(I32, (SLOTS, self.pages)),
            INTS,
            INTS,
        ]


NANO = Shape(BF16, heads=4, dim=32, entries=32, pages=5, ratio=2)
ODD = Shape(F32, heads=6, dim=64, entries=20, pages=9, ratio=1)
RELEASED = Shape(BF16, heads=32, dim=128, entries=128, pages=3, ratio=1)
SHAPES = pytest.mark.parametrize(
    "shape", [NANO, ODD, RELEASED], ids=["nano", "odd-f32", "released"]
)


def step(shape: Shape, seed: int = 1) -> list[torch.Tensor]:
    """Rows of three requests, at the ends of groups, vectors, pages and requests, then padding.

    Slot 0 and page 0 hold NaN scales, as does every entry of request 3 that no row may see."""
    torch.manual_seed(seed)
    last = shape.pages * shape.entries * shape.ratio - 1
    placed = [(1, 0), (1, 1), (1, 14), (1, 15), (1, 16), (2, last - 1), (2, last), (3, 77), (3, 78)]
    placed += [(0, 0), (0, 0)]
    slot, position = torch.tensor(placed, dtype=torch.int32).unbind(1)
    q = torch.randn(len(placed), shape.heads, shape.dim)
    q[2] = 0
    q[3] *= 1e-3
    q[5, 1, 3] = 1000
    weight = torch.randn(len(placed), shape.heads).to(STORED[shape.out])
    some = codecs.encode_records(torch.randn(300, shape.dim), MXFP4)
    keys = some[torch.randint(300, (SLOTS * shape.pages + 1, shape.entries))]
    table = (torch.randperm(SLOTS * shape.pages) + 1).reshape(SLOTS, shape.pages).int()
    keys[0], table[0] = 255, 0
    seen = 79 // shape.ratio
    for j in range(seen, shape.pages * shape.entries):
        keys[table[3, j // shape.entries], j % shape.entries] = 255
    return [codecs.encode_records(q, MXFP4), weight, keys, table, slot, position]


def scores(shape: Shape, tensors: list[torch.Tensor], row: int) -> torch.Tensor:
    """float64 [heads, visible]: what the heads of a row add to each visible entry."""
    q, weight, keys, table, slot, position = tensors
    visible = (int(position[row]) + 1) // shape.ratio
    pages = keys[table[slot[row]].long()].flatten(0, 1)[:visible]
    dot = codecs.decode_records(q[row], MXFP4) @ codecs.decode_records(pages, MXFP4).T
    if shape.out is F32:
        return weight[row].double().unsqueeze(1) * shape.factor * dot.relu()
    dot = codecs.round_bf16(dot).double().relu()
    return codecs.round_bf16(weight[row].double().unsqueeze(1) * shape.factor * dot).double()


def assert_scores(got: torch.Tensor, parts: torch.Tensor) -> None:
    """`parts` are added in fp32 and, in bf16, rounded once more; few may fall to the other side."""
    exact, size = parts.sum(0), parts.abs().sum(0)
    error = (got.double() - exact).abs()
    if got.dtype is torch.float32:
        assert error.le(6 * 2**-24 * size).all()
        return
    missed = int((got != codecs.round_bf16(exact)).sum())
    assert missed <= len(got) // 100, f"{missed} of {len(got)} are not the nearest number"
    assert error.le(2**-8 * exact.abs() + 2**-20 * size).all()


@SHAPES
def test_every_visible_entry_has_its_score(shape):
    tensors = step(shape)
    rows, width = len(tensors[0]), shape.entries * shape.pages
    (y,) = run_kernel(shape.op, tensors, shape.types, rows)
    assert y.shape == (rows, width)
    (expect,) = evaluate(shape.op, tensors, shape.types)
    equal = total = 0
    for r in range(rows - 2):
        parts = scores(shape, tensors, r)
        visible = parts.shape[1]
        assert (y[r, visible:] == -torch.inf).all()
        if visible:
            assert_scores(y[r, :visible], parts)
        equal += int((y[r] == expect[r]).sum())
        total += width
    assert shape.out is F32 or equal >= 0.999 * total, f"{equal} of {total} as the reference"

    (split,) = run_kernel(shape.op, tensors, shape.types, rows, splits=7)
    assert same_bits(split[:-2], y[:-2])
    for r in (0, 4, 6, 8):
        alone = [t if i in (2, 3) else t[r : r + 1] for i, t in enumerate(tensors)]
        assert same_bits(run_kernel(shape.op, alone, shape.types, 1)[0][0], y[r])


@SHAPES
def test_candidates_score_as_all_entries_do(shape):
    """Lists of any length, -1 padded, with blocks that are visible in part or not at all."""
    tensors = step(shape, seed=2)
    rows, width, size = len(tensors[0]), shape.entries * shape.pages, 16 if shape is NANO else 8
    if width % size:
        width -= width % size
    (y,) = run_kernel(shape.op, tensors, shape.types, rows)
    lists = torch.full((rows, 11), -1)
    for r in range(rows - 2):
        count = min([11, 3, 1, 0, 7][r % 5], width // size)
        lists[r, :count] = torch.randperm(width // size)[:count].sort().values
    lists[8, 0] = 38 // size  # the block of the newest entry, in ratio 2
    lists[8] = lists[8].sort().values.roll(-int((lists[8] < 0).sum()))
    op, types = shape.candidates(size), [*shape.types, TensorType(I32, (R, 11))]
    operands = [*tensors, lists.int()]
    (got,) = run_kernel(op, operands, types, rows)
    entry = torch.where(lists < 0, -1, lists * size).repeat_interleave(size, 1)
    entry = entry + torch.arange(size).repeat(11)
    inside = lists.repeat_interleave(size, 1) >= 0
    taken = torch.where(inside, y.gather(1, entry.clamp(min=0)).float(), -torch.inf)
    assert same_bits(got[:-2], taken[:-2].to(got.dtype))
    assert (got[:-2] > -torch.inf).any()
    assert (evaluate(op, operands, types)[0][:-2].isinf() == got[:-2].isinf()).all()
    (split,) = run_kernel(op, operands, types, rows, splits=5)
    assert same_bits(split[:-2], got[:-2])


def test_released_scores():
    """Two requests of the golden keys: one in pages in order, one in pages in reverse."""
    golden = load_file(golden_root() / "ops" / "indexer.safetensors")
    q, k = golden["q_fp4_dequant"], golden["k_fp4_dequant"]
    shape = Shape(F32, heads=32, dim=128, entries=128, pages=4, ratio=1)
    records = codecs.encode_records(torch.nn.functional.pad(k, (0, 0, 0, 512 - len(k))), MXFP4)
    assert torch.equal(codecs.decode_records(records[: len(k)], MXFP4), k.double())
    keys = torch.zeros(SLOTS * 4 + 1, 128, 68, dtype=torch.uint8)
    table = torch.arange(SLOTS * 4).reshape(SLOTS, 4).int()
    table[2] = table[2].flip(0)
    for slot in (1, 2):
        keys[table[slot].long()] = records.reshape(4, 128, 68)
    rows = len(q)
    visible = golden["visible_len"]
    operands = [
        codecs.encode_records(q, MXFP4),
        golden["weights_proj_out"].float(),
        keys,
        table,
        (torch.arange(rows) % 2 + 1).int(),
        (visible - 1).int(),
    ]
    (y,) = run_kernel(shape.op, operands, shape.types, rows)
    for r, n in enumerate(visible.tolist()):
        expect = golden["score_f32"][r, :n].double()
        assert (y[r, :n].double() - expect).abs().max() <= 1e-5 * expect.abs().max()
