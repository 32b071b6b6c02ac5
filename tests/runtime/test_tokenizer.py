"""Text to tokens and back: no half characters, and the pieces are the whole."""

from __future__ import annotations

import json

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from deepinfer_compile.runtime.errors import EngineError
from deepinfer_compile.runtime.files import FolderFiles
from deepinfer_compile.runtime.tokenizer import Detokenizer, Tokenizer, _byte_of_letter

BOS, EOS, PLAIN = 0, 1, 2


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """Bytes, a few merges that join halves of characters, special and plain added tokens."""
    engine = tmp_path_factory.mktemp("engine")
    letters = {byte: letter for letter, byte in _byte_of_letter().items()}
    pieces = ["<bos>", "<eos>", "<plain é>", *(letters[b] for b in range(256))]
    halves = [(0xE4, 0xBD), (0xA0, 0xE5), (0xF0, 0x9F), (0x98, 0x80), (0x68, 0x69)]
    merges = [(letters[a], letters[b]) for a, b in halves]
    pieces += [a + b for a, b in merges]
    inner = tokenizers.Tokenizer(
        models.BPE(vocab={p: i for i, p in enumerate(pieces)}, merges=merges)
    )
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(["<bos>", "<eos>"])
    inner.add_tokens([AddedToken("<plain é>", normalized=False)])
    (engine / "tokenizer").mkdir()
    inner.save(str(engine / "tokenizer/tokenizer.json"))
    return Tokenizer(FolderFiles(engine), BOS, EOS)


COUNT = 3 + 256 + 5
ids = st.lists(st.integers(0, COUNT - 1), max_size=40)


@given(ids, st.booleans())
@settings(max_examples=300, deadline=None)
def test_pieces_of_any_tokens_are_what_the_library_decodes(tokenizer, tokens, skip):
    stream = Detokenizer(tokenizer, skip)
    pieces = [stream.add(token) for token in tokens]
    pieces.append(stream.finish())
    assert "".join(pieces) == tokenizer.inner.decode(tokens, skip_special_tokens=skip)


@given(st.text(max_size=30))
@settings(max_examples=300, deadline=None)
def test_no_piece_of_real_text_holds_half_a_character(tokenizer, text):
    stream = Detokenizer(tokenizer)
    pieces = [stream.add(token) for token in tokenizer.encode(text, add_bos=False)]
    assert stream.finish() == ""
    assert "".join(pieces) == text
    assert all("�" not in piece for piece in pieces) or "�" in text


def test_a_split_character_comes_out_with_its_last_token(tokenizer):
    stream = Detokenizer(tokenizer)
    tokens = tokenizer.encode("你好😀", add_bos=False)
    # e4+bd, a0+e5, a5, bd, f0+9f, 98+80
    assert [stream.add(token) for token in tokens] == ["", "你", "", "好", "", "😀"]


def test_text_that_ends_inside_a_character_is_completed_once(tokenizer):
    stream = Detokenizer(tokenizer)
    (first, *_) = tokenizer.encode("你", add_bos=False)
    assert (stream.add(first), stream.finish(), stream.finish()) == ("", "�", "")


def test_bos_is_prepended_once(tokenizer):
    hi = tokenizer.encode("hi", add_bos=False)
    assert tokenizer.encode("hi") == [BOS, *hi]
    assert tokenizer.encode("<bos>hi") == [BOS, *hi]
    assert tokenizer.encode("") == [BOS]


def test_special_tokens_are_not_printed_and_plain_added_ones_are(tokenizer):
    assert tokenizer.decode([BOS, PLAIN, EOS]) == "<plain é>"
    assert tokenizer.decode([BOS, EOS], skip_special_tokens=False) == "<bos><eos>"


def test_an_id_without_a_token_adds_nothing(tokenizer):
    assert tokenizer.bytes_of(COUNT + 7) == b""


def test_a_missing_tokenizer_says_what_to_do(tmp_path):
    with pytest.raises(EngineError, match="pass prompt_token_ids"):
        Tokenizer(FolderFiles(tmp_path), BOS, EOS)


def test_another_decoder_is_refused(tmp_path):
    (tmp_path / "tokenizer").mkdir()
    text = json.dumps({"decoder": {"type": "Metaspace"}})
    (tmp_path / "tokenizer/tokenizer.json").write_text(text)
    with pytest.raises(EngineError, match="decodes by Metaspace"):
        Tokenizer(FolderFiles(tmp_path), BOS, EOS)
