"""A NaN spoils the row it is in, through codes and scales, and no other row."""

import torch

from deepinfer_compile.ir import codecs, ops
from deepinfer_compile.ir.types import DType, R, TensorType
from tests.kernels.harness import run_kernel


def test_a_nan_activation_reaches_every_output_of_its_row_and_no_other():
    torch.manual_seed(0)
    x = torch.randn(7, 64)
    x[2, 40] = float("nan")
    w = torch.randint(0, 0x70, (32, 64), dtype=torch.uint8)
    scale = torch.full((1, 2), 120, dtype=torch.uint8)
    types = [
        TensorType(DType.MXFP8, (R, 64)),
        TensorType(DType.E4M3, (32, 64)),
        TensorType(DType.UE8M0, (1, 2)),
    ]
    records = codecs.encode_records(x, DType.MXFP8)
    (y,) = run_kernel(ops.Linear(out=DType.F32), [records, w, scale], types, rows=7)
    assert y[2].isnan().all()
    assert y[[0, 1, 3, 4, 5, 6]].isfinite().all()


def test_a_nan_is_stored_as_a_nan_record():
    x = torch.randn(3, 64).bfloat16()
    x[1, 5] = float("nan")
    for to in (DType.MXFP8, DType.NVFP4, DType.MXFP4):
        (record,) = run_kernel(ops.Quantize(to), [x], [TensorType(DType.BF16, (R, 64))], rows=3)
        back = codecs.decode_records(record, to)
        assert back[1].isnan().any(), to
        assert back[[0, 2]].isfinite().all(), to
