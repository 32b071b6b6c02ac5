"""Shorthand for tests that evaluate operators: operands are pairs of a tensor and its type."""

from __future__ import annotations

import torch
from safetensors.torch import load_file
from torch import Tensor

from deepinfer_compile.ir.graph import Graph
from deepinfer_compile.ir.ops import Op
from deepinfer_compile.ir.reference import evaluate
from deepinfer_compile.ir.reference.operand import stored_dtype, stored_shape
from deepinfer_compile.ir.text import parse_type
from tests.golden_data import golden_root


def given(op: Op, *operands: tuple[Tensor, str]) -> tuple[Tensor, ...]:
    """`evaluate`, with types as text; also checks that results are stored as their types say."""
    types = [parse_type(text) for _, text in operands]
    inputs = [tensor for tensor, _ in operands]
    before = [tensor.clone() for tensor in inputs]
    results = evaluate(op, inputs, types)
    by_rows = [t for t, type in zip(inputs, types, strict=True) if type.by_rows]
    for result, type in zip(results, op.infer(tuple(types)), strict=True):
        assert tuple(result.shape) == stored_shape(type, len(by_rows[0]))
        assert result.dtype is stored_dtype(type.dtype)
    for tensor, old in zip(inputs, before, strict=True):
        assert bytes_of(tensor) == bytes_of(old), "an operand was changed"
    return results


def one(op: Op, *operands: tuple[Tensor, str]) -> Tensor:
    """`given` of an operator with a single result."""
    (result,) = given(op, *operands)
    return result


def zero_feeds(graph: Graph, rows: int) -> dict[str, Tensor]:
    """Every input of the graph as padding rows have it; for the sampler: greedy, no lists."""
    return {
        value.name: torch.zeros(
            stored_shape(value.type, rows), dtype=stored_dtype(value.type.dtype)
        )
        for value in graph.inputs
    }


def bytes_of(tensor: Tensor) -> bytes:
    return bytes(tensor.contiguous().flatten().view(torch.uint8).numpy())


def golden_op(name: str) -> dict[str, Tensor]:
    """The tensors of one golden operator file."""
    return load_file(golden_root() / "ops" / f"{name}.safetensors")
