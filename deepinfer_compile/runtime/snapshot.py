"""A request's state as bytes, by the state contract: saved, and put back into any slot and pages.

    save_state(executor, slot, pages, length) -> Snapshot
    restore_state(executor, snapshot, slot, pages)
    copy_slot(executor, source, target)    what lies in a slot at the end of some pages

Only what the first `length` tokens wrote is kept, whatever lay in the slot and pages before: ring
entries that no token has reached are zero, pages end with their last complete entry. So equal
requests have equal snapshots, and a restored request continues bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from deepinfer_compile.format.plan import Lifetime, StateField
from deepinfer_compile.runtime.executor import Executor

Bytes = NDArray[np.uint8]


@dataclass(frozen=True)
class Snapshot:
    """`states`: bytes by state name, rings whole, pages one after another."""

    length: int
    states: Mapping[str, bytes]


def save_state(executor: Executor, slot: int, pages: Sequence[int], length: int) -> Snapshot:
    """Copy what `length` tokens of the request in `slot` have written."""
    states = {}
    for state in executor.plan.states:
        if state.lifetime is Lifetime.SLOT:
            ring = _unit(executor, state, slot)
            saved = np.zeros_like(ring)
            places = _ring_places(state, length)
            saved[places] = ring[places]
            states[state.name] = saved.tobytes()
        else:
            parts = _page_parts(executor, state, pages, length)
            states[state.name] = b"".join(part.tobytes() for part in parts)
    return Snapshot(length, states)


def restore_state(executor: Executor, snapshot: Snapshot, slot: int, pages: Sequence[int]) -> None:
    """Write a snapshot into a slot and pages; the caller owns both, and the page table."""
    for state in executor.plan.states:
        content = np.frombuffer(snapshot.states[state.name], dtype=np.uint8)
        if state.lifetime is Lifetime.SLOT:
            ring = _unit(executor, state, slot)
            ring[...] = content.reshape(ring.shape)
            continue
        begin = 0
        for part in _page_parts(executor, state, pages, snapshot.length):
            part[...] = content[begin : begin + part.size].reshape(part.shape)
            begin += part.size
        assert begin == len(content), state.name


def copy_slot(executor: Executor, source: int, target: int) -> None:
    """Copy all that survives a prefix hit from one slot to another: with the pages of the prefix, a
    request goes on from there."""
    for state in executor.plan.states:
        if state.lifetime is Lifetime.SLOT and state.survives_prefix_hit:
            _unit(executor, state, target)[...] = _unit(executor, state, source)


def _unit(executor: Executor, state: StateField, index: int) -> Bytes:
    """One slot's ring or one page, as [entries, bytes of an entry]."""
    buffer = executor.plan.buffers[state.buffer]
    begin = buffer.offset + index * state.bytes
    assert begin + state.bytes <= buffer.offset + buffer.bytes, f"{state.name}[{index}]"
    area = executor.memory[buffer.memory][begin : begin + state.bytes]
    return area.reshape(state.length, state.bytes // state.length)


def _ring_places(state: StateField, length: int) -> NDArray[np.intp]:
    """Where the newest tokens lie; older ones are overwritten."""
    newest = np.arange(max(0, length - state.length), length)
    return newest % state.length


def _page_parts(
    executor: Executor, state: StateField, pages: Sequence[int], length: int
) -> Iterator[Bytes]:
    """The complete entries of each page, in order."""
    entries = length // state.ratio
    for number in range(-(-entries // state.length)):
        page = _unit(executor, state, pages[number])
        yield page[: entries - number * state.length]
