"""Rotary angles and rotations: complex numbers, the float64 reference, released tables."""

import pytest
import torch
from deepinfer_targets.cpu.rules import rope
from safetensors.torch import load_file

from deepinfer_compile.ir import ops
from deepinfer_compile.ir.reference import evaluate
from deepinfer_compile.ir.reference.dense import rope_frequencies
from deepinfer_compile.ir.types import DType, R, TensorType
from tests.golden_data import golden_root
from tests.kernels.checks import assert_rounds, assert_rows_stand_alone, same_bits
from tests.kernels.harness import run_kernel

BF16, F32, I32 = DType.BF16, DType.F32, DType.I32
STORED = {F32: torch.float32, BF16: torch.bfloat16}
POSITION = [TensorType(I32, (R,))]

WINDOW = ops.RopeAngles(dim=64, theta=10000.0)
YARN = {"yarn_factor": 16.0, "beta_fast": 32.0, "beta_slow": 1.0, "original": 65536}
COMPRESSED = ops.RopeAngles(dim=64, theta=160000.0, **YARN)
PAIRS = ops.RopeAngles(dim=64, theta=160000.0, ratio=2, **YARN)
NANO = ops.RopeAngles(32, 160000.0, 2, 4.0, 32.0, 1.0, 64)


def angles_of(op: ops.RopeAngles, position: torch.Tensor, splits: int = 1) -> torch.Tensor:
    return run_kernel(op, [position], POSITION, rows=len(position), splits=splits)[0]


@pytest.mark.parametrize(("op", "name"), [(WINDOW, "swa"), (COMPRESSED, "compressed")])
def test_released_angles(op, name):
    golden = load_file(golden_root() / "ops" / "rope_released_params.safetensors")
    assert rope.frequencies(op).tolist() == golden[f"{name}.inv_freq"].tolist()
    angles = angles_of(op, golden["positions"])
    for side, table in enumerate(("cos", "sin")):
        # The tables come of fp32 cosines: an ulp of 1 apart at most.
        torch.testing.assert_close(angles[:, side], golden[f"{name}.{table}"], rtol=0, atol=6e-8)


@pytest.mark.parametrize("op", [WINDOW, COMPRESSED, PAIRS, NANO])
def test_angles_are_the_reference_bit_for_bit(op):
    frequencies = torch.from_numpy(rope.frequencies(op))
    assert same_bits(frequencies, rope_frequencies(op))
    literals = [float(text[:-1]) for text in rope.literals(rope.frequencies(op))]
    assert same_bits(torch.tensor(literals, dtype=torch.float32), frequencies)
    position = torch.tensor([0, 1, 2, 3, 64, 65, 1000, 65535, 1048574, 1048575], dtype=torch.int32)
    angles = angles_of(op, position, splits=3)
    assert same_bits(angles, evaluate(op, [position], POSITION)[0])
    (one,) = run_kernel(op, [position[6:7]], POSITION, rows=1)
    assert same_bits(one, angles[6:7])


@pytest.mark.parametrize("inverse", [False, True], ids=["forward", "inverse"])
@pytest.mark.parametrize(
    ("dtype", "heads", "channels", "turned"),
    [
        (BF16, 64, 512, 64),
        (F32, 4, 64, 32),
        (BF16, 0, 128, 128),
    ],
)
def test_rope_turns_the_last_channels(dtype, heads, channels, turned, inverse):
    torch.manual_seed(channels)
    rows = 7
    shape = (heads, channels) if heads else (channels,)
    x = torch.randn(rows, *shape)
    x[1] = 0
    x[2] *= 1e-3
    x[3, ..., -3] = 1000
    x = x.to(STORED[dtype])
    turn = torch.rand(rows, turned // 2, dtype=torch.float64) * 50 - 25
    angles = torch.stack([turn.cos(), turn.sin()], dim=1).float()
    types = [TensorType(dtype, (R, *shape)), TensorType(F32, (R, 2, turned // 2))]
    op = ops.Rope(inverse)
    (y,) = run_kernel(op, [x, angles], types, rows)

    cos, sin = angles.double().unbind(1)
    spin = torch.complex(cos, -sin if inverse else sin)
    if heads:
        spin = spin.unsqueeze(1)
    pairs = torch.view_as_complex(x[..., -turned:].double().unflatten(-1, (-1, 2)).contiguous())
    exact = torch.view_as_real(pairs * spin).flatten(-2)
    assert_rounds(y[..., -turned:], exact)
    assert same_bits(y[..., :-turned].contiguous(), x[..., :-turned].contiguous())
    (reference,) = evaluate(op, [x, angles], types)
    assert_rounds(y, reference.double(), rate=0.999)
    assert_rows_stand_alone(op, [x, angles], types, rows, alone=(0, 3, 6))


@pytest.mark.parametrize(("op", "name"), [(WINDOW, "swa"), (COMPRESSED, "compressed")])
def test_released_rotations(op, name):
    golden = load_file(golden_root() / "ops" / "rope_released_params.safetensors")
    x, rows = golden[f"{name}.x"].float(), 14
    angles = angles_of(op, golden["positions"])
    types = [TensorType(F32, (R, 2, 512)), TensorType(F32, (R, 2, 32))]
    (y,) = run_kernel(ops.Rope(), [x, angles], types, rows)
    torch.testing.assert_close(y, golden[f"{name}.x_rot_f32"], rtol=0, atol=2e-6)
    (back,) = run_kernel(ops.Rope(inverse=True), [y, angles], types, rows)
    torch.testing.assert_close(back, x, rtol=0, atol=2e-6)
