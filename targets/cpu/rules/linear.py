"""Matrix products: dense, grouped and per expert.

A work item is a tile of outputs for all rows, so that weights are decoded once for all of them;
`common/tile.h` multiplies, in one of two ways: a few rows take decoded weights from registers, more
take them from a buffer. K is never split over items: an output's bits depend on its own row.
"""

from __future__ import annotations

from dataclasses import dataclass

from deepinfer_targets.cpu.rules.base import element, kernel

from deepinfer_compile.format.plan import Extent
from deepinfer_compile.ir import fused, ops
from deepinfer_compile.ir.graph import Node, Value
from deepinfer_compile.ir.types import DType, TensorType
from deepinfer_compile.target import KernelPlan, KernelRule, Machine, RowClass

FLOATS = (DType.F32, DType.BF16)
_BLOCK = 32  # channels that share a scale; e4m3 weights also share it over so many outputs
_MOST_INPUTS = 32768  # a tile's decoded operands stay on the stack
_TILES = (32, 16, 8, 4)
FEW_ROWS = 4  # as `FEW` in common/tile.h


def inputs_refusal(weight: TensorType) -> str | None:
    if weight.channels % _BLOCK:
        return f"{weight.channels} input channels, needs a multiple of {_BLOCK}"
    if weight.channels > _MOST_INPUTS:
        return f"{weight.channels} input channels, takes at most {_MOST_INPUTS}"
    return None


def rows_reader(x: TensorType) -> str:
    """The C++ type that reads rows of `x`."""
    return "Mxfp8Rows" if x.dtype is DType.MXFP8 else f"PlainRows<{element(x)}>"


def elements(x: TensorType, channels: int) -> int:
    """Steps of a pointer to `x` that `channels` take."""
    return x.dtype.row_bytes(channels) if x.dtype.is_record else channels


def multiply(rows: RowClass) -> str:
    """The product in `common/tile.h` for the row class."""
    return "multiply_few" if rows.most == FEW_ROWS else "multiply_many"


def class_suffix(rows: RowClass) -> str:
    """Of a kernel's dims: which rows it is for."""
    return f"_r{FEW_ROWS}" if rows.most == FEW_ROWS else ""


def _tile(outputs: int) -> int:
    """Wide tiles decode x less often, narrow ones leave work for every core."""
    if outputs > 2048:
        return 32
    return 16 if outputs > 256 else 8


@dataclass(frozen=True)
class LinearArgs:
    inputs: int
    outputs: int
    group_outputs: int
    tiles: int
    tile: int
    x_row: int
    x_group: int
    x: str
    x_rows: str
    y: str
    multiply: str

    @classmethod
    def example(cls) -> LinearArgs:
        return cls(
            inputs=64,
            outputs=96,
            group_outputs=96,
            tiles=12,
            tile=8,
            x_row=64,
            x_group=64,
            x="bf16",
            x_rows="PlainRows<bf16>",
            y="bf16",
            multiply="multiply_many",
        )


