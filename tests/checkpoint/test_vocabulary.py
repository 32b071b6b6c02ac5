"""Engram's compressed vocabulary and hash constants against the golden tables."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file
from tokenizers import Tokenizer, models

from deepinfer_compile.checkpoint.vocabulary import compressed_vocabulary, token_map
from deepinfer_compile.diagnostics import CompileError
from deepinfer_compile.spec.engram import bucket_primes, multipliers, offsets, rows
from deepinfer_compile.spec.hf import from_hf
from deepinfer_compile.spec.load import load_spec
from tests.checkpoint.models import REPO, edited, nano
from tests.golden_data import golden_root


def test_token_map_is_the_golden_one() -> None:
    folder = golden_root() / "v41_tiny"
    golden = load_file(folder / "engram_tables.safetensors")["token_map"]
    mapped = token_map(from_hf(folder, environment={}).model, folder)
    assert mapped.dtype == np.int32
    assert np.array_equal(mapped, golden)
    assert mapped.max() + 1 == 565


def test_hash_constants_are_the_golden_ones() -> None:
    folder = golden_root() / "v41_tiny"
    golden = load_file(folder / "engram_tables.safetensors")
    model = from_hf(folder, environment={}).model
    assert np.array_equal(bucket_primes(model), golden["primes"])
    assert np.array_equal(multipliers(model), golden["multipliers"])


def test_released_hash_constants_and_rows_are_the_golden_ones() -> None:
    golden = load_file(golden_root() / "ops/engram_hash_released_params.safetensors")
    model = load_spec(REPO / "examples/v41_flash.yaml", environment={}).model
    assert np.array_equal(np.array(bucket_primes(model)).ravel(), golden["primes"].ravel())
    assert np.array_equal(multipliers(model), golden["multipliers"])
    starts = [start for columns in offsets(model) for row in columns for start in row]
    assert starts[:3] == [0, 16000057, 32000136]
    assert tuple(rows(p) for p in bucket_primes(model)) == model.engram.engram_num_embeddings


@dataclass(frozen=True)
class Case:
    token: str
    like: str


@pytest.mark.parametrize(
    "case",
    [
        Case("The", "the"),
        Case(" the", "the"),
        Case("THÉ", "the"),
        Case("ﬁ", "fi"),  # compatibility form
        Case("\t\n", " "),  # a lone space stays apart from the empty text
        Case("a\n b", "a b"),
    ],
)
def test_spellings_of_a_word_share_an_id(tmp_path: Path, case: Case) -> None:
    words = [case.like, "other", case.token]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, "other"))
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert compressed_vocabulary(tmp_path / "tokenizer.json", 3).tolist() == [0, 1, 0]


def test_broken_characters_are_only_themselves(tmp_path: Path) -> None:
    words = ["�", "a�", "A�", "a"]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, "a"))
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert compressed_vocabulary(tmp_path / "tokenizer.json", 4).tolist() == [0, 1, 2, 3]


def test_identity_needs_no_tokenizer(tmp_path: Path) -> None:
    assert token_map(nano(), tmp_path).tolist() == list(range(256))


def test_another_size_is_refused() -> None:
    folder = golden_root() / "v41_tiny"
    model = edited(
        from_hf(folder, environment={}).model, **{"engram.engram_compressed_vocab_size": 566}
    )
    with pytest.raises(CompileError, match="compresses to 565 ids, the spec says"):
        token_map(model, folder)


@pytest.mark.parametrize(
    ("text", "message"), [(None, "does not exist"), ("{}", "not a tokenizer"), ("", "not a tok")]
)
def test_a_tokenizer_that_cannot_be_read_is_refused(
    tmp_path: Path, text: str | None, message: str
) -> None:
    path = tmp_path / "tokenizer.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(CompileError, match=message) as caught:
        compressed_vocabulary(path, 4)
    assert caught.value.exit_code == 4


def test_a_tokenizer_with_unnamed_ids_is_refused() -> None:
    path = golden_root() / "v41_tiny/tokenizer.json"
    with pytest.raises(CompileError, match="2 of 770 token ids name no token, the first is 768"):
        compressed_vocabulary(path, 770)
