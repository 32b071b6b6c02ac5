"""What a target provides: a machine, ordered kernel rules, a toolchain, a driver.

The compiler knows targets only through these types and finds them by entry point
(`deepinfer_compile.targets`). Rules are ordered: the first that does not refuse a node wins, and
the refusals before it are kept.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from deepinfer_compile.format.plan import Extent
from deepinfer_compile.format.roofline import Machine as Machine  # a target imports it from here
from deepinfer_compile.ir.graph import Node
from deepinfer_compile.ir.ops import Op

_NAME = re.compile(
    r"(?P<op>[a-z0-9_]+?)__(?P<dtypes>[a-z0-9_]+?)__(?P<dims>[a-z0-9_]+?)__(?P<target>[a-z0-9]+)"
)


@dataclass(frozen=True, order=True)
class KernelName:
    """`op__dtypes__dims__target`: the file, the symbol in a profile and the key in plan.json."""

    op: str
    dtypes: str
    dims: str
    target: str

    def __str__(self) -> str:
        return f"{self.op}__{self.dtypes}__{self.dims}__{self.target}"

    @classmethod
    def parse(cls, text: str) -> KernelName:
        """The inverse of `str`; ValueError when `text` is no kernel name."""
        match = _NAME.fullmatch(text)
        if match is None:
            raise ValueError(f"not a kernel name: {text!r}")
        return cls(**match.groupdict())


@dataclass(frozen=True)
class RowClass:
    """Steps of `least` to `most` rows; `most` is None where only the phase ends them."""

    least: int = 1
    most: int | None = None

    def __str__(self) -> str:
        if self.most is None:
            return "any number of rows" if self.least == 1 else f"{self.least} rows and more"
        return f"{self.least} to {self.most} rows"


class Varies(StrEnum):
    """What the order of a kernel's sums may depend on besides the row itself."""

    ROWS = "the number of rows"
    NEIGHBOURS = "rows of other requests"
    CONTEXT = "a split of the context"


@dataclass(frozen=True)
class Reduction:
    """How a kernel adds up each of its outputs. `parts`: into how many the summed dimension is
    split over work items; `promotion`: after how many products partial sums move to wider ones, 0
    for never."""

    order: str
    instruction: str
    parts: int = 1
    promotion: int = 0
    varies: tuple[Varies, ...] = ()

    def __str__(self) -> str:
        split = "" if self.parts == 1 else f", {self.parts} parts"
        wider = "" if not self.promotion else f", wider after {self.promotion}"
        return f"{self.order} ({self.instruction}{split}{wider})"


MOST_CLASSES = 5  # kernels that one operator may cost


@dataclass(frozen=True)
class KernelPlan:
    """One kernel: all its template may see is `args` (a frozen dataclass) and the name.

    `items` is how many independent work items this launch has; any split of them over threads gives
    the same bits. Launches of one kernel may differ in it. `computes` is the kernel's formula.
    """

    name: KernelName
    template: str
    args: object
    items: Extent = field(compare=False)
    computes: str
    reduction: Reduction


class KernelRule(ABC):
    """How one operator becomes a kernel on one target, or one for each of several row classes.

    `class_ends`: the most rows of every class but the last, ascending. Kernels of all classes write
    the same bits.
    """

    op: type[Op]
    class_ends: tuple[int, ...] = ()

    def refuses(self, node: Node, machine: Machine) -> str | None:
        """Why this rule cannot serve `node`, in the user's words; None when it can."""
        return None

    @abstractmethod
    def plan(self, node: Node, machine: Machine, rows: RowClass) -> KernelPlan:
        """The kernel for `node` in one of the rule's row classes. Plans that share a name share the
        kernel."""

    def row_classes(self, max_rows: int) -> tuple[RowClass, ...]:
        """Those of this rule that a phase of at most `max_rows` rows needs, ascending."""
        assert len(self.class_ends) < MOST_CLASSES, type(self).__name__
        begins = (1, *(end + 1 for end in self.class_ends))
        classes = map(RowClass, begins, (*self.class_ends, None))
        return tuple(rows for rows in classes if rows.least <= max_rows)


@dataclass(frozen=True)
class Binary:
    """One built file of an engine, by its path in the folder."""

    path: str
    content: bytes


@dataclass(frozen=True)
class Isa:
    """An instruction set: its `--isa` name and the features a device must have to run its code."""

    name: str
    features: tuple[str, ...]


@dataclass(frozen=True)
class Toolchain(ABC):
    """Builds generated sources. Raises CompileError (E3xx) when a tool is missing or fails.

    `cxx` is the C++ compiler of this host: a name or path, and perhaps options.
    """

    cxx: str = "g++"

    @abstractmethod
    def versions(self) -> Mapping[str, str]:
        """Tools whose version can change the bytes built."""

    @abstractmethod
    def build(
        self, sources: Mapping[str, str], isas: Sequence[Isa], progress: Callable[[str], None]
    ) -> tuple[Binary, ...]:
        """Compile `sources` (path in the engine folder -> text): a library for each of `isas`.

        The first's features are a subset of every other's. `progress` hears of each source.
        """

    @abstractmethod
    def native(self) -> Isa:
        """The instruction set of this machine; CompileError when the target cannot serve it."""


@dataclass(frozen=True)
class Target:
    """`isas`: what an engine holds a library for unless `--isa` names one, the least first.

    `accelerators`: what DEEPINFER_ACCELERATOR may say for this target.
    """

    name: str
    machine: Machine
    rules: tuple[KernelRule, ...]
    toolchain: Toolchain
    driver: str
    language: str
    isas: tuple[Isa, ...]
    support: Mapping[str, str]
    templates: Path
    accelerators: tuple[str, ...] = ()

    def choose(self, node: Node) -> tuple[KernelRule | None, tuple[str, ...]]:
        """The first rule that takes `node`, if one does, and why those before it refused."""
        refusals: list[str] = []
        for rule in self.rules:
            if rule.op is not type(node.op):
                continue
            why = rule.refuses(node, self.machine)
            if why is None:
                return rule, tuple(refusals)
            refusals.append(f"{type(rule).__name__}: {why}")
        return None, tuple(refusals)
