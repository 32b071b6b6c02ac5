"""The meaning of every operator: float64 on stored inputs, rounded once to the result's type.

This is the definition the kernels answer to. Where an operator documents an inner rounding, that
rounding is made; nothing else is. A fused operator means its parts, one after another. `operand`
says how each element type is stored.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from deepinfer_compile.ir.fused import Fused
from deepinfer_compile.ir.ops import Op
from deepinfer_compile.ir.reference import attention, dense, engram, sample, selection, state
from deepinfer_compile.ir.reference.operand import Operand
from deepinfer_compile.ir.types import TensorType

_FAMILIES = (
    dense.evaluate,
    state.evaluate,
    attention.evaluate,
    selection.evaluate,
    engram.evaluate,
    sample.evaluate,
)


def evaluate(
    op: Op, inputs: Sequence[Tensor], input_types: Sequence[TensorType]
) -> tuple[Tensor, ...]:
    """Results of `op`, stored as their types say. Inputs are not changed."""
    operands = tuple(map(Operand, inputs, input_types))
    if isinstance(op, Fused):
        return tuple(result.stored for result in op.compose(_part, operands))
    out = op.infer(tuple(input_types))
    for family in _FAMILIES:
        results = family(op, operands, out)
        if results is not None:
            return results
    raise AssertionError(f"`{op.name}` has no meaning yet")


def _part(op: Op, *operands: Operand) -> tuple[Operand, ...]:
    types = tuple(operand.type for operand in operands)
    results = evaluate(op, [operand.stored for operand in operands], types)
    return tuple(map(Operand, results, op.infer(types)))
