"""What kernel tests ask of results: the bound of the format, exact matches, the same bits."""

from collections.abc import Sequence

import torch

from deepinfer_compile.ir import codecs
from deepinfer_compile.ir.ops import Op
from deepinfer_compile.ir.types import TensorType
from tests.kernels.harness import run_kernel


def assert_rounds(got: torch.Tensor, exact: torch.Tensor, rate: float = 0.999) -> None:
    """`got` is `exact` (float64) within the bound of its format, and mostly the nearest number."""
    eps = torch.finfo(got.dtype).eps / 2
    largest = exact.abs().amax(-1, keepdim=True)
    bound = 2 * eps * exact.abs() + 4 * torch.finfo(torch.float32).eps * largest
    error = (got.double() - exact).abs()
    assert error.le(bound).all(), f"{(error - bound).max():.2e} above the bound"
    if got.dtype is torch.bfloat16:
        same = (got == codecs.round_bf16(exact)).double().mean()
        assert same >= rate, f"only {same:.4%} are the nearest number"


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def assert_rows_stand_alone(
    op: Op,
    tensors: Sequence[torch.Tensor],
    types: Sequence[TensorType],
    rows: int,
    alone: Sequence[int],
) -> None:
    """A row's bits depend neither on the split of the work items nor on the other rows.

    For operators without states: operands by rows are cut to the one row."""
    whole = run_kernel(op, tensors, types, rows)
    for got, expect in zip(run_kernel(op, tensors, types, rows, splits=3), whole, strict=True):
        assert same_bits(got, expect)
    for r in alone:
        cut = [
            tensor[r : r + 1] if type_.by_rows else tensor
            for tensor, type_ in zip(tensors, types, strict=True)
        ]
        for got, expect in zip(run_kernel(op, cut, types, rows=1), whole, strict=True):
            assert same_bits(got, expect[r : r + 1])
