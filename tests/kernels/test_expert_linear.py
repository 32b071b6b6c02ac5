"""Products with chosen experts against the float64 reference, by hand, and the golden vectors."""

import pytest
import torch
from safetensors.torch import load_file

from deepinfer_compile.ir import codecs, ops
from deepinfer_compile.ir.reference import evaluate
from deepinfer_compile.ir.types import DType, R, TensorType
from tests.golden_data import golden_root
from tests.kernels.checks import assert_rounds, assert_rows_stand_alone, same_bits
from tests.kernels.harness import run_kernel

BF16, F32, MXFP8 = DType.BF16, DType.F32, DType.MXFP8
E2M1_VALUES = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def types_of(x: DType, experts: int, taken: int, outputs: int, inputs: int, each: bool):
    inner = (taken, inputs) if each else (inputs,)
    return [
        TensorType(x, (R, *inner)),
        TensorType(DType.I32, (R, taken)),
        TensorType(DType.E2M1, (experts, outputs, inputs)),
        TensorType(DType.UE8M0, (experts, outputs, inputs // 32)),
    ]


def operands(
    x_type: DType, rows: int, experts: int, taken: int, outputs: int, inputs: int, each: bool
):
    """Distinct experts per row; scales that differ by up to 2^5 between the groups of a row."""
    types = types_of(x_type, experts, taken, outputs, inputs, each)
    x = torch.randn(rows, *types[0].inner)
    if rows > 4:
        x[0] = 0
        x[1] *= 1e-3
        x[3].flatten()[5] = 1000
    expert = torch.rand(rows, experts).argsort(1)[:, :taken].sort(1).values.to(torch.int32)
    w = torch.randint(0, 256, (experts, outputs, inputs // 2), dtype=torch.uint8)
    scale = torch.randint(117, 122, (experts, outputs, inputs // 32), dtype=torch.uint8)
    stored = x if x_type is F32 else codecs.encode_records(x, MXFP8)
    return [stored, expert, w, scale], types


def by_hand(x: torch.Tensor, expert: torch.Tensor, w: torch.Tensor, scale: torch.Tensor):
    """float64, for f32 rows; codes looked up in a table of the sixteen values."""
    pairs = torch.stack([w & 15, w >> 4], dim=-1).flatten(-2)
    gains = scale.view(torch.float8_e8m0fnu).double().repeat_interleave(32, -1)
    matrices = E2M1_VALUES.double()[pairs.long()] * gains
    rows = x.double() if x.dim() == 3 else x.double().unsqueeze(1).expand(-1, expert.shape[1], -1)
    return torch.einsum("rik,rink->rin", rows, matrices[expert.long()])


@pytest.mark.parametrize(
    ("x", "out", "each"),
    [(MXFP8, BF16, False), (MXFP8, BF16, True), (F32, F32, False), (F32, F32, True)],
    ids=["w1", "w2", "w1-f32", "w2-f32"],
)
def test_experts_round_the_float64_sum_once(x, out, each):
    """A ragged tile, 130 rows over six experts: more and fewer than are multiplied at once."""
    torch.manual_seed(1)
    xs, types = operands(x, 130, experts=6, taken=2, outputs=43, inputs=96, each=each)
    xs[1][20:] = torch.tensor([1, 4])
    op = ops.ExpertLinear(out)
    (y,) = run_kernel(op, xs, types, rows=130)
    (exact,) = evaluate(ops.ExpertLinear(F32), xs, types)
    if x is F32:
        assert torch.equal(by_hand(*xs).float(), exact)
    assert_rounds(y, exact.double())
    assert (y[0] == 0).all()
    assert_rows_stand_alone(op, xs, types, 130, alone=[0, 1, 3, 129])
    for rows in (2, 5, 24):
        fewer = run_kernel(op, [xs[0][:rows], xs[1][:rows], *xs[2:]], types, rows)
        assert same_bits(fewer[0], y[:rows])


def test_only_chosen_experts_are_read():
    """Expert 2 is NaN. A choice that is no expert leaves the others as they are."""
    torch.manual_seed(2)
    xs, types = operands(F32, 5, experts=6, taken=2, outputs=43, inputs=96, each=False)
    xs[1][:] = torch.tensor([[0, 1], [3, 4], [1, 5], [0, 5], [3, 5]])
    op = ops.ExpertLinear(F32)
    (clean,) = run_kernel(op, xs, types, rows=5)
    xs[3][2] = 255
    xs[1][3, 0], xs[1][1, 1] = -1, 6
    (y,) = run_kernel(op, xs, types, rows=5, splits=4)
    kept = torch.ones(5, 2, dtype=torch.bool)
    kept[3, 0] = kept[1, 1] = False
    assert same_bits(y[kept], clean[kept])


def test_more_rows_than_are_sorted_at_once():
    torch.manual_seed(3)
    xs, types = operands(F32, 2100, experts=6, taken=2, outputs=43, inputs=96, each=True)
    (y,) = run_kernel(ops.ExpertLinear(F32), xs, types, rows=2100)
    assert_rounds(y, by_hand(*xs))
    (split,) = run_kernel(ops.ExpertLinear(F32), xs, types, rows=2100, splits=7)
    assert same_bits(split, y)


@pytest.mark.parametrize("rows", [4, 64], ids=["few", "many"])
def test_every_e2m1_code_is_decoded_exactly(rows):
    """Rows of an identity read a matrix back that has every pair of codes."""
    types = types_of(F32, experts=6, taken=2, outputs=43, inputs=96, each=False)
    w = (torch.arange(6 * 43 * 48) % 256).to(torch.uint8).reshape(6, 43, 48)
    scale = torch.arange(6 * 43 * 3).to(torch.uint8).reshape(6, 43, 3) % 250
    expert = torch.tensor([[1, 5]], dtype=torch.int32).expand(rows, 2)
    for x in torch.eye(96).split(rows):
        (y,) = run_kernel(
            ops.ExpertLinear(F32), [x, expert[: len(x)], w, scale], types, rows=len(x)
        )
        assert torch.equal(y.double(), by_hand(x, expert[: len(x)], w, scale))


@pytest.mark.parametrize("each", [False, True], ids=["w1", "w2"])
def test_experts_of_the_released_size(each):
    """Three of 384 experts: 5120 to 2304 and back."""
    torch.manual_seed(4)
    outputs, inputs = (5120, 2304) if each else (2304, 5120)
    xs, types = operands(MXFP8, 3, 3, 2, outputs, inputs, each)
    xs[1][:] = torch.tensor([[0, 2], [0, 1], [0, 2]])
    (y,) = run_kernel(ops.ExpertLinear(BF16), xs, types, rows=3)
    assert_rounds(y, evaluate(ops.ExpertLinear(F32), xs, types)[0].double())


def test_experts_match_the_golden_product():
    golden = load_file(golden_root() / "ops" / "quant_linear.safetensors")
    x = torch.cat([golden["x_fp8"].view(torch.uint8), golden["x_scale_ue8m0"]], dim=1)
    w, scale = golden["w_fp4_packed"], golden["w_fp4_scale_ue8m0"]
    outputs, inputs = len(w), 2 * w.shape[1]
    types = types_of(MXFP8, experts=1, taken=1, outputs=outputs, inputs=inputs, each=False)
    expert = torch.zeros(len(x), 1, dtype=torch.int32)
    (y,) = run_kernel(
        ops.ExpertLinear(F32), [x, expert, w.unsqueeze(0), scale.unsqueeze(0)], types, rows=len(x)
    )
    expect = golden["y_fp4_f32"].double()
    assert (y[:, 0].double() - expect).norm() <= 1e-6 * expect.norm()
