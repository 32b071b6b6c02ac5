"""A fused kernel writes the bytes that the kernels of its parts write one after another.

Whoever fuses changes nothing but time, so the tests of the parts are tests of the whole. Shapes
have every width that the parts treat in their own way, and rows on both sides of every block.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch

from deepinfer_compile.ir import codecs, fused, ops
from deepinfer_compile.ir.fused import Fused
from deepinfer_compile.ir.ops import Op
from deepinfer_compile.ir.reference import evaluate
from deepinfer_compile.ir.types import DType, R, TensorType
from tests.kernels.checks import assert_rows_stand_alone, same_bits
from tests.kernels.harness import run_kernel
from tests.kernels.test_attention import Shape, World, ints

BF16, F32, I32, E4M3, E2M1 = DType.BF16, DType.F32, DType.I32, DType.E4M3, DType.E2M1
MXFP8, UE8M0 = DType.MXFP8, DType.UE8M0
STORED = {F32: torch.float32, BF16: torch.bfloat16}
# What the policies make of a row: bf16 and a record, or f32 and no record.
POLICIES = pytest.mark.parametrize(
    ("dtype", "to"), [(BF16, MXFP8), (F32, None)], ids=["vendor", "f32"]
)


@dataclass(frozen=True)
class Held:
    """A tensor between two kernels."""

    tensor: torch.Tensor
    type: TensorType


def in_parts(
    op: Fused, tensors: Sequence[torch.Tensor], types: Sequence[TensorType], rows: int
) -> tuple[torch.Tensor, ...]:
    """`op` by the kernels of its parts, themselves in parts if they are fused."""

    def apply(part: Op, *xs: Held) -> tuple[Held, ...]:
        of, given = [x.type for x in xs], [x.tensor for x in xs]
        run = in_parts if isinstance(part, Fused) else run_kernel
        made = run(part, given, of, rows)
        return tuple(map(Held, made, part.infer(tuple(of))))

    held = list(map(Held, tensors, types))
    return tuple(result.tensor for result in op.compose(apply, held))


def assert_same_as_parts(op: Fused, tensors, types, rows: int, alone: Sequence[int]) -> None:
    whole = run_kernel(op, tensors, types, rows)
    for got, expect in zip(whole, in_parts(op, tensors, types, rows), strict=True):
        assert same_bits(got, expect)
    assert_rows_stand_alone(op, tensors, types, rows, alone)


def rows_of(rows: int, *inner: int, dtype: DType) -> torch.Tensor:
    """Unit scale, and with room for them a row of zeros, a small one and one huge channel."""
    x = torch.randn(rows, *inner)
    if rows > 4:
        x[0] = 0
        x[1] *= 1e-3
        x[3].flatten()[7] = 1000
    return codecs.encode_records(x, dtype) if dtype.is_record else x.to(STORED[dtype])


def norm_weight(channels: int) -> torch.Tensor:
    return (1 + torch.randn(channels) / 10).bfloat16()


def angles_of(rows: int, turned: int) -> tuple[torch.Tensor, TensorType]:
    op = ops.RopeAngles(dim=turned, theta=10000.0)
    position = torch.arange(rows, dtype=torch.int32) * 37
    (angles,) = evaluate(op, [position], [TensorType(I32, (R,))])
    return angles, TensorType(F32, (R, 2, turned // 2))


@pytest.mark.parametrize(
    ("dtype", "to", "channels"), [(BF16, MXFP8, 1280), (F32, DType.MXFP4, 96)], ids=str
)
def test_rmsnorm_quantize(dtype, to, channels):
    torch.manual_seed(1)
    x, w = rows_of(9, channels, dtype=dtype), norm_weight(channels)
    types = [TensorType(dtype, (R, channels)), TensorType(BF16, (channels,))]
    assert_same_as_parts(fused.RmsNormQuantize(1e-20, to), [x, w], types, 9, alone=[0, 3, 8])


@pytest.mark.parametrize(
    ("dtype", "to", "heads", "channels", "turned"),
    [(BF16, DType.MXFP4, 8, 128, 64), (F32, DType.NVFP4, 1, 64, 20)],
    ids=["index_q", "ragged-f32"],
)
def test_rope_quantize(dtype, to, heads, channels, turned):
    torch.manual_seed(2)
    inner = (heads, channels) if heads > 1 else (channels,)
    angles, angle_type = angles_of(7, turned)
    xs = [rows_of(7, *inner, dtype=dtype), angles]
    types = [TensorType(dtype, (R, *inner)), angle_type]
    assert_same_as_parts(fused.RopeQuantize(to), xs, types, 7, alone=[0, 6])


@pytest.mark.parametrize(
    ("dtype", "to", "channels", "turned"),
    [(BF16, MXFP8, 512, 64), (F32, DType.MXFP4, 32, 32)],
    ids=["kv", "all-turned-f32"],
)
def test_rmsnorm_rope_quantize(dtype, to, channels, turned):
    torch.manual_seed(3)
    angles, angle_type = angles_of(7, turned)
    xs = [rows_of(7, channels, dtype=dtype), norm_weight(channels), angles]
    types = [TensorType(dtype, (R, channels)), TensorType(BF16, (channels,)), angle_type]
    assert_same_as_parts(fused.RmsNormRopeQuantize(1e-6, to), xs, types, 7, alone=[0, 6])


def e4m3_matrix(outputs: int, inputs: int):
    """Scales of neighbouring blocks differ by up to 2^8."""
    blocks = (-(-outputs // 32), inputs // 32)
    codes = codecs.encode_e4m3(torch.randn(outputs, inputs).double() * 4)
    scale = torch.randint(115, 124, blocks, dtype=torch.uint8)
    return [codes, scale], [TensorType(E4M3, (outputs, inputs)), TensorType(UE8M0, blocks)]


@POLICIES
def test_linear_pair(dtype, to):
    """Different tiles, a ragged one at the end of the first matrix, heads on the second."""
    torch.manual_seed(8)
    x, inputs = to or dtype, 160
    (first, first_types), (second, second_types) = (e4m3_matrix(n, inputs) for n in (43, 320))
    xs = [rows_of(7, inputs, dtype=x), *first, *second]
    types = [TensorType(x, (R, inputs)), *first_types, *second_types]
    op = fused.LinearPair(dtype, heads=(0, 5))
    assert_same_as_parts(op, xs, types, 7, alone=[0, 6])


@POLICIES
def test_linear_swiglu(dtype, to):
    torch.manual_seed(4)
    outputs, inputs = 96, 160
    xs = [rows_of(101, inputs, dtype=to or dtype)]
    types = [TensorType(to or dtype, (R, inputs))]
    for _ in ("gate", "up"):
        matrix, of = e4m3_matrix(outputs, inputs)
        xs, types = [*xs, *matrix], [*types, *of]
    op = fused.LinearSwiGlu(2.0, dtype, to)
    assert_same_as_parts(op, xs, types, 101, alone=[0, 100])
    assert_same_as_parts(op, [xs[0][:3], *xs[1:]], types, 3, alone=[2])


@POLICIES
def test_expert_swiglu(dtype, to):
    """250 rows give some experts more than are gated at once."""
    torch.manual_seed(5)
    rows, experts, taken, outputs, inputs = 250, 6, 3, 64, 96
    chosen = torch.rand(rows, experts).argsort(1)[:, :taken].sort(1).values.to(torch.int32)
    xs = [rows_of(rows, inputs, dtype=to or dtype), chosen]
    types = [TensorType(to or dtype, (R, inputs)), TensorType(I32, (R, taken))]
    for _ in ("gate", "up"):
        xs.append(torch.randint(0, 256, (experts, outputs, inputs // 2), dtype=torch.uint8))
        xs.append(torch.randint(115, 124, (experts, outputs, inputs // 32), dtype=torch.uint8))
        types.append(TensorType(E2M1, (experts, outputs, inputs)))
        types.append(TensorType(UE8M0, (experts, outputs, inputs // 32)))
    xs.append(torch.rand(rows, taken))
    types.append(TensorType(F32, (R, taken)))
    op = fused.ExpertSwiGlu(10.0, dtype, to)
    assert_same_as_parts(op, xs, types, rows, alone=[0, rows - 1])


def streams(rows: int, channels: int, dtype: DType):
    """Operands of `mhc_enter` but X: fn, base, scale, pre, w."""
    mixes, width = 24, 4 * channels
    tensors = [
        torch.randn(mixes, width) * width**-0.5,
        torch.randn(mixes),
        torch.tensor([1.0, 0.5, 2.0]),
        torch.rand(rows, 4),
        norm_weight(channels),
    ]
    types = [
        TensorType(F32, (mixes, width)),
        TensorType(F32, (mixes,)),
        TensorType(F32, (3,)),
        TensorType(F32, (R, 4)),
        TensorType(BF16, (channels,)),
    ]
    return tensors, types


@pytest.mark.parametrize(
    ("dtype", "to", "channels"), [(BF16, MXFP8, 320), (F32, None, 32)], ids=["vendor", "f32"]
)
def test_mhc_enter_alone_and_after_an_expansion(dtype, to, channels):
    """35 rows are two blocks and three rows more; 320 channels, a chunk and a part of one."""
    torch.manual_seed(6)
    rows = 35
    numbers = (20, 1e-6, 1e-20, 1e-20, to)
    rest, rest_types = streams(rows, channels, dtype)
    x, x_type = rows_of(rows, 4, channels, dtype=dtype), TensorType(dtype, (R, 4, channels))
    enter = fused.MhcEnter(*numbers)
    assert_same_as_parts(enter, [x, *rest], [x_type, *rest_types], rows, alone=[0, 34])
    before = [rows_of(rows, channels, dtype=dtype), x, torch.rand(rows, 4) * 2]
    before.append(torch.rand(rows, 4, 4))
    types = [TensorType(dtype, (R, channels)), x_type, TensorType(F32, (R, 4))]
    types += [TensorType(F32, (R, 4, 4)), *rest_types]
    cross = fused.MhcExpandEnter(*numbers)
    assert_same_as_parts(cross, [*before, *rest], types, rows, alone=[0, 34])


@pytest.mark.parametrize(
    ("shape", "turned"),
    [
        (Shape(BF16, heads=64, dim=64, window=16, ring=19, taken=16), 32),
        (Shape(F32, heads=3, dim=32, window=5, ring=9), 20),
    ],
    ids=["two-groups", "odd-f32"],
)
def test_rope_attention_of_both_phases(shape, turned):
    world = World(shape, tokens=80, seed=7)
    slots, positions, starts = [4, 4, 4, 2], [50, 51, 52, 3], [0, 0, 0, 3]
    q, (angles, angle_type) = world.queries(4), angles_of(4, turned)
    chosen = world.selection(slots, positions)
    tables = [world.pages, world.table, chosen] if shape.taken else []
    kv = torch.stack([world.keys[s, p] for s, p in zip(slots, positions, strict=True)])
    common = [ints(*slots), ints(*positions), world.sink]
    numbers = (shape.window, shape.dim**-0.5, shape.ratio if shape.taken else 0)
    cases = (
        (fused.RopeAttention, {4: 53, 2: 4}, []),
        (fused.ChunkRopeAttention, {4: 50, 2: 3}, [ints(*starts), kv]),
    )
    results = []
    for kind, until, own in cases:
        op, types = kind(*numbers), [*shape.types(chunk=bool(own)), angle_type]
        operands = [q, world.ring(until), *common, *own, *tables, angles]
        (whole,) = run_kernel(op, operands, types, rows=4)
        assert same_bits(whole, in_parts(op, operands, types, rows=4)[0])
        assert same_bits(whole, run_kernel(op, operands, types, rows=4, splits=3)[0])
        results.append(whole)
    assert same_bits(*results)
