"""Engram: published hash vectors, gathered bytes, a gate written here, released values."""

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from deepinfer_compile.ir import ops
from deepinfer_compile.ir.reference import evaluate
from deepinfer_compile.ir.types import DType, R, TensorType
from tests.golden_data import golden_root
from tests.kernels.checks import assert_rounds, assert_rows_stand_alone, same_bits
from tests.kernels.harness import run_kernel

BF16, F32, I32 = DType.BF16, DType.F32, DType.I32
STORED = {F32: torch.float32, BF16: torch.bfloat16}
INTS = TensorType(I32, (R,))
RING = 16
GARBAGE = -(2**31) + 12345

NANO = [
    (
        (29662608052400909, 1873410163432121, 13919202536988139, 28638879857136817),
        (67, 71, 73, 79, 83, 89),
    ),
    (
        (29614367931768699, 14359748903426231, 8766307535087495, 27646881644150121),
        (97, 101, 103, 107, 109, 113),
    ),
]
# Section 10.3: ids 11 7 200 7 11 42, layer, which position is an image's -> rows by position.
VECTORS = [
    (0, None, "0 77 163 271 321 432 | 13 92 206 213 365 444 | 43 119 201 245 317 454 | "
              "18 87 193 252 371 409 | 8 84 142 278 371 458 | 62 106 173 264 298 438"),
    (0, 2, "0 77 163 271 321 432 | 13 92 206 213 365 444 | | "
           "27 114 142 235 299 414 | 8 84 172 262 365 456 | 62 106 173 264 325 460"),
    (1, None, "88 167 287 373 442 565 | 60 167 210 304 477 573 | 95 138 207 324 506 539 | "
              "64 143 229 387 421 540 | 3 113 269 384 419 604 | 26 183 204 343 443 529"),
    (1, 2, "| | | 69 159 200 382 463 520 | 3 113 198 339 438 621 | 26 183 204 343 502 607"),
]  # fmt: skip


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def history_type(slots: int, length: int = RING) -> TensorType:
    return TensorType(I32, (slots, length, 1), state=True)


def prefill(op: ops.ChunkEngramHash, ids: torch.Tensor, cuts: list[int]) -> torch.Tensor:
    """Hashes of one request in chunks, each over the history the earlier ones left; padding rows
    follow every chunk, and what was never written is garbage."""
    types = [history_type(2), INTS, INTS, INTS, TensorType(I32, (R, 1))]
    history = torch.full((2, RING, 1), GARBAGE, dtype=torch.int32)
    hashed = []
    for first, past in zip(cuts, [*cuts[1:], len(ids)], strict=True):
        rows = past - first
        position = torch.cat([torch.arange(first, past), torch.zeros(2)]).int()
        slot = torch.cat([torch.ones(rows), torch.zeros(2)]).int()
        start = torch.cat([torch.zeros(rows), torch.tensor([rows, rows + 1])]).int()
        step = torch.cat([ids[first:past], ints(7, GARBAGE)]).unsqueeze(1)
        operands = [history, slot, position, start, step]
        (got,) = run_kernel(op, operands, types, rows + 2, splits=3)
        assert same_bits(got[:rows], evaluate(op, operands, types)[0][:rows])
        assert got.min() >= 0
        assert got.max() < sum(op.primes)
        hashed.append(got[:rows])
        for p in range(first, past):
            history[1, p % RING] = ids[p]
    return torch.cat(hashed)


def decode(op: ops.EngramHash, ids: torch.Tensor) -> torch.Tensor:
    """Hashes of every position at once: position p in a slot of its own, stored first."""
    count = len(ids)
    history = torch.full((count + 1, RING, 1), GARBAGE, dtype=torch.int32)
    for p in range(count):
        for q in range(max(0, p - RING + 1), p + 1):
            history[p + 1, q % RING] = ids[q]
    slot = torch.arange(count + 1).roll(-1).int()  # the last row is padding
    position = torch.cat([torch.arange(count), torch.zeros(1)]).int()
    types = [history_type(count + 1), INTS, INTS]
    operands = [history, slot, position]
    (got,) = run_kernel(op, operands, types, count + 1, splits=3)
    assert got.min() >= 0
    assert got.max() < sum(op.primes)
    (one,) = run_kernel(op, [history, slot[4:5], position[4:5]], types, rows=1)
    assert same_bits(one, got[4:5])
    return got[:count]


@pytest.mark.parametrize(("layer", "image", "rows"), VECTORS)
def test_published_hashes(layer, image, rows):
    multipliers, primes = NANO[layer]
    ids = ints(11, 7, 200, 7, 11, 42)
    if image is not None:
        ids[image] = -1
    chunk = prefill(ops.ChunkEngramHash(multipliers, primes, pad=2), ids, [0, 1, 3])
    assert same_bits(decode(ops.EngramHash(multipliers, primes, pad=2), ids), chunk)
    for got, text in zip(chunk.tolist(), rows.split("|"), strict=True):
        if text.strip():
            assert got == [int(number) for number in text.split()]


@pytest.mark.parametrize("layer", [0, 1])
def test_released_hashes(layer):
    golden = load_file(golden_root() / "ops" / "engram_hash_released_params.safetensors")
    tables = (
        tuple(golden["multipliers"][layer].tolist()),
        tuple(golden["primes"][layer].flatten().tolist()),
        int(golden["pad_id"]),
    )
    ids = golden["compressed_ids"]
    masked = torch.where(golden["text_mask"] != 0, ids, -1)
    assert (masked < 0).any()
    for tokens, name in ((ids, "hash_ids"), (masked, "hash_ids_with_mask")):
        expect = golden[name][:, layer]
        assert torch.equal(
            prefill(ops.ChunkEngramHash(*tables), tokens, [0, 1, 2, 65, 256]), expect
        )
        assert torch.equal(decode(ops.EngramHash(*tables), tokens), expect)


