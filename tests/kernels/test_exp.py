"""The fp64 exponential of the sampler, to the last bits."""

import ctypes
import math

import torch

from tests.kernels.harness import library_of

SOURCE = """\
#include "exp.h"

extern "C" void exponentials(int64_t n, const double* x, double* y) {
  for (int64_t i = 0; i < n; i += 4) {
    f64x4 v;
    std::memcpy(&v, x + i, sizeof(v));
    v = exp4(v);
    std::memcpy(y + i, &v, sizeof(v));
  }
}
"""


def exponentials(x):
    y = torch.empty_like(x)
    pointers = [ctypes.c_void_p(t.data_ptr()) for t in (x, y)]
    library_of(SOURCE).exponentials(ctypes.c_int64(len(x)), *pointers)
    return y


def test_exponentials_are_within_two_ulp():
    torch.manual_seed(0)
    x = -torch.cat([torch.rand(40_000) * scale for scale in (1e-9, 0.7, 40.0, 708.0)]).double()
    got = exponentials(x).tolist()
    errors = [
        abs(y - math.exp(v)) / math.ulp(math.exp(v)) for v, y in zip(x.tolist(), got, strict=True)
    ]
    assert max(errors) <= 2
    assert sum(errors) / len(errors) < 0.3


def test_exponentials_at_their_edges():
    inf, nan = math.inf, math.nan
    x = torch.tensor([0.0, -0.0, -inf, -1e308, -708.1, -745.0, nan, -1.0], dtype=torch.float64)
    got = exponentials(x).tolist()
    assert got[:6] == [1.0, 1.0, 0.0, 0.0, 0.0, 0.0]
    assert math.isnan(got[6])
    assert got[7] == math.exp(-1.0)
