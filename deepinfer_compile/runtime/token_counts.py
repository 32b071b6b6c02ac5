"""The table of token counts: for each slot of a penalised request, what came before.

table[slot, token] = times in the answer, and the sign bit if it is in the prompt
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_IN_PROMPT = np.int32(-(2**31))


@dataclass
class _Held:
    """Whose tokens a row counts, and how many of them."""

    id: int
    count: int


class TokenCounts:
    """Rows are written when a request is first sampled in a slot, then a token at a time. A request
    that comes back to a slot after a preemption finds its row, or somebody else's."""

    def __init__(self, table: NDArray[np.int32]) -> None:
        self._table = table
        self._held: dict[int, _Held] = {}

    def bring_up(self, slot: int, id: int, prompt_len: int, known: Sequence[int]) -> None:
        """Make the slot's row that of a request, whose tokens are `known`, the prompt first."""
        row, held = self._table[slot], self._held.get(slot)
        if held is None or held.id != id:
            held = self._held[slot] = _Held(id, prompt_len)
            row[:] = 0
            row[np.asarray(known[:prompt_len], dtype=np.intp)] = _IN_PROMPT
        for token in known[held.count :]:
            row[token] += 1
        held.count = len(known)