def test_map_token_marks_images():
    token_map = torch.randperm(200).int()
    token, image = ints(5, 199, 7, 0, 5), ints(0, 0, 1, 0, 3)
    types = [INTS, INTS, TensorType(I32, (200,))]
    (ids,) = run_kernel(ops.MapToken(), [token, image, token_map], types, rows=5, splits=3)
    expect = token_map[token].unsqueeze(1)
    expect[[2, 4]] = -1
    assert same_bits(ids, expect)


def test_lookup_gathers_codes_then_scales():
    columns, channels, rows = 24, 256, 3
    count = 2**31 // channels + 100  # codes past two gigabytes: numpy's zeros cost no memory
    table = torch.from_numpy(np.zeros((count, channels), dtype=np.uint8))
    scale = torch.from_numpy(np.zeros((count, channels // 32), dtype=np.uint8))
    torch.manual_seed(1)
    wanted = torch.randint(0, count, (rows, columns)).int()
    wanted[0, 0], wanted[2, 23], wanted[1, 5] = count - 1, 0, wanted[1, 4]
    table[wanted.flatten().long()] = torch.randint(0, 256, (rows * columns, channels)).byte()
    scale[wanted.flatten().long()] = torch.randint(0, 256, (rows * columns, 8)).byte()
    types = [
        TensorType(I32, (R, columns)),
        TensorType(DType.E4M3, (count, channels)),
        TensorType(DType.UE8M0, (count, channels // 32)),
    ]
    operands = [wanted, table, scale]
    (records,) = run_kernel(ops.EngramLookup(), operands, types, rows)
    codes, scales = records.split([columns * channels, columns * channels // 32], dim=1)
    for c in range(columns):
        at = wanted[:, c].long()
        assert torch.equal(codes[:, c * channels : (c + 1) * channels], table[at])
        assert torch.equal(scales[:, c * 8 : (c + 1) * 8], scale[at])
    assert_rows_stand_alone(ops.EngramLookup(), operands, types, rows, alone=(0, 2))


def gate_types(dtype: DType, channels: int) -> list[TensorType]:
    weight = TensorType(BF16, (4, channels))
    x, kv = TensorType(dtype, (R, 4, channels)), TensorType(dtype, (R, 5 * channels))
    return [x, kv, weight, weight, INTS]


def gated(x, kv, q_weight, k_weight, image):
    """Section 3.12 f, one stream of one row at a time."""
    y = x.double().clone()
    channels = x.shape[-1]
    for r in range(len(x)):
        if image[r]:
            continue
        key, value = kv[r].double().reshape(5, channels)[:4], kv[r, 4 * channels :].double()
        for s in range(4):
            a, b = x[r, s].double(), key[s]
            dot = (a * q_weight[s].double() * k_weight[s].double() * b).sum()
            dot /= ((a * a).mean() + 1e-20).sqrt() * ((b * b).mean() + 1e-20).sqrt() * channels**0.5
            root = dot.abs().clamp(min=1e-6).sqrt()
            y[r, s] += value / (1 + (-(root if dot >= 0 else -root)).exp())
    return y


@pytest.mark.parametrize(("dtype", "channels"), [(BF16, 5120), (F32, 256)])
def test_gate_rounds_once(dtype, channels):
    rows = 9
    torch.manual_seed(2)
    x, kv = torch.randn(rows, 4, channels), torch.randn(rows, 5 * channels)
    x[1] *= 1e-3
    x[2] *= 1e-11  # the norms' eps matters
    kv[3, : 4 * channels] *= 1e-11
    x[4], kv[5] = 0, 0
    x[6, 1, 3], kv[6, 7] = 1000, 1000
    x[8] = torch.nan
    kv[8] = torch.nan
    x[3] = (
        3
        * kv[3, : 4 * channels].reshape(4, channels)
        * 1e11
        * torch.tensor([1, -1, 1, -1])[:, None]
    )
    weights = [(1 + torch.randn(4, channels) / 3).bfloat16() for _ in range(2)]
    image = ints(0, 0, 0, 0, 0, 0, 0, 2, 1)
    operands = [x.to(STORED[dtype]), kv.to(STORED[dtype]), *weights, image]
    types = gate_types(dtype, channels)
    (y,) = run_kernel(ops.EngramGate(1e-20), operands, types, rows)
    assert same_bits(y[7:], operands[0][7:])
    assert_rounds(y[:8], gated(*operands)[:8])
    assert_rounds(y[:8], evaluate(ops.EngramGate(1e-20), operands, types)[0][:8].double())
    assert_rows_stand_alone(ops.EngramGate(1e-20), operands, types, rows, alone=(0, 3, 6, 8))


def test_released_gate():
    golden = load_file(golden_root() / "ops" / "engram_gate.safetensors")
    x, kv = golden["h"], golden["kv"].flatten(1)
    weights, image = [golden["q_weight"], golden["k_weight"]], torch.zeros(24, dtype=torch.int32)
    operands = [x.float(), kv.float(), *weights, image]
    (y,) = run_kernel(ops.EngramGate(1e-20), operands, gate_types(F32, 256), rows=24)
    torch.testing.assert_close(y, golden["out_f32"], rtol=1e-5, atol=1e-5)
