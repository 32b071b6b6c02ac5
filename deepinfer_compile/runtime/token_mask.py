"""Which tokens may come next: a grammar's, but none of the blacklist and none that is too early.

A mask has a bit per token, 32 in an i32 word, the lowest first; 1 is allowed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.int32]


class TokenMask:
    """Masks of one vocabulary. `banned`: tokens that never come."""

    def __init__(self, vocabulary: int, banned: Sequence[int]) -> None:
        bits = np.zeros(-(-vocabulary // 32) * 32, dtype=np.uint8)
        bits[:vocabulary] = 1
        bits[list(banned)] = 0
        self._usual = np.packbits(bits, bitorder="little").view(np.int32)
        self._bans = bool(banned)

    def fill(self, words: Words, held: bool, early: Iterable[int]) -> bool:
        """Whether there is a mask, written to `words`, which hold a grammar's if `held`. Without a
        bit set, nothing may come."""
        early = tuple(early)
        if not early and not self._bans:
            return held
        words[:] = words & self._usual if held else self._usual
        for token in early:
            words.view(np.uint32)[token // 32] &= np.uint32(~(1 << token % 32) & 0xFFFFFFFF)
        return True
