"""Numbers that are free, as a value: first in, first out, at a cost that is not theirs in all."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from deepinfer_compile.runtime.scheduler.shards import Shards


@dataclass(frozen=True)
class FreeList:
    """The numbers at places `first` to `end`."""

    places: Shards[int, int]
    first: int
    end: int

    @classmethod
    def of(cls, numbers: Iterable[int]) -> FreeList:
        return cls(Shards(), 0, 0).with_back(tuple(numbers))

    def __len__(self) -> int:
        return self.end - self.first

    def __iter__(self) -> Iterator[int]:
        return (self.places[place] for place in range(self.first, self.end))

    def with_back(self, numbers: Sequence[int]) -> FreeList:
        """With more, behind those that are there."""
        if not numbers:
            return self
        places = self.places.changed(enumerate(numbers, self.end))
        return FreeList(places, self.first, self.end + len(numbers))

    def without(self, count: int) -> tuple[FreeList, tuple[int, ...]]:
        """Without the first so many, or all; and these."""
        last = min(self.first + count, self.end)
        if last == self.first:
            return self, ()
        gone = range(self.first, last)
        numbers = tuple(self.places[place] for place in gone)
        return FreeList(self.places.changed((), gone), last, self.end), numbers
