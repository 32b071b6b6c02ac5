"""The arena: values of one step share bytes when their lives do not meet.

A value lives from the step that writes it to the last step that reads it, both included, so a
kernel never overwrites what it reads. Placement is first fit by birth, then by size: the same
graph always gets the same offsets.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

ALIGNMENT = 64


@dataclass(frozen=True)
class Life:
    """`bytes` needed from step `first` to step `last`."""

    name: str
    bytes: int
    first: int
    last: int

    def meets(self, other: Life) -> bool:
        return self.first <= other.last and other.first <= self.last


def align(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def place(lives: Sequence[Life]) -> tuple[dict[str, int], int]:
    """Offsets by name and the arena's size, both multiples of `ALIGNMENT`."""
    offsets: dict[str, int] = {}
    placed: list[tuple[int, Life]] = []
    total = 0
    for life in sorted(lives, key=lambda v: (v.first, -v.bytes, v.name)):
        busy = sorted((start, start + align(v.bytes)) for start, v in placed if v.meets(life))
        offset = 0
        for start, end in busy:
            if start - offset >= align(life.bytes):
                break
            offset = max(offset, end)
        offsets[life.name] = offset
        placed = [(start, v) for start, v in placed if v.last >= life.first]
        placed.append((offset, life))
        total = max(total, offset + align(life.bytes))
    return offsets, total
