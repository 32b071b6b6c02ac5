"""Plan buffers as arrays, and bf16 in both directions."""

from __future__ import annotations

import numpy as np
import torch

from deepinfer_compile.format.plan import Buffer, MemoryClass
from deepinfer_compile.runtime.arrays import array_of, bf16_to_f32, f32_to_bf16
from deepinfer_compile.runtime.memory import ALIGNMENT, address, aligned_bytes


def buffer(dtype, shape, size):
    return Buffer("b", dtype, shape, MemoryClass.IO, 0, size)


def test_rows_are_as_many_as_asked_or_as_fit():
    area = np.arange(24, dtype=np.int32).view(np.uint8)
    whole = buffer("i32", (-1, 3), area.nbytes)
    assert array_of(whole, area).shape == (8, 3)
    two = array_of(whole, area, 2)
    assert two.tolist() == [[0, 1, 2], [3, 4, 5]]
    two[...] = 0
    assert not area.view(np.int32)[:6].any(), "a view, not a copy"


def test_tables_keep_their_shape_and_records_stay_bytes():
    area = np.zeros(24, dtype=np.uint8)
    assert array_of(buffer("i32", (2, 3), 24), area, 1).shape == (2, 3)
    assert array_of(buffer("mxfp4", (2, 24), 24), area).shape == (24,)


def test_bf16_rounds_as_torch_does():
    bits = np.random.default_rng(0).integers(0, 2**32, 100_000, dtype=np.uint32)
    values = bits.view(np.float32)
    values = values[np.isfinite(values)]
    wanted = torch.from_numpy(values).to(torch.bfloat16)
    found = f32_to_bf16(values)
    assert np.array_equal(found, wanted.view(torch.uint16).numpy())
    assert np.array_equal(bf16_to_f32(found), wanted.float().numpy())


def test_memory_is_zeroed_aligned_and_exact():
    area = aligned_bytes(1001)
    assert (area.nbytes, address(area) % ALIGNMENT) == (1001, 0)
    assert not area.any()
    assert area.flags.writeable
    assert aligned_bytes(0).nbytes == 0
