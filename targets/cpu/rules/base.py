"""What every CPU rule says the same way: C++ element types, literals, kernel names.

A kernel is `extern "C" void NAME(Range items, int32_t rows, operands..., results...)`: pointers in
the order of the node's inputs, then its outputs. A result that is the next version of a consumed
state has no parameter of its own: the state's pointer is written through.
"""

from __future__ import annotations

import numpy as np

from deepinfer_compile.format.plan import Extent
from deepinfer_compile.ir.graph import Node
from deepinfer_compile.ir.types import DType, TensorType
from deepinfer_compile.target import KernelName, KernelPlan, Reduction

_ELEMENT = {
    DType.F32: "float",
    DType.BF16: "bf16",
    DType.I32: "int32_t",
    DType.I64: "int64_t",
}
TARGET = "cpu"
LANES = 8
# Of every kernel here: whatever the rows, the work items and the threads, an output is one sum over
# its own row's operands (tests/runtime/test_exactness.py, tests/kernels).
OWN_ROW = Reduction("a row's own terms in one order, eight lanes then a tree", "fma")


def element(tensor: TensorType) -> str:
    """The C++ type a pointer to `tensor` has; codes, scales and records are bytes."""
    return _ELEMENT.get(tensor.dtype, "uint8_t")


def f32(value: float) -> str:
    """`value` rounded to fp32, as a C++ literal that reads back exactly."""
    text = repr(float(np.float32(value))) if value else "0.0"
    shortest = np.format_float_positional(np.float32(value), trim="0")
    return (shortest if 1e-4 <= abs(value) < 1e7 else text) + "f"


def kernel(
    node: Node,
    *,
    dtypes: tuple[DType, ...],
    dims: str,
    args: object,
    items: Extent,
    computes: str,
    template: str = "",
) -> KernelPlan:
    """A plan whose template is named like its operator unless `template` says otherwise."""
    names = [d.value for d in dtypes]
    distinct = [name for i, name in enumerate(names) if i == 0 or name != names[i - 1]]
    return KernelPlan(
        name=KernelName(node.op.name, "_".join(distinct), dims, TARGET),
        template=f"cpu/{template or node.op.name}.cpp.jinja",
        args=args,
        items=items,
        computes=computes,
        reduction=OWN_ROW,
    )


def lanes_refusal(channels: int, what: str) -> str | None:
    """Why a vector kernel cannot take `channels`: rows are read eight at a time."""
    if channels % LANES:
        return f"{what} has {channels} channels, needs a multiple of {LANES}"
    return None
