"""Where a draft block lies: positions, ring places and keys of its rows (section 3.15).

The meaning that the draft graph's row arrays will answer to; there is no operator of it yet.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class DraftBlock:
    """`positions` and `places` have one entry per draft row; all rows see the same `keys`.

    Places count ring entries over all slots. `keys` are the places of the last `window` context
    positions, oldest first and -1 before the request's start, then those of the block itself.
    """

    positions: tuple[int, ...]
    places: tuple[int, ...]
    keys: tuple[int, ...]


def draft_block(accepted: int, slot: int, *, ring: int, block: int, window: int) -> DraftBlock:
    """The block drafted after position `accepted`, the last whose features are injected.

    A draft pass touches window + block positions, so `ring` holds at least as many.
    """
    assert ring >= window + block, f"a ring of {ring} is shorter than {window} + {block}"

    def place(position: int) -> int:
        return slot * ring + position % ring if position >= 0 else -1

    positions = tuple(range(accepted + 1, accepted + 1 + block))
    places = tuple(place(p) for p in positions)
    context = tuple(place(p) for p in range(accepted - window + 1, accepted + 1))
    return DraftBlock(positions, places, context + places)
