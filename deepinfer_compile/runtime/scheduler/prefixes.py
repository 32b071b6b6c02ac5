"""Prompt pages that are kept for requests that begin alike: a tree of pages, as a value.

A page's name is the digest of its tokens and of the name before it, so a name stands for a whole
prefix and equal names for equal prefixes. Whoever holds a page holds all before it. Pages nobody
holds are given up when the pool needs them, the longest unused first and a prefix's end before its
beginning.

Pages are not all that a request needs to go on after a prefix: what its slot held there is kept
too, as a snapshot at the end of some pages. Snapshots have places of their own, and make room in
the order of their last use.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from deepinfer_compile.runtime.scheduler.shards import Shards

_DIGEST = 16  # bytes: two prefixes with one name are not to be found


class Page(NamedTuple):
    """Its number in the pool, how many requests hold it, and when one last let it go, -1: never."""

    number: int
    users: int
    released: int


@dataclass(frozen=True)
class Prefixes:
    """`unused` are the pages that nobody holds by the time they were let go, none of them before
    `oldest`; `now` counts these times. `snapshots` are places by the name of the page they follow,
    the longest unused first. `asked` and `reused` count prompt tokens."""

    snapshots: Mapping[bytes, int]
    free_places: tuple[int, ...]
    pages: Shards[bytes, Page] = field(default_factory=Shards)
    unused: Shards[int, bytes] = field(default_factory=Shards)
    oldest: int = 0
    now: int = 0
    asked: int = 0
    reused: int = 0


@dataclass(frozen=True)
class Match:
    """How many pages a prompt begins with that are here: `shared` of them, `usable` up to the last
    that has a snapshot; nobody holds `unused` of the usable ones."""

    shared: int
    usable: int
    unused: int


def prefixes(places: Iterable[int]) -> Prefixes:
    """None yet; `places` for snapshots."""
    return Prefixes({}, tuple(places))


def page_names(tokens: Sequence[int], page_size: int) -> tuple[bytes, ...]:
    """Of every page that the tokens fill."""
    content = np.asarray(tokens, dtype="<i4")
    names: list[bytes] = []
    before = b""
    for end in range(page_size, len(tokens) + 1, page_size):
        page = content[end - page_size : end].tobytes()
        before = hashlib.blake2b(before + page, digest_size=_DIGEST).digest()
        names.append(before)
    return tuple(names)


def match(known: Prefixes, names: Sequence[bytes]) -> Match:
    """What a prompt with these page names can share."""
    shared = usable = unused = idle = 0
    for name in names:
        if name not in known.pages:
            break
        shared += 1
        idle += known.pages[name].users == 0
        if name in known.snapshots:
            usable, unused = shared, idle
    return Match(shared, usable, unused)


def common(names: Sequence[bytes], others: Sequence[bytes]) -> int:
    """How many pages two prompts begin with alike."""
    shorter = range(min(len(names), len(others)))
    return bisect_left(shorter, True, key=lambda i: names[i] != others[i])


def hold(known: Prefixes, names: Sequence[bytes], numbers: Sequence[int] = ()) -> Prefixes:
    """One more request holds these pages. Where they are not here yet, they are those `numbers`,
    which it has computed."""
    if not names:
        return known
    new: list[tuple[bytes, Page]] = []
    taken: list[int] = []
    for i, name in enumerate(names):
        page = known.pages[name] if name in known.pages else Page(numbers[i], 0, -1)
        if page.users == 0 and page.released >= 0:
            taken.append(page.released)
        new.append((name, Page(page.number, page.users + 1, page.released)))
    return replace(known, pages=known.pages.changed(new), unused=known.unused.changed((), taken))


def let_go(known: Prefixes, names: Sequence[bytes]) -> Prefixes:
    """One request less holds these pages."""
    if not names:
        return known
    new: list[tuple[bytes, Page]] = []
    idle: list[tuple[int, bytes]] = []
    for name in reversed(names):
        number, users, _ = known.pages[name]
        time = known.now + len(idle)
        new.append((name, Page(number, users - 1, time)))
        if users == 1:
            idle.append((time, name))
    return replace(
        known,
        pages=known.pages.changed(new),
        unused=known.unused.changed(idle),
        now=known.now + len(idle),
    )


def give_up(known: Prefixes, count: int) -> tuple[Prefixes, tuple[int, ...]]:
    """Forget `count` of the pages that nobody holds; their numbers."""
    times: list[int] = []
    time = known.oldest
    while len(times) < count:
        if time in known.unused:
            times.append(time)
        time += 1
    names = [known.unused[time] for time in times]
    snapshots = dict(known.snapshots)
    free = [snapshots.pop(name) for name in names if name in snapshots]
    kept = replace(
        known,
        pages=known.pages.changed((), names),
        unused=known.unused.changed((), times),
        oldest=time,
        snapshots=snapshots,
        free_places=(*known.free_places, *free),
    )
    return kept, tuple(known.pages[name].number for name in names)


def restored(known: Prefixes, name: bytes) -> tuple[Prefixes, int]:
    """The snapshot after a page is used; its place."""
    snapshots = dict(known.snapshots)
    place = snapshots[name] = snapshots.pop(name)
    return replace(known, snapshots=snapshots), place


def saved(known: Prefixes, name: bytes) -> tuple[Prefixes, int]:
    """A place for the snapshot after a page; another gives way if there is none."""
    if name in known.snapshots:
        return restored(known, name)
    snapshots, places = dict(known.snapshots), known.free_places
    if not places:
        places = (snapshots.pop(next(iter(snapshots))),)
    snapshots[name] = places[0]
    return replace(known, snapshots=snapshots, free_places=places[1:]), places[0]
