"""Memory is asked for before it is taken, and a refusal says what would fit."""

from __future__ import annotations

import re
import weakref

import pytest

from deepinfer_compile.driver import find_target, lower
from deepinfer_compile.runtime import loader
from deepinfer_compile.runtime.errors import EngineError
from deepinfer_compile.runtime.executor import Executor
from deepinfer_compile.runtime.loader import load_engine
from deepinfer_compile.runtime.room import check_room, need_of
from deepinfer_compile.spec.load import load_spec
from tests.engines import REPO
from tests.runtime.made import PLAN as APART
from tests.runtime.pretend import PLAN, pretend_engine

ALL = 704 + 14_784  # state and io of the pretended engine


def refusal(plan, available, packed=True):
    with pytest.raises(EngineError) as caught:
        check_room(plan, packed, available)
    assert (caught.value.code, caught.value.exit_code) == ("E242", 3)
    return caught.value


def test_the_last_byte_decides():
    check_room(PLAN, True, ALL)
    check_room(PLAN, True, None)  # a system that does not tell
    refused = refusal(PLAN, ALL - 1)
    assert refused.message == (
        "the engine needs 15,488 bytes of memory, 15,487 are available: 1 are missing"
    )
    assert refused.notes == (
        "state 704: 5 slots of 16 (engine.max_requests, engine.prefix_snapshots), 9 pages of 64 "
        "(engine.max_requests * engine.max_context, or engine.cache_tokens)",
        "io 14,784, arena 0: for steps of max_rows and prefill_chunk",
    )


@pytest.mark.parametrize(("missing", "tokens"), [(1, 112), (64, 112), (65, 96), (256, 64)])
def test_the_cache_that_would_fit_is_named(missing, tokens):
    """Eight pages of 16 tokens, 64 bytes each; one request may need four."""
    assert f"--set engine.cache_tokens={tokens}, " in refusal(PLAN, ALL - missing).help
    assert "--set" not in refusal(PLAN, ALL - 257).help


def planned(*overrides):
    spec = load_spec(REPO / "examples" / "v41_nano.yaml", overrides=overrides, environment={})
    return lower(spec, find_target("cpu")).plan


def test_what_it_says_fits_does_fit():
    """The plan with the cache that it names needs no more than there was."""
    plan = planned()
    available = need_of(plan, True).total - plan.memory.state // 4
    tokens = re.search(r"engine.cache_tokens=\d+", refusal(plan, available).help)[0]
    check_room(planned(tokens), True, available)


def test_experts_that_lie_apart_are_counted_unless_they_are_packed():
    assert need_of(APART, packed=True).total == 64 + 128
    assert need_of(APART, packed=False).total == 64 + 128 + 96
    assert refusal(APART, 0, packed=False).notes[-1] == (
        "experts copied together 96: none if packed"
    )


def test_loading_asks_before_it_allocates(tmp_path, monkeypatch):
    engine = pretend_engine(tmp_path / "e")
    monkeypatch.setattr(loader, "memory_available", lambda: 100)
    monkeypatch.setattr(loader, "Executor", None)  # nobody gets that far
    with pytest.raises(EngineError, match="15,388 are missing"):
        load_engine(engine)


def test_the_oracles_memory_is_free_before_the_engines_is_taken(tmp_path, monkeypatch):
    made = []

    def make(*arguments):
        assert [one() for one in made] == [None] * len(made)
        executor = Executor(*arguments)
        made.append(weakref.ref(executor))
        return executor

    monkeypatch.setattr(loader, "Executor", make)
    load_engine(pretend_engine(tmp_path / "e")).close()
    assert len(made) == 2
