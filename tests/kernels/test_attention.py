"""Attention of decode and prefill: a softmax written here, the float64 reference, each other."""

from dataclasses import dataclass

import pytest
import torch

from deepinfer_compile.ir import codecs, ops
from deepinfer_compile.ir.reference import evaluate
from deepinfer_compile.ir.types import DType, R, TensorType
from tests.kernels.checks import assert_rounds, same_bits
from tests.kernels.harness import run_kernel

BF16, F32, I32, MXFP8, NVFP4 = DType.BF16, DType.F32, DType.I32, DType.MXFP8, DType.NVFP4
STORED = {F32: torch.float32, BF16: torch.bfloat16}
INTS = TensorType(I32, (R,))
SLOTS = 5


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


@dataclass(frozen=True)
class Shape:
    """`taken` 0: a layer that sees its window alone."""

    element: DType
    heads: int
    dim: int
    window: int
    ring: int
    taken: int = 0
    entries: int = 32
    pages: int = 4
    ratio: int = 1

    def op(self, kind: type[ops.SparseAttention]) -> ops.SparseAttention:
        return kind(self.window, self.dim**-0.5, self.ratio if self.taken else 0)

    def types(self, chunk: bool) -> list[TensorType]:
        first = [
            TensorType(self.element, (R, self.heads, self.dim)),
            TensorType(MXFP8, (SLOTS, self.ring, self.dim), state=True),
            INTS,
            INTS,
            TensorType(F32, (self.heads,)),
        ]
        own = [INTS, TensorType(MXFP8, (R, self.dim))] if chunk else []
        compressed = [
            TensorType(NVFP4, (SLOTS * self.pages + 1, self.entries, self.dim), state=True),
            TensorType(I32, (SLOTS, self.pages)),
            TensorType(I32, (R, self.taken)),
        ]
        return [*first, *own, *(compressed if self.taken else [])]


SMALL = Shape(BF16, heads=4, dim=64, window=16, ring=19, taken=16)
ALONE = Shape(BF16, heads=6, dim=32, window=16, ring=16)
WIDE = Shape(F32, heads=8, dim=96, window=5, ring=9, taken=12, entries=16, ratio=2)
RELEASED = Shape(BF16, heads=64, dim=512, window=128, ring=134, taken=512, entries=128, pages=5)


