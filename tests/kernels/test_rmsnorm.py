"""RMSNorm kernels against the float64 reference."""

import pytest
import torch

from deepinfer_compile.ir import ops
from deepinfer_compile.ir.types import DType, R, TensorType
from tests.kernels.harness import run_kernel


def reference(x: torch.Tensor, w: torch.Tensor, eps: float) -> torch.Tensor:
    v = x.double()
    return v * (v.square().mean(-1, keepdim=True) + eps).rsqrt() * w.double()


@pytest.mark.parametrize("channels", [64, 1280])
@pytest.mark.parametrize("scale", [1.0, 1e-3, 1e-12])
def test_rmsnorm_rounds_the_float64_value_once(channels, scale):
    torch.manual_seed(channels)
    x = (torch.randn(5, channels) * scale).bfloat16()
    x[0] = 0
    x[1, 3] = 1000
    w = (1 + torch.randn(channels) / 10).bfloat16()
    types = [TensorType(DType.BF16, (R, channels)), TensorType(DType.BF16, (channels,))]
    (y,) = run_kernel(ops.RmsNorm(1e-20), [x, w], types, rows=5)
    exact = reference(x, w, 1e-20)
    assert (y.double() - exact).abs().le(2**-8 * exact.abs()).all()
    assert (y == exact.bfloat16()).float().mean() > 0.999
