"""How the values of a synthetic tensor are drawn: random words look up a table of stored codes.

    (seed, name) -> PCG64 words -> table[word] -> bytes as stored

Tables hold quantiles, so a lookup is a draw from the wanted distribution, in any dtype. Only the
raw stream of PCG64 is used: NumPy promises to keep that stream, its distributions may change.
Choices follow model_v41.md section 10.5: every linear maps unit variance to about unit variance,
and the rest is there to be noticed: uneven scales, clamped gates, sinks, biases that reorder
experts, Engram rows past the last bucket that are not zero.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from math import floor, log2, sqrt
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from deepinfer_compile.checkpoint.tensors import BLOCK, StorageDType, TensorSpec
from deepinfer_compile.spec.schema import Model

Floats = NDArray[np.float64]
Codes = NDArray[np.uint8] | NDArray[np.uint16] | NDArray[np.float32]

_LEVELS = 65536  # a table is indexed by 16 random bits
_CHUNK_BYTES = 4 << 20  # of random words; memory in use is a small multiple of it
_FP8_STD = 96.0  # 4.3 sigma, the last quantile, is just inside E4M3's 448
_FP4_STD = sqrt(8.5625)  # of E2M1 codes drawn evenly
_LOUD_SHARE = 1 / 32  # of gate and up rows reach past the swiglu clamp

# What a sub-layer adds to the streams, against embeddings of 1. At 1 the model is chaotic: FP8
# rounding alone moved logits by a KL of 0.5, so that nothing could be compared end to end.
_BRANCH_GAIN = 0.25

# Scale exponents relative to the wanted one, in 256ths: a narrow window, and a few far off.
_SCALE_WINDOW = ((-6, 12), (-1, 64), (0, 116), (1, 64))


@dataclass(frozen=True)
class Recipe:
    """`table` is indexed by as many random bits as it needs; `loud` replaces it on a few rows."""

    table: Codes
    loud: Codes | None = None


def normal_quantiles() -> Floats:
    """The standard normal at the middle of each of 65,536 equal steps of probability."""
    normal = NormalDist()
    upper = [normal.inv_cdf(0.5 + (i + 0.5) / _LEVELS) for i in range(_LEVELS // 2)]
    return np.array([-x for x in reversed(upper)] + upper)


def tensor_bytes(spec: TensorSpec, recipe: Recipe, seed: int) -> Iterator[bytes]:
    """The tensor's data in bounded pieces; depends on the seed, the name and the recipe only."""
    rows, columns = (1, *spec.shape)[-2:]
    width = 1 if len(recipe.table) == 256 else 2
    stream = _stream(seed, spec.name)
    loud_rows = np.zeros(rows, dtype=np.bool_)
    if recipe.loud is not None:
        loud_rows = _loud_rows(rows, _stream(seed, spec.name + "#rows"))
    # A multiple of 32 rows is whole 64-bit words, so the pieces do not shift the stream.
    step = max(BLOCK, _CHUNK_BYTES // (columns * width) // BLOCK * BLOCK)
    for first in range(0, rows, step):
        count = min(step, rows - first)
        words = stream.random_raw(-(-count * columns * width // 8)).astype("<u8")
        picks = words.view("<u1" if width == 1 else "<u2")[: count * columns]
        picks = picks.reshape(count, columns)
        piece = recipe.table[picks]
        if recipe.loud is not None:
            some = loud_rows[first : first + count]
            piece[some] = recipe.loud[picks[some]]
        yield piece.astype(piece.dtype.newbyteorder("<"), copy=False).tobytes()


def recipe_for(spec: TensorSpec, model: Model, normal: Floats) -> Recipe:
    """The recipe of one tensor; `normal` is `normal_quantiles()`, made once by the caller."""
    match spec.dtype:
        case StorageDType.I8:
            return Recipe(np.arange(256, dtype=np.uint8))  # two E2M1 codes, all 256 pairs
        case StorageDType.F8_E8M0:
            return _scales(spec, model)
        case StorageDType.F8_E4M3:
            if _gate_or_up(spec.name):
                loud = _loud_gain(model)
                return Recipe(_e4m3(normal * _FP8_STD / loud), _e4m3(normal * _FP8_STD))
            return Recipe(_e4m3(normal * _FP8_STD))
        case StorageDType.BF16:
            return Recipe(_bf16(_plain(spec, normal)))
        case _:
            return Recipe(_plain(spec, normal).astype(np.float32))


def _plain(spec: TensorSpec, normal: Floats) -> Floats:
    """Values of a tensor without scales."""
    leaf = spec.name.removesuffix(".weight").rsplit(".", 1)[-1]
    even = (np.arange(_LEVELS) + 0.5) / _LEVELS
    fan_in = spec.shape[-1]
    match leaf:
        case "norm" | "norm1" | "norm2" | "q_weight" | "k_weight":
            return 1 + 0.1 * normal
        case "embed" | "attn_sink" | "image_start" | "image_end" | "image_newline":
            return normal
        case "hc_attn_base" | "hc_ffn_base":
            return normal  # keeps the mixing matrix far from the identity and from uniform
        case "hc_attn_scale" | "hc_ffn_scale":
            return 0.3 + 0.7 * even
        case "bias" | "bias_vl" if ".gate." in spec.name:
            return 0.6 * even - 0.3  # against scores around 0.8: changes many selections
        case "bias":
            return 0.1 * normal
        case "head" if spec.name == "head.weight":
            return normal * 2 / sqrt(fan_in)  # logits of standard deviation 2
        case "gate":
            return normal * 1.5 / sqrt(fan_in)
        case _ if leaf.endswith("_norm"):
            return 1 + 0.1 * normal
        case _:
            return normal / sqrt(fan_in)


def _scales(spec: TensorSpec, model: Model) -> Recipe:
    """Scale bytes that bring the codes of the weight beside them to 1 / sqrt(fan_in)."""
    stem = spec.name.removesuffix(".scale")
    wanted = 1 / sqrt(spec.shape[-1] * BLOCK)
    if stem.endswith(".embed"):
        wanted = 1.0  # table rows are looked up, not summed over
    if stem.endswith("attn.wq_b"):
        wanted *= 2.0  # attention logits of standard deviation 2 pick some keys over others
    if stem.endswith((".wo_b", ".w2")):
        wanted *= _BRANCH_GAIN
    if ".experts." in stem:
        table = _scale_table(wanted / _FP4_STD)
        if not _gate_or_up(spec.name):
            return Recipe(table)
        step = max(1, round(log2(_loud_gain(model))))
        return Recipe(table, np.minimum(table + step, 254).astype(np.uint8))
    if _gate_or_up(spec.name):
        return Recipe(_scale_table(wanted * _loud_gain(model) / _FP8_STD))
    return Recipe(_scale_table(wanted / _FP8_STD))


def _scale_table(wanted: float) -> NDArray[np.uint8]:
    """256 UE8M0 bytes around `wanted`, whose mean square is `wanted` squared."""
    offsets = np.array([offset for offset, times in _SCALE_WINDOW for _ in range(times)])
    exponent = log2(wanted / sqrt(np.mean(4.0**offsets)))
    base = floor(exponent)
    # Powers of two cannot meet `wanted`: so many of them are taken one higher, evenly spread.
    share = (4.0 ** (exponent - base) - 1) / 3
    higher = np.diff(np.floor(np.arange(len(offsets) + 1) * share))
    codes: NDArray[np.uint8] = np.clip(127 + base + offsets + higher, 1, 254).astype(np.uint8)
    return codes


def _gate_or_up(name: str) -> bool:
    """Expert inputs, where some rows are made loud enough to be clamped."""
    return "experts." in name and name.rsplit(".", 2)[-2] in ("w1", "w3")


def _loud_gain(model: Model) -> float:
    """At this standard deviation every fifth value passes the clamp."""
    return min(max(0.8 * model.moe.swiglu_limit, 2.0), 16.0)


def _loud_rows(rows: int, stream: np.random.PCG64) -> NDArray[np.bool_]:
    """A fixed share of the rows, at least one."""
    order = np.argsort(stream.random_raw(rows), kind="stable")
    chosen = np.zeros(rows, dtype=np.bool_)
    chosen[order[: max(1, round(rows * _LOUD_SHARE))]] = True
    return chosen


def _stream(seed: int, name: str) -> np.random.PCG64:
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return np.random.PCG64(int.from_bytes(digest, "little"))


def _e4m3(values: Floats) -> NDArray[np.uint8]:
    """Nearest finite E4M3 code."""
    codes = np.arange(127)  # 127 is NaN
    exponent, mantissa = codes >> 3, codes & 7
    subnormal = mantissa * 2.0**-9
    magnitude = np.where(exponent == 0, subnormal, (1 + mantissa / 8) * 2.0 ** (exponent - 7))
    nearest = np.searchsorted((magnitude[1:] + magnitude[:-1]) / 2, np.abs(values))
    return (nearest | np.where(values < 0, 128, 0)).astype(np.uint8)


def _bf16(values: Floats) -> NDArray[np.uint16]:
    """Bits of the nearest bfloat16, ties to even."""
    bits = values.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