class World:
    """Everything there is to attend to, for requests in slots 1 to 4. What was never written, and
    all that belongs to slot 0 and page 0, holds NaN codes under the highest scales."""

    def __init__(self, shape: Shape, tokens: int, seed: int):
        torch.manual_seed(seed)
        self.shape = shape
        keys = torch.randn(SLOTS, tokens, shape.dim)
        keys[1] *= 1e-3
        keys[2, ::5] = 0
        keys[3, 3, 7] = 300
        self.keys = codecs.encode_records(keys, MXFP8)
        self.keys[0] = 255
        self.sink = torch.randn(shape.heads)
        self.sink[1] = 60
        self.sink[-1] = -torch.inf
        entries = codecs.encode_records(torch.randn(199, shape.dim), NVFP4)
        places = torch.randint(199, (SLOTS * shape.pages + 1, shape.entries))
        self.pages = entries[places]
        self.pages[0] = 255
        order = torch.randperm(SLOTS * shape.pages) + 1
        self.table = order.reshape(SLOTS, shape.pages).to(torch.int32)
        self.table[0] = 0

    def queries(self, rows: int) -> torch.Tensor:
        """Flat, peaked, and one that sees a single key."""
        q = torch.randn(rows, self.shape.heads, self.shape.dim)
        q[::7] = 0
        q[1::7] *= 8
        q[2::7, :, 3] = 1000
        return q.to(STORED[self.shape.element])

    def selection(self, slot: list[int], position: list[int]) -> torch.Tensor:
        """Ascending lists of visible entries, the last places -1; all, some or none of them."""
        lists = torch.full((len(slot), self.shape.taken), -1)
        for r, (s, p) in enumerate(zip(slot, position, strict=True)):
            visible = min((p + 1) // self.shape.ratio, self.shape.pages * self.shape.entries)
            count = min(visible, self.shape.taken, [512, 3, 1, 0][r % 4]) if s else 0
            lists[r, :count] = torch.randperm(visible)[:count].sort().values
        return lists.to(torch.int32)

    def ring(self, until: dict[int, int]) -> torch.Tensor:
        """Window states that hold the positions before `until` of each slot."""
        ring = torch.full((SLOTS, self.shape.ring, self.keys.shape[-1]), 255, dtype=torch.uint8)
        for slot, end in until.items():
            for p in range(max(0, end - self.shape.ring), end):
                ring[slot, p % self.shape.ring] = self.keys[slot, p]
        return ring

    def answer(self, q: torch.Tensor, slot: int, position: int, chosen: list[int]) -> torch.Tensor:
        """float64 [heads, dim] of one query, and no operand of the kernel but records."""
        own = self.keys[slot, max(0, position - self.shape.window + 1) : position + 1]
        keys = [codecs.decode_records(own, MXFP8)]
        for j in chosen:
            page = self.table[slot, j // self.shape.entries]
            record = self.pages[page, j % self.shape.entries]
            keys.append(codecs.decode_records(record, NVFP4).unsqueeze(0))
        k = torch.cat(keys)
        logits = torch.cat([q.double() @ k.T * self.shape.dim**-0.5, self.sink[:, None]], dim=1)
        return torch.softmax(logits, dim=1)[:, :-1] @ k


def assert_attends(o: torch.Tensor, exact: torch.Tensor) -> None:
    if o.dtype is torch.bfloat16:
        assert_rounds(o, exact)
        return
    # A weight is as wrong, relatively, as its exponent is absolutely: scores reach a few hundred.
    error = (o.double() - exact).abs().amax(-1)
    assert (error <= 2e-5 * exact.abs().amax(-1)).all()
    assert (error / exact.abs().amax(-1)).median() <= 5e-7


@pytest.mark.parametrize("shape", [SMALL, ALONE, WIDE], ids=["small", "alone", "wide-f32"])
def test_decode_and_prefill_attend_alike(shape):
    """A long chunk after a long past, one that begins a request, a single row, and padding."""
    world = World(shape, tokens=100, seed=1)
    requests = [(2, 60, 100), (1, 0, 33), (4, 97, 98), (3, 2, 20)]
    rows = [
        (slot, p, sum(e - b for _, b, e in requests[:i]))
        for i, (slot, begin, end) in enumerate(requests)
        for p in range(begin, end)
    ]
    rows += [(0, 0, len(rows) + i) for i in range(3)]
    slots, positions, _ = (list(column) for column in zip(*rows, strict=True))
    slot, position, row_start = torch.tensor(rows, dtype=torch.int32).unbind(1)
    q, chosen = world.queries(len(rows)), world.selection(slots, positions)
    kv = torch.stack([world.keys[s, p] for s, p, _ in rows])
    ring = world.ring({s: begin for s, begin, _ in requests})
    compressed = [world.pages, world.table, chosen] if shape.taken else []
    operands = [q, ring, slot, position, world.sink, row_start, kv, *compressed]
    op, types = shape.op(ops.ChunkAttention), shape.types(chunk=True)
    (chunk,) = run_kernel(op, operands, types, len(rows))
    (split,) = run_kernel(op, operands, types, len(rows), splits=5)
    live = slot > 0
    assert same_bits(split[live], chunk[live])
    exact = torch.stack(
        [
            world.answer(q[r], s, p, [j for j in chosen[r].tolist() if j >= 0])
            for r, (s, p, _) in enumerate(rows)
            if s
        ]
    )
    assert_attends(chunk[live], exact)
    whole = evaluate(op, operands, types)[0][live]
    assert_attends(whole, exact)

    # The same rows alone, each stored before it is read.
    op, types = shape.op(ops.SparseAttention), shape.types(chunk=False)
    for r, (s, p, _) in enumerate(rows[:-3]):
        compressed = [world.pages, world.table, chosen[r : r + 1]] if shape.taken else []
        operands = [q[r : r + 1], world.ring({s: p + 1}), ints(s), ints(p), world.sink]
        (one,) = run_kernel(op, [*operands, *compressed], types, rows=1)
        assert same_bits(one[0], chunk[r]), f"row {r}: slot {s}, position {p}"


def test_decode_of_a_batch_beside_padding():
    world = World(SMALL, tokens=100, seed=2)
    slots, positions = [1, 4, 4, 4, 2, 3, 0, 0], [0, 50, 51, 52, 15, 99, 0, 0]
    until = {1: 1, 4: 53, 2: 16, 3: 100}
    q, chosen = world.queries(8), world.selection(slots, positions)
    tables = [world.pages, world.table]
    operands = [q, world.ring(until), ints(*slots), ints(*positions), world.sink, *tables, chosen]
    op, types = SMALL.op(ops.SparseAttention), SMALL.types(chunk=False)
    (o,) = run_kernel(op, operands, types, rows=8)
    assert_attends(o[:6], evaluate(SMALL.op(ops.SparseAttention), operands, types)[0][:6].double())
    for r in range(6):
        exact = world.answer(q[r], slots[r], positions[r], [j for j in chosen[r] if j >= 0])
        assert (o[r].double() - exact).abs().max() <= 2**-7 * exact.abs().max()
    (split,) = run_kernel(op, operands, types, rows=8, splits=3)
    assert same_bits(split[:6], o[:6])


def test_the_heads_and_keys_of_the_released_model():
    """Both phases, a full list of selected entries, and any split of a row's heads."""
    world = World(RELEASED, tokens=640, seed=3)
    slots, positions = [4, 4, 4, 2], [637, 638, 639, 130]
    q, chosen = world.queries(4), world.selection(slots, positions)
    tables = [world.pages, world.table, chosen]
    kv = torch.stack([world.keys[s, p] for s, p in zip(slots, positions, strict=True)])
    first = [q, world.ring({4: 637, 2: 130}), ints(*slots), ints(*positions), world.sink]
    op, types = RELEASED.op(ops.ChunkAttention), RELEASED.types(chunk=True)
    operands = [*first, ints(0, 0, 0, 3), kv, *tables]
    (chunk,) = run_kernel(op, operands, types, rows=4)
    exact = torch.stack(
        [
            world.answer(q[r], slots[r], positions[r], [j for j in chosen[r].tolist() if j >= 0])
            for r in range(4)
        ]
    )
    assert_attends(chunk, exact)
    op, types = RELEASED.op(ops.SparseAttention), RELEASED.types(chunk=False)
    first[1] = world.ring({4: 640, 2: 131})
    for splits in (1, 3):
        (decode,) = run_kernel(op, [*first, *tables], types, rows=4, splits=splits)
        assert same_bits(decode, chunk)
