"""Run one generated CPU kernel on tensors: plan, render, build with g++, call through ctypes."""

from __future__ import annotations

import ctypes
import functools
import itertools
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from deepinfer_targets.cpu import TARGET
from deepinfer_targets.cpu.isas import X86_64_V3
from deepinfer_targets.cpu.toolchain import Gxx

from deepinfer_compile.emit.render import environment
from deepinfer_compile.ir.graph import Node, Value
from deepinfer_compile.ir.ops import Op
from deepinfer_compile.ir.types import DType, R, TensorType
from deepinfer_compile.target import Isa, KernelPlan

STRICT = Gxx(warnings=("-Wall", "-Wextra", "-Werror"))
Build = tuple[Gxx, Isa]


class Range(ctypes.Structure):
    _fields_ = [("begin", ctypes.c_int64), ("end", ctypes.c_int64)]


_STORAGE = {
    DType.F32: torch.float32,
    DType.BF16: torch.bfloat16,
    DType.I32: torch.int32,
    DType.I64: torch.int64,
}


def node_of(op: Op, types: Sequence[TensorType]) -> Node:
    inputs = tuple(Value(f"in{i}", t) for i, t in enumerate(types))
    outputs = tuple(Value(f"out{i}", t) for i, t in enumerate(op.infer(tuple(types))))
    return Node(op, inputs, outputs)


def plan_of(op: Op, types: Sequence[TensorType], rows: int = 1) -> KernelPlan:
    """The plan of the row class that `rows` rows belong to."""
    node = node_of(op, types)
    rule = next(
        r for r in TARGET.rules if r.op is type(op) and r.refuses(node, TARGET.machine) is None
    )
    return rule.plan(node, TARGET.machine, rule.row_classes(rows)[-1])


def render(plan: KernelPlan) -> str:
    template = environment(TARGET.templates).get_template(plan.template)
    return template.render(k=plan.args, symbol=str(plan.name), header=["test kernel"])


@functools.cache
def library_of(source: str, build: Build = (STRICT, X86_64_V3)) -> ctypes.CDLL:
    templates = environment(TARGET.templates)
    sources = {
        f"kernels/{name}": templates.get_template(template).render()
        for name, template in TARGET.support.items()
    }
    sources["kernels/kernel.cpp"] = source
    compiler, isa = build
    (binary,) = compiler.build(sources, (isa,), lambda _: None)
    with tempfile.NamedTemporaryFile(suffix=".so", delete=False) as file:
        file.write(binary.content)
    library = ctypes.CDLL(file.name)
    Path(file.name).unlink()
    return library


def storage(type_: TensorType, rows: int) -> torch.Tensor:
    """A zeroed tensor that holds `type_`: codes and records as bytes in the last dim."""
    lead = rows if type_.shape[0] is R else int(type_.shape[0])
    if type_.dtype in _STORAGE:
        return torch.zeros((lead, *type_.inner), dtype=_STORAGE[type_.dtype])
    return torch.zeros(
        (lead, *type_.inner[:-1], type_.dtype.row_bytes(type_.channels)), dtype=torch.uint8
    )


def run_kernel(
    op: Op,
    tensors: Sequence[torch.Tensor],
    types: Sequence[TensorType],
    rows: int,
    splits: int = 1,
    build: Build = (STRICT, X86_64_V3),
) -> tuple[torch.Tensor, ...]:
    """The op's results for `tensors`. States are copied, never written in place.

    `splits` cuts the work items into that many ranges, run one after another in reverse order.
    """
    node, plan = node_of(op, types), plan_of(op, types, rows)
    function = getattr(library_of(render(plan), build), str(plan.name))
    inputs = [
        t.clone().contiguous() if i in op.consumes else t.contiguous()
        for i, t in enumerate(tensors)
    ]
    fresh = [storage(v.type, rows) for v in node.outputs[len(op.consumes) :]]
    pointers = [ctypes.c_void_p(t.data_ptr()) for t in (*inputs, *fresh)]
    items = plan.items.at(rows)
    cuts = [items * i // splits for i in range(splits + 1)]
    for begin, end in reversed(list(itertools.pairwise(cuts))):
        function(Range(begin, end), ctypes.c_int32(rows), *pointers)
    return (*(inputs[i] for i in op.consumes), *fresh)
