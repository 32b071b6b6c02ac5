"""Matrix products against the float64 reference, torch's own decoding and the golden vectors."""

import pytest
import torch
from safetensors.torch import load_file

from deepinfer_compile.ir import codecs, ops
from deepinfer_compile.ir.reference import evaluate
from deepinfer_compile.ir.types import DType, R, TensorType
from tests.golden_data import golden_root
from tests.kernels.checks import assert_rounds, assert_rows_stand_alone, same_bits
from tests.kernels.harness import plan_of, run_kernel

BF16, F32, E4M3, MXFP8 = DType.BF16, DType.F32, DType.E4M3, DType.MXFP8
STORED = {F32: torch.float32, BF16: torch.bfloat16}
# (x, w, out) as the policies combine them: the vendor's, then f32's.
COMBINATIONS = [
    (MXFP8, E4M3, BF16),  # most projections
    (BF16, E4M3, BF16),  # wo_a
    (BF16, DType.BF16, BF16),  # compressor, index weights
    (BF16, DType.BF16, F32),  # router, head
    (MXFP8, E4M3, F32),  # engram, whose table is stored so
    (F32, E4M3, F32),
    (F32, DType.BF16, F32),
]
EACH = pytest.mark.parametrize("of", COMBINATIONS, ids=lambda of: "-".join(d.value for d in of))


def rows_of(rows: int, *inner: int) -> torch.Tensor:
    """Gaussian rows; with room for them one of zeros, a small one, one with a huge channel."""
    x = torch.randn(rows, *inner)
    if rows > 4:
        x[0] = 0
        x[1] *= 1e-3
        x[3].flatten()[7] = 1000
    return x


def stored_x(x: torch.Tensor, dtype: DType) -> torch.Tensor:
    return codecs.encode_records(x, MXFP8) if dtype is MXFP8 else x.to(STORED[dtype])


