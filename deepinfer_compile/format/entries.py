"""How many entries of a state a row works on, which depends on its position.

With one entry for each `ratio` tokens, a row at position p sees v = (p + 1) // ratio of them. It
works on `most` at most: on the whole blocks that it chose and on the newest block, which it always
takes and which may be ragged.

    entries(p) = v                                    if v <= most
                 most - block + (v - 1) % block + 1   otherwise

Blocks of one entry make that min(v, most): a window (ratio 1), a list of the best entries.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class PerEntry:
    """`flops` operations on each of a row's entries. `most` is a multiple of `block`."""

    flops: int
    ratio: int
    most: int
    block: int

    @property
    def most_flops(self) -> int:
        """Those of a row that works on as many entries as there can be."""
        return self.flops * self.most

    def entries(self, spans: Iterable[tuple[int, int]]) -> int:
        """Of all rows of `spans` together: of each, the position of its first row and how many
        there are. Takes the same time for a span of any length."""
        ratio, most, block, total = self.ratio, self.most, self.block, 0
        whole = most - block
        for position, count in spans:
            if count == 1:  # a decode step has nothing else, and is short
                visible = (position + 1) // ratio
                total += visible if visible <= most else whole + (visible - 1) % block + 1
            else:
                total += self._before(position + count) - self._before(position)
        return total

    def _before(self, position: int) -> int:
        """Of all rows before `position`: runs of `ratio` rows see the same, the last run is cut."""
        visible, more = divmod(position, self.ratio)
        if not visible:
            return 0
        before = self._up_to(visible - 1)
        return self.ratio * before + (more + 1) * (self._up_to(visible) - before)

    def _up_to(self, visible: int) -> int:
        """Of one row for each number of entries in sight, from none to `visible`."""
        few = min(visible, self.most)
        blocks, ragged = divmod(visible - few, self.block)
        many = (visible - few) * (self.most - self.block)
        in_newest = blocks * _sum_to(self.block) + _sum_to(ragged)
        return _sum_to(few) + many + in_newest


def _sum_to(count: int) -> int:
    """1 + 2 + ... + count."""
    return count * (count + 1) // 2
