"""Rows that sample, and the sampler: one row per work item, probabilities in float64."""

from __future__ import annotations

from dataclasses import dataclass

from deepinfer_targets.cpu.rules.base import element, kernel

from deepinfer_compile.format.plan import Extent
from deepinfer_compile.ir import ops
from deepinfer_compile.ir.graph import Node
from deepinfer_compile.ir.types import DType
from deepinfer_compile.target import KernelPlan, KernelRule, Machine, RowClass

# Tokens between two kept cumulative sums: 127 sums for the real vocabulary.
_STRIDE = 1024
# Masses of tokens are at most 2^44 each, and their sum has 64 bits.
_MOST_TOKENS = 2**20 - 1


@dataclass(frozen=True)
class SelectRowsArgs:
    channels: int
    element: str

    @classmethod
    def example(cls) -> SelectRowsArgs:
        return cls(channels=64, element="bf16")


class SelectRowsRule(KernelRule):
    op = ops.SelectRows

    def refuses(self, node: Node, machine: Machine) -> str | None:
        x = node.inputs[0].type
        if x.dtype not in (DType.F32, DType.BF16):
            return f"rows are {x.dtype.value}, need f32 or bf16"
        return None

    def plan(self, node: Node, machine: Machine, rows: RowClass) -> KernelPlan:
        x = node.inputs[0].type
        return kernel(
            node,
            dtypes=(x.dtype,),
            dims=f"n{x.channels}",
            args=SelectRowsArgs(x.channels, element(x)),
            items=Extent(per_row=1),
            computes="y = x[index]",
        )


@dataclass(frozen=True)
class SampleArgs:
    vocab: int
    words: int
    stride: int
    strides: int
    listed: int
    biases: int

    @classmethod
    def example(cls) -> SampleArgs:
        return cls(vocab=2000, words=63, stride=1024, strides=2, listed=1000, biases=300)


class SampleRule(KernelRule):
    op = ops.Sample

    def refuses(self, node: Node, machine: Machine) -> str | None:
        logits = node.inputs[0].type
        if logits.dtype is not DType.F32:
            return f"logits are {logits.dtype.value}, need f32"
        if logits.channels > _MOST_TOKENS:
            return (
                f"the vocabulary has {logits.channels} tokens, at most {_MOST_TOKENS} can be summed"
            )
        return None

    def plan(self, node: Node, machine: Machine, rows: RowClass) -> KernelPlan:
        assert isinstance(node.op, ops.Sample)
        logits = node.inputs[0].type
        vocab = logits.channels
        return kernel(
            node,
            dtypes=(logits.dtype,),
            dims=f"v{vocab}_l{node.op.listed}",
            args=SampleArgs(
                vocab=vocab,
                words=ops.mask_words(vocab),
                stride=_STRIDE,
                strides=-(-vocab // _STRIDE),
                listed=node.op.listed,
                biases=node.inputs[2].type.channels,
            ),
            items=Extent(per_row=1),
            computes="token = first j with cumsum(softmax(kept logits / temperature))[j] > u",
        )


RULES: tuple[KernelRule, ...] = (SelectRowsRule(), SampleRule())
