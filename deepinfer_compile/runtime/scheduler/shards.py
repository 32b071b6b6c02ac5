"""A mapping as a value: a changed copy costs its changes, not its size.

Entries lie in a fixed number of dictionaries by the number of their key; a change copies those it
touches. A pool may keep half a million pages, and a dictionary of that size takes longer to copy
than a step.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

_SHARDS = 1024

K = TypeVar("K", int, bytes)
V = TypeVar("V")


@dataclass(frozen=True)
class Shards(Generic[K, V]):
    """Keys are numbers, or digests: bytes whose last two are as good as random."""

    shards: tuple[Mapping[K, V], ...] = ({},) * _SHARDS
    count: int = 0

    def __len__(self) -> int:
        return self.count

    def __contains__(self, key: K) -> bool:
        return key in self.shards[_shard(key)]

    def __getitem__(self, key: K) -> V:
        return self.shards[_shard(key)][key]

    def items(self) -> Iterator[tuple[K, V]]:
        """In no order that means anything."""
        for shard in self.shards:
            yield from shard.items()

    def changed(self, new: Iterable[tuple[K, V]], gone: Iterable[K] = ()) -> Shards[K, V]:
        """With these entries, which replace those of the same keys, and without others, which are
        here."""
        touched: dict[int, dict[K, V]] = {}

        def shard(key: K) -> dict[K, V]:
            place = _shard(key)
            if place not in touched:
                touched[place] = dict(self.shards[place])
            return touched[place]

        count = self.count
        for key, value in new:
            held = shard(key)
            count += key not in held
            held[key] = value
        for key in gone:
            del shard(key)[key]
            count -= 1
        shards = list(self.shards)
        for place, entries in touched.items():
            shards[place] = entries
        return Shards(tuple(shards), count)


def _shard(key: int | bytes) -> int:
    number = key if isinstance(key, int) else int.from_bytes(key[-2:], "little")
    return number % _SHARDS
