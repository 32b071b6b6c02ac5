"""Stores into rings and pages: bytes move, nothing is computed.

Items are rows. Rows of different requests never share a slot or a page, so no two items write the
same place; only padding rows meet, in slot 0 and page 0, where nobody looks.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from deepinfer_targets.cpu.rules.base import element, kernel

from deepinfer_compile.format.plan import Extent
from deepinfer_compile.ir import ops
from deepinfer_compile.ir.graph import Node
from deepinfer_compile.ir.types import TensorType
from deepinfer_compile.target import KernelPlan, KernelRule, Machine, RowClass


def _elements(row: TensorType) -> int:
    """Elements of one row as its pointer counts them: bytes for records."""
    return row.bytes(1) if row.dtype.is_record else row.width


@dataclass(frozen=True)
class Part:
    """A row operand: `width` elements that lie at `offset` in an entry."""

    name: str
    width: int
    offset: int


@dataclass(frozen=True)
class RingStoreArgs:
    length: int
    entry: int
    parts: tuple[Part, ...]
    element: str

    @classmethod
    def example(cls) -> RingStoreArgs:
        parts = (Part("rows0", 64, 0), Part("rows1", 64, 64))
        return cls(length=2, entry=128, parts=parts, element="float")


class RingStoreRule(KernelRule):
    op = ops.RingStore

    def plan(self, node: Node, machine: Machine, rows: RowClass) -> KernelPlan:
        ring, _, _, *parts_of_row = (value.type for value in node.inputs)
        widths = [_elements(part) for part in parts_of_row]
        offsets = [0, *itertools.accumulate(widths)]
        parts = tuple(Part(f"rows{i}", w, offsets[i]) for i, w in enumerate(widths))
        length = ring.inner[0]
        return kernel(
            node,
            dtypes=(ring.dtype,),
            dims=f"l{length}_n{'_'.join(str(width) for width in widths)}",
            args=RingStoreArgs(length, offsets[-1], parts, element(ring)),
            items=Extent(per_row=1),
            computes=f"ring[slot, p % {length}] = row",
        )


@dataclass(frozen=True)
class PageStoreArgs:
    """`pages`: of a request, the columns of the page table."""

    pages: int
    entries: int
    width: int
    ratio: int
    element: str

    @classmethod
    def example(cls) -> PageStoreArgs:
        return cls(pages=16, entries=32, width=36, ratio=2, element="uint8_t")


class PageStoreRule(KernelRule):
    op = ops.PageStore

    def plan(self, node: Node, machine: Machine, rows: RowClass) -> KernelPlan:
        assert isinstance(node.op, ops.PageStore)
        pages, page_table, _, _, row = (value.type for value in node.inputs)
        entries, ratio = pages.inner[0], node.op.ratio
        args = PageStoreArgs(page_table.channels, entries, _elements(row), ratio, element(pages))
        return kernel(
            node,
            dtypes=(pages.dtype,),
            dims=f"n{row.channels}_p{page_table.channels}_e{entries}_r{ratio}",
            args=args,
            items=Extent(per_row=1),
            computes=f"entry p // {ratio} of the request = row, where it completes a group",
        )


RULES: tuple[KernelRule, ...] = (RingStoreRule(), PageStoreRule())
