"""Masks of a byte-level vocabulary: exactly what may follow, at every place of every text."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer_compile.runtime.folder import open_folder
from deepinfer_compile.runtime.grammar.asked import SchemaType, Structure
from deepinfer_compile.runtime.grammar.constraint import Constraint
from deepinfer_compile.runtime.grammar.errors import GrammarError
from deepinfer_compile.runtime.grammar.library import Library
from deepinfer_compile.runtime.tokenizer import Tokenizer
from tests.runtime.pretend import EOS, pretend_engine

VOCAB = 256
WORDS = VOCAB // 32


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    engine = open_folder(pretend_engine(tmp_path_factory.mktemp("engines") / "pretend.engine"))
    return Library(Tokenizer(engine.files, 0, EOS), VOCAB)


def constraint(library, type, schema, trigger=(), bound=None):
    structure = Structure(SchemaType(type), schema, tuple(trigger), bound)
    return Constraint(structure, library.compile(structure.type, schema), EOS)


def tokens_in(words):
    """Ids whose bit is set, as the kernel reads them."""
    return {i for i in range(VOCAB) if int(words[i // 32]) >> i % 32 & 1}


def allowed(one):
    """What may follow; None for anything."""
    words = np.full(WORDS, 0x5A5A5A5A, dtype=np.int32)
    return tokens_in(words) if one.fill(words) else None


def follow(one, text):
    for token in text:
        assert one.take(token)
    return one


texts = st.text("abc01", min_size=1, max_size=5)
languages = st.sets(texts, min_size=1, max_size=6)


def forms(language):
    """One finite language in every way to write it."""
    escaped = "|".join(re.escape(text) for text in sorted(language))
    quoted = " | ".join(json.dumps(text) for text in sorted(language))
    return [
        ("regex", f"({escaped})", ""),
        ("ebnf", f"root ::= {quoted}", ""),
        ("ebnf", f'root ::= "(" root ")" | text\ntext ::= {quoted}', ""),
        ("json", json.dumps({"enum": sorted(language)}), '"'),
    ]


@given(languages, st.integers(0, 3), st.data())
@settings(max_examples=120, deadline=None)
def test_a_mask_holds_exactly_what_leads_to_a_text(library, language, form, data):
    """Against the list of all texts: at every place of one of them, nothing more and no less."""
    type, schema, quote = forms(language)[form]
    whole = [f"{quote}{text}{quote}".encode() for text in language]
    chosen = data.draw(st.sampled_from(whole))
    one = constraint(library, type, schema)
    for length in range(len(chosen) + 1):
        begun = chosen[:length]
        expect = {text[length] for text in whole if text[:length] == begun and text != begun}
        expect |= {EOS} if begun in whole else set()
        recursive_start = {ord("(")} if form == 2 and length == 0 else set()
        assert allowed(one) == expect | recursive_start
        for token in range(VOCAB):
            assert one.take(token) == (token in expect | recursive_start)
            if token in expect | recursive_start:
                one.back(1)
        if length < len(chosen):
            follow(one, chosen[length : length + 1])
    follow(one, [EOS])
    assert one.finished


SCHEMA = json.dumps(
    {"type": "object", "properties": {"é": {"type": "string"}, "n": {"type": "integer"}}}
)
CASES = [
    ("json", SCHEMA),
    ("regex", "(a|bc)*d{2,}é?"),
    ("ebnf", 'root ::= "(" root ")" | [a-z]{1,3} | root "+" root'),
]


@given(st.sampled_from(CASES), st.lists(st.integers(0, 2**16), max_size=24), st.data())
@settings(max_examples=80, deadline=None)
def test_going_back_restores_every_mask(library, case, choices, data):
    """Over the end of the grammar too, and whatever follows it."""
    trigger = data.draw(st.lists(st.sampled_from([5, 6]), max_size=3))
    one = constraint(library, *case, trigger, 9 if trigger else None)
    before = [allowed(one)]
    for choice in choices:
        may = before[-1]
        pool = [5, 6, 9, 200] if may is None else sorted(may)
        follow(one, [pool[choice % len(pool)]])
        before.append(allowed(one))
    while len(before) > 1:
        count = data.draw(st.integers(1, len(before) - 1))
        one.back(count)
        del before[-count:]
        assert allowed(one) == before[-1]


def test_masks_of_drafts_are_those_of_their_places(library):
    one = follow(constraint(library, "regex", "abc(d|e)f"), b"a")
    drafts = b"bceX"
    words = np.zeros((5, WORDS), dtype=np.int32)
    masked = one.fill_ahead(drafts, words)
    assert masked == [True] * 4  # the fourth draft is forbidden: no mask behind it
    assert [tokens_in(row) for row in words[:4]] == [{98}, {99}, {100, 101}, {102}]
    assert not words[4].any()
    assert allowed(one) == {98}
    assert one.fill_ahead([], words) == [True]


def test_drafts_may_cross_the_trigger_and_the_end(library):
    one = constraint(library, "regex", "a", [7])
    words = np.zeros((5, WORDS), dtype=np.int32)
    assert one.fill_ahead([3, 7, ord("a"), EOS], words) == [False, False, True, True, False]
    assert tokens_in(words[2]) == {ord("a")}
    assert tokens_in(words[3]) == {EOS}
    assert allowed(one) is None


@given(
    st.lists(st.integers(4, 6), min_size=1, max_size=6),
    st.lists(st.integers(3, 6), max_size=40),
)
@settings(max_examples=300, deadline=None)
def test_the_grammar_begins_where_the_trigger_is_first_complete(library, trigger, tokens):
    one = constraint(library, "regex", "a", trigger)
    for i, token in enumerate(tokens):
        assert allowed(one) is None
        follow(one, [token])
        seen = tokens[: i + 1]
        if seen[len(seen) - len(trigger) :] == trigger and len(seen) >= len(trigger):
            assert allowed(one) == {ord("a")}
            return
    assert allowed(one) is None


@given(
    st.lists(st.integers(4, 6), min_size=1, max_size=5),
    st.lists(st.integers(3, 6), max_size=12),
    st.integers(4, 9),
)
@settings(max_examples=300, deadline=None)
def test_the_bound_forces_what_is_missing_of_the_trigger(library, trigger, tokens, bound):
    def complete(seen):
        return seen[-len(trigger) :] == trigger

    one = constraint(library, "regex", "a", trigger, bound)
    seen = []
    for token in [*tokens, bound]:
        if complete(seen):
            return
        follow(one, [token])
        seen.append(token)
        if token == bound:
            break
    forced = []
    while not complete(seen):
        (token,) = allowed(one)
        assert not one.take(token ^ 1)
        follow(one, [token])
        seen.append(token)
        forced.append(token)
    assert forced == trigger[len(trigger) - len(forced) :]
    # The fewest that complete it: no shorter end of the trigger would have done.
    begun = seen[: len(seen) - len(forced)]
    for count in range(len(forced)):
        assert not complete(begun + trigger[len(trigger) - count :])
    assert allowed(one) == {ord("a")}


def test_after_the_grammar_only_the_end_then_anything(library):
    one = follow(constraint(library, "regex", "ab"), b"ab")
    assert allowed(one) == {EOS}
    assert not one.finished
    follow(one, [EOS])
    assert one.finished
    assert allowed(one) is None
    follow(one, [200, EOS, 0])
    one.back(4)
    assert allowed(one) == {EOS}
    one.back(1)
    assert allowed(one) == {ord("b")}


def test_a_copy_goes_its_own_way(library):
    first = library.compile(SchemaType.REGEX, "ab|ac")
    second = first.copy()
    assert first.take(97)
    assert first.take(98)
    assert second.take(97)
    assert second.take(99)
    assert first.may_end()
    assert second.may_end()


def test_where_no_token_may_follow_there_is_no_mask(library):
    """Byte 1 of this vocabulary is the end token: no text can hold it."""
    one = follow(constraint(library, "regex", r"a\x01|b"), b"a")
    with pytest.raises(GrammarError, match="so_args: the grammar needs text here that no token"):
        allowed(one)


def test_a_text_that_looks_like_a_special_token_is_written_as_text(library):
    """The tokenizer alone would read a special token, which belongs to no text."""
    one = constraint(library, "regex", "<think>(é|ö)?")
    for byte in b"<think>":
        assert allowed(one) == {byte}
        follow(one, [byte])
    assert allowed(one) == {0xC3, EOS}


def test_special_tokens_are_in_no_text(library):
    one = constraint(library, "regex", r"[\s\S]*")
    may = allowed(one)
    specials = {0, 0xF8, 0xF9, 0xFA, 0xFB, 0xFC}
    assert not may & specials
    assert EOS in may
    assert set(b'az09\n"{}') <= may
