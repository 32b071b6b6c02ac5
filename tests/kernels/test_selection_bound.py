"""Top-k where whole groups of keys are bounded first: many entries for each one taken."""

import pytest
import torch

from deepinfer_compile.ir import ops
from deepinfer_compile.ir.reference import evaluate
from deepinfer_compile.ir.types import DType, R, TensorType
from tests.kernels.harness import run_kernel


@pytest.mark.parametrize("dtype", [DType.F32, DType.BF16], ids=lambda d: d.value)
@pytest.mark.parametrize("taken", [1, 2, 8])
def test_no_more_are_taken_than_asked_for(dtype, taken):
    """The bound leaves keys uncounted; a digit that holds as many counted ones as are still needed
    may hold some of those too."""
    rows, entries = 64, 64 * (taken + 3) + 5
    torch.manual_seed(taken)
    scores = torch.randn(rows, entries) / 4
    scores = scores.to(torch.float32 if dtype is DType.F32 else torch.bfloat16)
    position = torch.randint(entries // 2, entries, (rows,), dtype=torch.int32)
    types = [TensorType(dtype, (R, entries)), TensorType(DType.I32, (R,))]
    op = ops.TopK(k=taken, ratio=1)
    (got,) = run_kernel(op, [scores, position], types, rows=rows)
    assert torch.equal(got, evaluate(op, [scores, position], types)[0])