class _LinearRule(KernelRule):
    op = ops.Linear
    class_ends = (FEW_ROWS,)
    weight: DType
    inputs: tuple[DType, ...]

    def refuses(self, node: Node, machine: Machine) -> str | None:
        assert isinstance(node.op, ops.Linear)
        x, w = node.inputs[0].type, node.inputs[1].type
        if w.dtype is not self.weight:
            return f"weight is {w.dtype.value}, needs {self.weight.value}"
        if x.dtype not in self.inputs:
            names = ", ".join(d.value for d in self.inputs)
            return f"x is {x.dtype.value}, needs one of {names}"
        if x.dtype.is_record and x.channels != w.channels:
            return f"a record of x holds {x.channels} channels, the weight takes {w.channels}"
        if node.op.out not in FLOATS:
            return f"the result is {node.op.out.value}, needs f32 or bf16"
        return inputs_refusal(w) or self._group_refusal(_outputs(w), node.op.groups)

    def _group_refusal(self, outputs: int, groups: int) -> str | None:
        return None

    def _tile(self, outputs: int, groups: int) -> int:
        return _tile(outputs)

    def plan(self, node: Node, machine: Machine, rows: RowClass) -> KernelPlan:
        op = node.op
        assert isinstance(op, ops.Linear)
        x, w, y = node.inputs[0].type, node.inputs[1].type, node.outputs[0].type
        outputs = _outputs(w)
        tile = self._tile(outputs, op.groups)
        of_group = outputs // op.groups
        tiles = -(-of_group // tile)
        group = elements(x, w.channels)
        grouped = f"_g{op.groups}" if op.groups > 1 else ""
        return kernel(
            node,
            dtypes=(x.dtype, w.dtype, y.dtype),
            dims=f"n{outputs}_k{w.channels}{grouped}{class_suffix(rows)}",
            args=LinearArgs(
                inputs=w.channels,
                outputs=outputs,
                group_outputs=of_group,
                tiles=tiles,
                tile=tile,
                x_row=group * op.groups,
                x_group=group,
                x=element(x),
                x_rows=rows_reader(x),
                y=element(y),
                multiply=multiply(rows),
            ),
            items=Extent(constant=tiles * op.groups),
            computes="y = x w^T" + (f" in {op.groups} groups" if op.groups > 1 else ""),
            template=f"linear_{self.weight.value}",
        )


def _outputs(weight: TensorType) -> int:
    outputs = weight.shape[0]
    assert isinstance(outputs, int)
    return outputs


class LinearE4m3Rule(_LinearRule):
    """A tile lies in one row of the weight's 32x32 blocks."""

    weight = DType.E4M3
    inputs = (DType.MXFP8, *FLOATS)

    def _group_refusal(self, outputs: int, groups: int) -> str | None:
        if groups > 1 and outputs // groups % _TILES[-1]:
            return f"groups of {outputs // groups} outputs, need a multiple of {_TILES[-1]}"
        return None

    def _tile(self, outputs: int, groups: int) -> int:
        wanted = _tile(outputs)
        if groups == 1:
            return wanted
        return next(t for t in _TILES if t <= wanted and outputs // groups % t == 0)


class LinearBf16Rule(_LinearRule):
    weight = DType.BF16
    inputs = FLOATS


@dataclass(frozen=True)
class MatrixArgs:
    """One of the matrices that share an x."""

    outputs: int
    tile: int
    tiles: int


@dataclass(frozen=True)
class LinearPairArgs:
    inputs: int
    first: MatrixArgs
    second: MatrixArgs
    x_row: int
    x: str
    x_rows: str
    y: str
    multiply: str

    @classmethod
    def example(cls) -> LinearPairArgs:
        return cls(
            inputs=64,
            first=MatrixArgs(outputs=96, tile=8, tiles=12),
            second=MatrixArgs(outputs=512, tile=16, tiles=32),
            x_row=66,
            x="uint8_t",
            x_rows="Mxfp8Rows",
            y="bf16",
            multiply="multiply_many",
        )


class LinearPairRule(KernelRule):
    """Two matrices in one launch: a narrow one alone leaves cores idle."""

    op = fused.LinearPair
    class_ends = (FEW_ROWS,)

    def refuses(self, node: Node, machine: Machine) -> str | None:
        parts = (Node(part, xs, ()) for part, xs in _of_pair(node))
        reasons = (LinearE4m3Rule().refuses(part, machine) for part in parts)
        return next((why for why in reasons if why), None)

    def plan(self, node: Node, machine: Machine, rows: RowClass) -> KernelPlan:
        op = node.op
        assert isinstance(op, fused.LinearPair)
        x, w, y = node.inputs[0].type, node.inputs[1].type, node.outputs[0].type
        first, second = (_matrix(xs[1].type) for _, xs in _of_pair(node))
        return kernel(
            node,
            dtypes=(x.dtype, w.dtype, y.dtype),
            dims=f"n{first.outputs}_{second.outputs}_k{w.channels}{class_suffix(rows)}",
            args=LinearPairArgs(
                inputs=w.channels,
                first=first,
                second=second,
                x_row=elements(x, w.channels),
                x=element(x),
                x_rows=rows_reader(x),
                y=element(y),
                multiply=multiply(rows),
            ),
            items=Extent(constant=first.tiles + second.tiles),
            computes="y0 = x w0^T; y1 = x w1^T",
        )


def _of_pair(node: Node) -> tuple[tuple[ops.Linear, tuple[Value, ...]], ...]:
    """Both products with their operands."""
    assert isinstance(node.op, fused.LinearPair)
    x, *weights = node.inputs
    half = len(weights) // 2
    first, second = node.op.products()
    return (first, (x, *weights[:half])), (second, (x, *weights[half:]))


def _matrix(weight: TensorType) -> MatrixArgs:
    outputs = _outputs(weight)
    tile = _tile(outputs)
    return MatrixArgs(outputs, tile, -(-outputs // tile))


@dataclass(frozen=True)
class ExpertLinearArgs:
    experts: int
    taken: int
    inputs: int
    outputs: int
    tile: int
    x_row: int
    sharing: int
    x: str
    x_rows: str
    y: str

    @classmethod
    def example(cls) -> ExpertLinearArgs:
        return cls(
            experts=8,
            taken=2,
            inputs=64,
            outputs=64,
            tile=8,
            x_row=66,
            sharing=2,
            x="uint8_t",
            x_rows="Mxfp8Rows",
            y="bf16",
        )


class ExpertLinearRule(KernelRule):
    op = ops.ExpertLinear

    def refuses(self, node: Node, machine: Machine) -> str | None:
        assert isinstance(node.op, ops.ExpertLinear)
        x, _, w, _ = (v.type for v in node.inputs)
        if w.dtype is not DType.E2M1:
            return f"experts are {w.dtype.value}, need e2m1"
        if x.dtype not in (DType.MXFP8, *FLOATS):
            return f"x is {x.dtype.value}, needs one of mxfp8, f32, bf16"
        if node.op.out not in FLOATS:
            return f"the result is {node.op.out.value}, needs f32 or bf16"
        return inputs_refusal(w)

    def plan(self, node: Node, machine: Machine, rows: RowClass) -> KernelPlan:
        x, expert, w, _ = (v.type for v in node.inputs)
        y = node.outputs[0].type
        experts = w.shape[0]
        assert isinstance(experts, int)
        outputs, inputs = w.inner
        taken = expert.channels
        sharing = taken if len(x.inner) == 1 else 1
        tile = _tile(outputs)
        shared = "" if sharing == taken else "_each"
        return kernel(
            node,
            dtypes=(x.dtype, w.dtype, y.dtype),
            dims=f"e{experts}_t{taken}_n{outputs}_k{inputs}{shared}",
            args=ExpertLinearArgs(
                experts=experts,
                taken=taken,
                inputs=inputs,
                outputs=outputs,
                tile=tile,
                x_row=elements(x, inputs),
                sharing=sharing,
                x=element(x),
                x_rows=rows_reader(x),
                y=element(y),
            ),
            items=Extent(constant=-(-outputs // tile) * experts),
            computes="y[i] = x w[expert[i]]^T",
        )


RULES: tuple[KernelRule, ...] = (
    LinearE4m3Rule(),
    LinearBf16Rule(),
    LinearPairRule(),
    ExpertLinearRule(),
)
