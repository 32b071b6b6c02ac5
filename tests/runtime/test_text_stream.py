"""Stop strings: the text ends before them wherever tokens are cut, and none of them is shown."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer_compile.runtime.files import open_files
from deepinfer_compile.runtime.text_stream import TextStream
from deepinfer_compile.runtime.tokenizer import Tokenizer
from tests.runtime.pretend import write_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """A token is a byte."""
    engine = tmp_path_factory.mktemp("engine")
    write_tokenizer(engine / "tokenizer/tokenizer.json")
    return Tokenizer(open_files(engine), 0, 1)


class Pieces:
    """A tokenizer whose tokens are any bytes: tests cut texts where they like."""

    def __init__(self, pieces):
        self.pieces = pieces

    def bytes_of(self, token, *, skip_special_tokens=True):
        return self.pieces[token]


def plain_end(text, stops):
    """Where the text ends, character by character: the first that completes a stop string."""
    for end in range(1, len(text) + 1):
        found = [len(stop) for stop in stops if text[:end].endswith(stop)]
        if found:
            return end - max(found)
    return None


def run(pieces, stops):
    """What is shown after each token, and the number of tokens until it stopped."""
    stream = TextStream(Pieces(pieces), stops)
    shown = []
    for token in range(len(pieces)):
        stopped = stream.add(token)
        shown.append(stream.take())
        if stopped:
            break
    stream.close()
    return shown, stream.take(), stopped if pieces else False


LETTERS = st.text(alphabet="abé€😀", max_size=30)
STOPS = st.lists(st.text(alphabet="abé€😀", min_size=1, max_size=5), max_size=3)


@given(LETTERS, STOPS, st.lists(st.integers(0, 90), max_size=20))
@settings(max_examples=500, deadline=None)
def test_text_ends_before_the_first_stop_wherever_tokens_are_cut(text, stops, cuts):
    content = text.encode()
    edges = [0, *sorted(cut for cut in cuts if cut < len(content)), len(content)]
    pieces = [content[a:b] for a, b in pairwise(edges)]
    shown, rest, stopped = run(pieces, stops)
    end = plain_end(text, stops)
    assert stopped == (end is not None)
    assert "".join(shown) + rest == (text if end is None else text[:end])


@given(LETTERS, STOPS)
@settings(max_examples=300, deadline=None)
def test_no_more_is_held_back_than_a_stop_string_could_need(text, stops):
    """After every character all is shown but the longest end that a stop string begins with."""
    shown, _, _ = run([character.encode() for character in text], stops)
    for count in range(1, len(shown) + 1):
        so_far = text[:count]
        if plain_end(so_far, stops) is not None:
            break
        begins = {stop[:n] for stop in stops for n in range(1, len(stop))}
        held = max((len(b) for b in begins if so_far.endswith(b)), default=0)
        assert "".join(shown[:count]) == so_far[: count - held]


def test_stops_that_straddle_tokens_and_characters():
    shown, rest, stopped = run([b"Hel", b"lo S", b"TO", b"P now"], ["STOP"])
    assert (shown, rest, stopped) == (["Hel", "lo ", "", ""], "", True)
    assert run([b"a \xf0\x9f", b"\x98", b"\x80b"], ["😀"]) == (["a ", "", ""], "", True)
    assert run([b"STO", b"ne"], ["STOP"]) == (["", "STOne"], "", False)
    assert run([b"a ST"], ["STOP"]) == (["a "], "ST", False)  # held back, then the end
    assert run([b"xaabab"], ["abab", "ba"]) == (["xaa"], "", True)  # "ba" is completed first
    assert run([b"xaab"], ["ab", "aab"]) == (["x"], "", True)  # by the same character: the longest
    assert run([b"abcSTOP", b"never"], ["STOP"]) == (["abc"], "", True)


def test_half_a_character_at_the_end_comes_after_what_was_held_back():
    assert run([b"a S", b"\xf0"], ["ST"]) == (["a ", ""], "S\N{REPLACEMENT CHARACTER}", False)


def test_a_stop_token_adds_no_text(tokenizer):
    stream = TextStream(tokenizer, stop_token_ids=(ord("!"),))
    for token in b"hi!":
        assert not stream.add(token)
    stream.close()
    assert stream.take() == "hi"
