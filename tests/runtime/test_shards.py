"""Values that are cheap to change: what dictionaries and lists say, and older ones stay."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer_compile.runtime.scheduler.free_list import FreeList
from deepinfer_compile.runtime.scheduler.shards import Shards

keys = st.one_of(st.integers(0, 5000), st.binary(min_size=2, max_size=4))


@given(st.lists(st.tuples(st.lists(st.tuples(keys, st.integers()), max_size=6), st.data())))
@settings(max_examples=100, deadline=None)
def test_shards_are_a_dictionary_whose_past_stays(changes):
    versions, plain = [(Shards(), {})], {}
    for new, data in changes:
        gone = data.draw(st.lists(st.sampled_from(list(plain)), unique=True)) if plain else []
        gone = [key for key in gone if key not in dict(new)]
        plain = {key: value for key, value in plain.items() if key not in gone} | dict(new)
        versions.append((versions[-1][0].changed(new, gone), plain))
    for shards, was in versions:
        assert dict(shards.items()) == was
        assert len(shards) == len(was)
        assert all(key in shards and shards[key] == value for key, value in was.items())


def test_a_change_copies_no_shard_that_it_does_not_touch():
    before = Shards[int, int]().changed((i, i) for i in range(100_000))
    after = before.changed([(5, 0)], [7])
    copied = [a is not b for a, b in zip(before.shards, after.shards, strict=True)]
    assert sum(copied) == 2
    assert len(after) == 99_999


@given(st.lists(st.one_of(st.integers(1, 9), st.lists(st.integers(), max_size=5))))
def test_a_free_list_is_a_queue(steps):
    free, plain = FreeList.of(range(4)), list(range(4))
    for step in steps:
        if isinstance(step, int):
            free, taken = free.without(step)
            assert list(taken) == plain[:step]
            plain = plain[step:]
        else:
            free, plain = free.with_back(step), [*plain, *step]
        assert list(free) == plain
        assert len(free) == len(plain)
