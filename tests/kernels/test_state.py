"""Stores into rings and pages: bytes, against a dictionary of places and the reference."""

import pytest
import torch

from deepinfer_compile.ir import ops
from deepinfer_compile.ir.reference import evaluate
from deepinfer_compile.ir.types import DType, R, TensorType
from tests.kernels.checks import same_bits
from tests.kernels.harness import run_kernel, storage

F32, I32 = DType.F32, DType.I32
INTS = TensorType(I32, (R,))


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def filled(type_: TensorType, rows: int) -> torch.Tensor:
    """Bytes that differ from place to place."""
    empty = storage(type_, rows)
    if type_.dtype is F32:
        return torch.randn(empty.shape)
    return torch.randint(0, 200, empty.shape).to(empty.dtype)


def step(*requests: tuple[int, int, int], padding: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """slot and position of rows: (slot, first position, rows) of each request, then padding."""
    slot = [s for s, _, n in requests for _ in range(n)] + [0] * padding
    position = [first + i for _, first, n in requests for i in range(n)] + [0] * padding
    return ints(*slot), ints(*position)


STEPS = [
    step((3, 40, 1), (1, 0, 1), (2, 129, 1)),  # decode
    step((3, 5, 9), (1, 127, 3), padding=4),
    step((2, 3, 300), (4, 0, 1), (1, 500, 129), padding=2),  # longer than any ring
    step((1, 7, 128), (2, 7, 128)),  # exactly a ring
    step((3, 0, 131)),
    step(padding=3),
]
RINGS = {
    "window": (DType.MXFP8, 128, (512,), [(512,)]),
    "tail": (F32, 2, (2, 512), [(512,), (512,)]),
    "history": (I32, 4, (1,), [(1,)]),
    "heads": (DType.MXFP4, 5, (3, 32), [(2, 32), (32,)]),
}


@pytest.mark.parametrize("ring", RINGS)
def test_ring_store_keeps_the_last_rows_of_a_place(ring):
    dtype, length, entry, parts = RINGS[ring]
    torch.manual_seed(1)
    types = [
        TensorType(dtype, (5, length, *entry), state=True),
        INTS,
        INTS,
        *(TensorType(dtype, (R, *part)) for part in parts),
    ]
    before = filled(types[0], 0)
    for slot, position in STEPS:
        rows = len(slot)
        parts_of = [filled(t, rows) for t in types[3:]]
        operands = [before, slot, position, *parts_of]
        (after,) = run_kernel(ops.RingStore(), operands, types, rows)
        expect = before.clone()
        whole = torch.cat([part.flatten(1) for part in parts_of], 1).reshape(
            rows, *before.shape[2:]
        )
        for r, s, p in zip(range(rows), slot.tolist(), position.tolist(), strict=True):
            expect[s, p % length] = whole[r]  # row by row: the last one stays
        assert same_bits(after[1:], expect[1:])
        assert same_bits(after[1:], evaluate(ops.RingStore(), operands, types)[0][1:])
        (again,) = run_kernel(ops.RingStore(), operands, types, rows, splits=rows)
        assert same_bits(again[1:], after[1:])


@pytest.mark.parametrize(
    ("dtype", "channels", "page", "ratio"),
    [(DType.NVFP4, 512, 128, 2), (DType.MXFP4, 128, 256, 1), (DType.MXFP8, 32, 5, 3)],
)
def test_page_store_stores_complete_groups(dtype, channels, page, ratio):
    torch.manual_seed(2)
    width = 650 // (page * ratio) + 1
    pages = TensorType(dtype, (4 * width + 1, page, channels), state=True)
    types = [pages, TensorType(I32, (5, width)), INTS, INTS, TensorType(dtype, (R, channels))]
    # Slot 0 and page 0 belong to padding rows.
    table = torch.cat([torch.zeros(1, width), torch.randperm(4 * width).reshape(4, -1) + 1]).int()
    before = filled(pages, 0)
    for slot, position in STEPS:
        rows = len(slot)
        records = filled(types[4], rows)
        operands = [before, table, slot, position, records]
        op = ops.PageStore(ratio)
        (after,) = run_kernel(op, operands, types, rows)
        expect = before.clone()
        for r, s, p in zip(range(rows), slot.tolist(), position.tolist(), strict=True):
            if p % ratio == ratio - 1:
                entry = p // ratio
                expect[table[s, entry // page], entry % page] = records[r]
        assert same_bits(after[1:], expect[1:])
        assert same_bits(after[1:], evaluate(op, operands, types)[0][1:])
        assert same_bits(run_kernel(op, operands, types, rows, splits=rows)[0][1:], after[1:])
