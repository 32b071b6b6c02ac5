"""Wider registers give the same bits: two outputs or heads side by side, against one at a time.

`TWO_SIDES` lays operands out as AVX-512 code does, on any CPU; what this CPU has beyond the
baseline is compared too.
"""

import pytest
import torch
from deepinfer_targets.cpu.isas import AVX512, X86_64_V3
from deepinfer_targets.cpu.toolchain import Gxx

from deepinfer_compile.ir import ops
from deepinfer_compile.ir.types import DType
from deepinfer_compile.runtime.machine import cpu_features
from tests.kernels import test_expert_linear, test_index_scores, test_linear
from tests.kernels.checks import same_bits
from tests.kernels.harness import STRICT, run_kernel
from tests.kernels.test_attention import ALONE, RELEASED, SMALL, World, ints

BF16, F32, E4M3, MXFP8 = DType.BF16, DType.F32, DType.E4M3, DType.MXFP8
# One row, a few, and every remainder of the six that are multiplied at once.
ROWS = (1, 4, 5, 6, 7, 8, 9, 10, 11, 96, 97, 205)
EMULATED = (Gxx(warnings=("-DTWO_SIDES",)), X86_64_V3)
REAL = (STRICT, AVX512)


def builds():
    yield EMULATED
    if cpu_features().issuperset(AVX512.features):
        yield REAL
    yield STRICT, STRICT.native()  # byte products too, where the CPU has them


@pytest.mark.parametrize(
    ("of", "outputs", "inputs", "groups"),
    [
        ((MXFP8, E4M3, BF16), 320, 192, 1),
        ((MXFP8, E4M3, BF16), 72, 544, 1),
        ((BF16, E4M3, BF16), 64, 128, 2),
        ((BF16, BF16, F32), 12, 64, 1),
        ((F32, BF16, F32), 300, 288, 1),
    ],
)
def test_products(of, outputs, inputs, groups):
    for rows in ROWS:
        tensors, types = test_linear.operands(of, rows, outputs, inputs, groups)
        op = ops.Linear(of[2], groups)
        (narrow,) = run_kernel(op, tensors, types, rows)
        assert narrow.any()
        for build in builds():
            (wide,) = run_kernel(op, tensors, types, rows, build=build)
            assert torch.equal(wide.view(torch.uint8), narrow.view(torch.uint8)), (rows, build)


@pytest.mark.parametrize("each", [False, True])
def test_experts(each):
    for rows in (1, 7, 130):
        tensors, types = test_expert_linear.operands(MXFP8, rows, 6, 2, 300, 96, each)
        op = ops.ExpertLinear(BF16)
        (narrow,) = run_kernel(op, tensors, types, rows)
        assert narrow.any()
        for build in builds():
            (wide,) = run_kernel(op, tensors, types, rows, build=build)
            assert torch.equal(wide.view(torch.uint8), narrow.view(torch.uint8)), (rows, build)


@pytest.mark.parametrize("shape", [SMALL, ALONE, RELEASED], ids=["4 heads", "6 heads", "64 heads"])
def test_attention(shape):
    """Heads that fill the registers, and six that leave some over."""
    world = World(shape, tokens=140, seed=4)
    slots, positions = [4, 1, 3], [139, 70, 5]
    ring = world.ring({slot: p + 1 for slot, p in zip(slots, positions, strict=True)})
    operands = [world.queries(3), ring, ints(*slots), ints(*positions), world.sink]
    if shape.taken:
        operands += [world.pages, world.table, world.selection(slots, positions)]
    op, types = shape.op(ops.SparseAttention), shape.types(chunk=False)
    (narrow,) = run_kernel(op, operands, types, rows=3)
    assert narrow.any()
    for build in builds():
        (wide,) = run_kernel(op, operands, types, rows=3, build=build)
        assert same_bits(wide, narrow), build


def test_scores_of_keys():
    shape, tensors = test_index_scores.RELEASED, test_index_scores.step(test_index_scores.RELEASED)
    rows = len(tensors[0])
    (narrow,) = run_kernel(shape.op, tensors, shape.types, rows)
    assert narrow.any()
    for build in builds():
        (wide,) = run_kernel(shape.op, tensors, shape.types, rows, build=build)
        assert same_bits(wide[:-2], narrow[:-2]), build  # the last two are padding