def weights(dtype: DType, outputs: int, inputs: int) -> tuple[list[torch.Tensor], list[TensorType]]:
    """A matrix of about 1 / sqrt(inputs). Scales of neighbouring blocks differ by up to 2^6."""
    if dtype is DType.BF16:
        w = (torch.randn(outputs, inputs) * inputs**-0.5).bfloat16()
        return [w], [TensorType(dtype, (outputs, inputs))]
    blocks = (-(-outputs // 32), inputs // 32)
    codes = codecs.encode_e4m3(torch.randn(outputs, inputs).double() * 4)
    scale = torch.randint(115, 122, blocks, dtype=torch.uint8)
    types = [TensorType(E4M3, (outputs, inputs)), TensorType(DType.UE8M0, blocks)]
    return [codes, scale], types


def operands(of, rows: int, outputs: int, inputs: int, groups: int = 1):
    x_type, w_type, _ = of
    inner = (groups, inputs) if groups > 1 else (inputs,)
    matrix, types = weights(w_type, outputs, inputs)
    x = stored_x(rows_of(rows, *inner), x_type)
    return [x, *matrix], [TensorType(x_type, (R, *inner)), *types]


def blown_up(scale: torch.Tensor, rows: int) -> torch.Tensor:
    """Block scales as one number per element, by torch's float8 type."""
    reals = scale.view(torch.float8_e8m0fnu).double()
    return reals.repeat_interleave(32, 0)[:rows].repeat_interleave(32, 1)


def torch_product(x: torch.Tensor, w: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """x records times block-scaled w in float64, decoded by torch's float8 type."""
    inputs = w.shape[1]
    reals = x[:, :inputs].contiguous().view(torch.float8_e4m3fn).double()
    gains = x[:, inputs:].contiguous().view(torch.float8_e8m0fnu).double()
    matrix = w.view(torch.float8_e4m3fn).double() * blown_up(scale, len(w))
    return (reals * gains.repeat_interleave(32, 1)) @ matrix.T


def bare(tensor: torch.Tensor, type_: TensorType) -> torch.Tensor:
    """The operand without its signs."""
    match type_.dtype:
        case DType.E4M3:
            return tensor & 0x7F
        case DType.MXFP8:
            codes = tensor[:, : type_.channels] & 0x7F
            return torch.cat([codes, tensor[:, type_.channels :]], dim=1)
        case DType.UE8M0:
            return tensor
        case _:
            return tensor.abs()


def assert_sums(y, exact, xs, types, inputs: int) -> None:
    """Rounding of a running sum may lose what a random walk of a lane's additions makes likely,
    each of them at most the sum of all magnitudes."""
    (largest,) = evaluate(ops.Linear(F32), [*map(bare, xs, types)], types)
    eps = torch.finfo(y.dtype).eps
    bound = eps * exact.abs() + (inputs / 8) ** 0.5 * 2**-24 * largest.double()
    assert (y.double() - exact).abs().le(bound).all()


@EACH
def test_linear_rounds_the_float64_sum_once(of):
    """A ragged tile at the end, and rows on both sides of every way rows are taken together."""
    torch.manual_seed(1)
    xs, types = operands(of, 101, outputs=43, inputs=96)
    op = ops.Linear(of[2])
    (y,) = run_kernel(op, xs, types, rows=101)
    (exact,) = evaluate(ops.Linear(F32), xs, types)
    if of[0] is MXFP8:
        exact = torch_product(*xs)
        assert torch.equal(evaluate(ops.Linear(F32), xs, types)[0], exact.float())
    assert_rounds(y, exact.double())
    assert (y[0] == 0).all()
    assert_rows_stand_alone(op, xs, types, 101, alone=[0, 1, 3, 100])
    for rows in (2, 3, 4, 5, 96, 97, 98):
        (fewer,) = run_kernel(op, [xs[0][:rows], *xs[1:]], types, rows=rows)
        assert same_bits(fewer, y[:rows]), f"{rows} rows differ from 101"


def test_linear_takes_fewer_outputs_than_a_vector():
    torch.manual_seed(2)
    xs, types = operands((BF16, DType.BF16, F32), 6, outputs=3, inputs=64)
    (y,) = run_kernel(ops.Linear(F32), xs, types, rows=6, splits=2)
    assert_rounds(y, evaluate(ops.Linear(F32), xs, types)[0].double())


def test_a_group_feeds_its_own_outputs():
    """A record of x for each group; outputs of a group that are no whole 32x32 blocks."""
    torch.manual_seed(3)
    xs, types = operands((MXFP8, E4M3, BF16), 7, outputs=2 * 48, inputs=64, groups=2)
    op = ops.Linear(BF16, groups=2)
    (y,) = run_kernel(op, xs, types, rows=7)
    assert_rounds(y, evaluate(ops.Linear(F32, groups=2), xs, types)[0].double())
    assert_rows_stand_alone(op, xs, types, 7, alone=[0, 6])


def test_the_largest_group_of_the_released_model():
    """wo_a: eight heads of 512; here two of its eight groups, a quarter of their outputs."""
    torch.manual_seed(4)
    xs, types = operands((BF16, E4M3, BF16), 5, outputs=2 * 256, inputs=4096, groups=2)
    xs[0], types[0] = xs[0].reshape(5, 16, 512), TensorType(BF16, (R, 16, 512))
    op = ops.Linear(BF16, groups=2)
    (y,) = run_kernel(op, xs, types, rows=5)
    assert_rounds(y, evaluate(ops.Linear(F32, groups=2), xs, types)[0].double())
    assert_rows_stand_alone(op, xs, types, 5, alone=[4])


@pytest.mark.parametrize(
    ("of", "outputs", "heads"),
    [((MXFP8, E4M3, BF16), 512, 8), ((BF16, DType.BF16, F32), 384, 1)],
    ids=["wkv", "router"],
)
def test_the_hidden_size_of_the_released_model(of, outputs, heads):
    torch.manual_seed(5)
    xs, types = operands(of, 9, outputs, inputs=5120)
    op = ops.Linear(of[2], heads=heads)
    (y,) = run_kernel(op, xs, types, rows=9)
    (exact,) = evaluate(ops.Linear(F32, heads=heads), xs, types)
    assert y.shape == exact.shape
    assert_sums(y.flatten(1), exact.flatten(1).double(), xs, types, inputs=5120)
    (one,) = run_kernel(op, [xs[0][8:], *xs[1:]], types, rows=1)
    assert same_bits(one, y[8:])


@pytest.mark.parametrize("rows", [4, 96], ids=["few", "many"])
def test_every_e4m3_code_is_decoded_exactly(rows):
    """Rows of an identity read the matrix back; NaN codes do not occur in a checkpoint."""
    codes = torch.arange(43 * 96).reshape(43, 96) % 256
    codes = torch.where(codes % 128 == 127, 0, codes).to(torch.uint8)
    scale = torch.tensor([[1, 100, 127], [126, 0, 160]], dtype=torch.uint8)
    types = [TensorType(F32, (R, 96)), *weights(E4M3, 43, 96)[1]]
    matrix = codes.view(torch.float8_e4m3fn).double() * blown_up(scale, 43)
    for x in torch.eye(96).split(rows):
        (y,) = run_kernel(ops.Linear(F32), [x, codes, scale], types, rows=rows)
        assert torch.equal(y.double(), (x.double() @ matrix.T))


def test_linear_matches_the_golden_product():
    golden = load_file(golden_root() / "ops" / "quant_linear.safetensors")
    x = torch.cat([golden["x_fp8"].view(torch.uint8), golden["x_scale_ue8m0"]], dim=1)
    w, scale = golden["w_fp8"].view(torch.uint8), golden["w_fp8_scale_ue8m0"]
    outputs, inputs = w.shape
    types = [
        TensorType(MXFP8, (R, inputs)),
        TensorType(E4M3, (outputs, inputs)),
        TensorType(DType.UE8M0, tuple(scale.shape)),
    ]
    (y,) = run_kernel(ops.Linear(F32), [x, w, scale], types, rows=len(x))
    expect = golden["y_fp8_f32"].double()
    assert (y.double() - expect).norm() <= 1e-6 * expect.norm()


def test_work_is_shared_by_tiles_of_outputs():
    """The released model's matrices, narrow ones too, leave something for each of 16 cores."""
    for outputs, inputs in ((512, 5120), (32768, 1280), (384, 5120)):
        types = [TensorType(BF16, (R, inputs)), TensorType(BF16, (outputs, inputs))]
        assert plan_of(ops.Linear(F32), types).items.at(1) >= 16
