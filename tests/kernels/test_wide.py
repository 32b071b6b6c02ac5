"""Wider registers give the same bits: two outputs side by side, against one at a time.

`TWO_SIDES` lays operands out as AVX-512 code does, on any CPU; where there is AVX-512 its own
instructions are compared too.
"""

import pytest
import torch
from deepinfer_targets.cpu.isas import AVX512, X86_64_V3
from deepinfer_targets.cpu.toolchain import Gxx

from deepinfer_compile.ir import ops
from deepinfer_compile.ir.types import DType
from deepinfer_compile.runtime.machine import cpu_features
from tests.kernels import test_expert_linear, test_linear
from tests.kernels.harness import STRICT, run_kernel

BF16, F32, E4M3, MXFP8 = DType.BF16, DType.F32, DType.E4M3, DType.MXFP8
# One row, a few, and every remainder of the six that are multiplied at once.
ROWS = (1, 4, 5, 6, 7, 8, 9, 10, 11, 96, 97, 205)
EMULATED = (Gxx(warnings=("-DTWO_SIDES",)), X86_64_V3)
REAL = (STRICT, AVX512)


def builds():
    yield EMULATED
    if cpu_features().issuperset(AVX512.features):
        yield REAL


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
