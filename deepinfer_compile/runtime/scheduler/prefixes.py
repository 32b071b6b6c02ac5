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
from dataclasses import dataclass, replace
from itertools import islice
from typing import NamedTuple

import numpy as np

_DIGEST = 16  # bytes: two prefixes with one name are not to be found


class Page(NamedTuple):
    """Its number in the pool, and how many requests hold it."""

    number: int
    users: int


@dataclass(frozen=True)
class Prefixes:
    """`unused` in the order in which they are given up, `snapshots` (their places by the name of
    the page they follow) the longest unused first. `asked` and `reused` count prompt tokens."""

    pages: Mapping[bytes, Page]
    unused: Mapping[bytes, None]
    snapshots: Mapping[bytes, int]
    free_places: tuple[int, ...]
    asked: int = 0
    reused: int = 0


@dataclass(frozen=True)
class Match:
    """How many pages a prompt begins with that are here: `shared` of them, `usable` up to the last
    that has a snapshot."""

    shared: int
    usable: int


def prefixes(places: Iterable[int]) -> Prefixes:
    """None yet; `places` for snapshots."""
    return Prefixes({}, {}, {}, tuple(places))


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
    shared = usable = 0
    for name in names:
        if name not in known.pages:
            break
        shared += 1
        if name in known.snapshots:
            usable = shared
    return Match(shared, usable)


def common(names: Sequence[bytes], others: Sequence[bytes]) -> int:
    """How many pages two prompts begin with alike."""
    shorter = range(min(len(names), len(others)))
    return bisect_left(shorter, True, key=lambda i: names[i] != others[i])


def hold(known: Prefixes, names: Sequence[bytes]) -> Prefixes:
    """One more request holds these pages."""
    if not names:
        return known
    pages, unused = dict(known.pages), dict(known.unused)
    for name in names:
        number, users = pages[name]
        pages[name] = Page(number, users + 1)
        unused.pop(name, None)
    return replace(known, pages=pages, unused=unused)


def add(known: Prefixes, names: Sequence[bytes], numbers: Sequence[int]) -> Prefixes:
    """A request holds these pages, which it has computed, or which another did before it."""
    pages = dict(known.pages)
    for name, number in zip(names, numbers, strict=True):
        pages.setdefault(name, Page(number, 0))
    return hold(replace(known, pages=pages), names)


def let_go(known: Prefixes, names: Sequence[bytes]) -> Prefixes:
    """One request less holds these pages."""
    if not names:
        return known
    pages, unused = dict(known.pages), dict(known.unused)
    for name in reversed(names):
        number, users = pages[name]
        pages[name] = Page(number, users - 1)
        if users == 1:
            unused[name] = None
    return replace(known, pages=pages, unused=unused)


def give_up(known: Prefixes, count: int) -> tuple[Prefixes, tuple[int, ...]]:
    """Forget the pages that were unused the longest; their numbers."""
    names = tuple(islice(known.unused, count))
    pages, unused = dict(known.pages), dict(known.unused)
    snapshots = dict(known.snapshots)
    numbers: list[int] = []
    free = list(known.free_places)
    for name in names:
        del unused[name]
        numbers.append(pages.pop(name).number)
        if name in snapshots:
            free.append(snapshots.pop(name))
    known = replace(known, pages=pages, unused=unused, snapshots=snapshots, free_places=tuple(free))
    return known, tuple(numbers)


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
