"""What the engine is to run: rows of requests, and what is done to slots and page tables before."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from deepinfer_compile.runtime.scheduler.traffic import Emitted


class Kind(StrEnum):
    """The phase a step runs."""

    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True)
class Work:
    """Rows of one request in a step: `count` of its tokens from `position` on. `samples`: the last
    row is sampled from."""

    id: int
    slot: int
    position: int
    count: int
    samples: bool

    @property
    def known(self) -> int:
        """Tokens of the request after the step, if it samples."""
        return self.position + self.count + 1


@dataclass(frozen=True)
class Copy:
    """All that one slot holds, to another slot."""

    source: int
    target: int


@dataclass(frozen=True)
class Grown:
    """Pages that a slot's request gets: entries `first` and on of its page table. From 0 on: the
    request is new in the slot."""

    slot: int
    first: int
    pages: tuple[int, ...]


@dataclass(frozen=True)
class StepPlan:
    """`kind` None: nothing to run. `restored` before the rows run, `saved` after them."""

    kind: Kind | None
    work: tuple[Work, ...]
    grown: tuple[Grown, ...]
    restored: tuple[Copy, ...]
    saved: tuple[Copy, ...]
    ended: tuple[Emitted, ...]
