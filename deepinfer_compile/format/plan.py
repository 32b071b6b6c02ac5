"""`plan.json`: buffers, steps, state contract, weights. The compiler writes, the runtime obeys.

Sizes are bytes, offsets are from the start of a memory class, indices into `buffers` name what a
step reads and writes. Nothing here computes: every number was decided by the compiler.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class MemoryClass(StrEnum):
    """Where a buffer lives and for how long (design.md section 4)."""

    WEIGHTS = "weights"  # read-only, mapped or loaded once; each weight has its own base address
    STATE = "state"  # caches and rings, zeroed at load
    IO = "io"  # row arrays and tables the host writes, results it reads
    ARENA = "arena"  # values of one step, overlapping by liveness


class Lifetime(StrEnum):
    """How a state is addressed."""

    SLOT = "slot"
    PAGED = "paged"


@dataclass(frozen=True)
class Extent:
    """`per_row * rows + constant` work items."""

    per_row: int = 0
    constant: int = 0

    def at(self, rows: int) -> int:
        return self.per_row * rows + self.constant


@dataclass(frozen=True)
class Buffer:
    """`shape` has -1 where rows go; `bytes` is its size at the phase's largest row count."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    memory: MemoryClass
    offset: int
    bytes: int


@dataclass(frozen=True)
class Variant:
    """A kernel, the work items it gets, and the largest bucket it is for."""

    kernel: str
    items: Extent
    most_rows: int


@dataclass(frozen=True)
class Step:
    """One launch: a kernel over its buffers, in the order of the kernel's parameters.

    `variants` go up in `most_rows`, the last one's is the phase's; all give the same bits.
    """

    variants: tuple[Variant, ...]
    buffers: tuple[int, ...]

    def at(self, rows: int) -> Variant:
        """What a bucket of `rows` rows launches."""
        return next(variant for variant in self.variants if rows <= variant.most_rows)


@dataclass(frozen=True)
class Probe:
    """A named value: complete once `step` steps ran. Reading or replacing it there is safe."""

    name: str
    buffer: int
    step: int


@dataclass(frozen=True)
class Phase:
    """A static program. A step of R rows runs in the smallest bucket that holds it, which picks the
    variant of every launch. `buckets` ascend, and every variant ends at one."""

    name: str
    buckets: tuple[int, ...]
    steps: tuple[Step, ...]
    probes: tuple[Probe, ...]

    @property
    def max_rows(self) -> int:
        return self.buckets[-1]


@dataclass(frozen=True)
class RowArray:
    """An array the host fills before a step. `rows`: one entry per row (else a table)."""

    name: str
    buffer: int
    phases: tuple[str, ...]
    rows: bool
    meaning: str


@dataclass(frozen=True)
class StateField:
    """A row of the state contract (design.md section 5).

    SLOT: `bytes` per request, entry of position p at `p % length`. PAGED: `bytes` per page of
    `length` entries, entry j covering tokens j * ratio ... of the request.
    """

    name: str
    buffer: int
    lifetime: Lifetime
    owner: str
    bytes: int
    length: int
    ratio: int
    survives_prefix_hit: bool
    rollback: str
    crosses: bool


@dataclass(frozen=True)
class WeightRecipe:
    """Tensors that load the same way. `pattern` may hold `{l}` (one buffer per entry of `layers`)
    and `{e}` (the tensors of experts 0..experts-1 lie one after another in the buffer).

    A pattern that starts with `@` is a constant of the engine, in `weights/constants.safetensors`.
    `dtype` and `shape` are those of one checkpoint tensor.
    """

    pattern: str
    layers: tuple[int, ...]
    experts: int
    dtype: str
    shape: tuple[int, ...]
    buffers: tuple[int, ...]


@dataclass(frozen=True)
class Limits:
    """What the engine holds. Slot 0 and page 0 belong to padding and are never given out. The last
    `snapshots` of the slots keep what a request's slot held at the end of a prefix."""

    max_requests: int
    max_rows: int
    max_context: int
    page_size: int
    prefill_chunk: int
    slots: int
    snapshots: int
    pages: int
    vocab_size: int
    bos_token_id: int
    eos_token_id: int


@dataclass(frozen=True)
class Memory:
    """Bytes of each class, as allocated; `weights` as mapped or loaded."""

    weights: int
    state: int
    io: int
    arena: int


@dataclass(frozen=True)
class EnginePlan:
    """Everything the runtime needs to run the library beside it. `batch_invariant`: the compiler
    checked that a row's bits depend on the row alone."""

    target: str
    numerics: str
    batch_invariant: bool
    limits: Limits
    memory: Memory
    buffers: tuple[Buffer, ...]
    phases: tuple[Phase, ...]
    row_arrays: tuple[RowArray, ...]
    states: tuple[StateField, ...]
    weights: tuple[WeightRecipe, ...]
