"""A byte-level BPE tokenizer of exactly the wanted size, without training.

    special tokens at their ids, the 243 bytes that UTF-8 text can hold, then merges

The 13 bytes that no UTF-8 text contains (C0, C1, F5 to FF) have no token. All text can be
encoded and decodes to itself, and 247 tokens are enough. Merges are runs of frequent letters: fresh
ones ("th") and variants ("Th", " th") that Engram's compression folds onto a fresh one, in the
numbers that give the compressed size the model declares.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count, islice, product

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from deepinfer_compile.checkpoint.vocabulary import compress
from deepinfer_compile.diagnostics import error
from deepinfer_compile.spec.schema import CompressedVocabulary, Model

_LETTERS = "etaoinshrdlcumwfgypbvkjxqz"  # by frequency in English
_NEVER_IN_UTF8 = frozenset({0xC0, 0xC1, *range(0xF5, 0x100)})
_SPACE = "Ġ"  # how byte-level BPE writes a space

Merge = tuple[str, str]


def special_tokens(model: Model) -> dict[int, str]:
    """Ids with a meaning of their own, under DeepSeek's names."""
    names = {model.dspark.dspark_noise_token_id: "<｜System｜>"}
    if model.vision is not None:
        names[model.vision.image_token_id] = "<｜deepseek_image｜>"
    return names | {
        model.pad_token_id: "<｜▁pad▁｜>",
        model.eos_token_id: "<｜end▁of▁sentence｜>",
        model.bos_token_id: "<｜begin▁of▁sentence｜>",
    }


def make_tokenizer(model: Model) -> Tokenizer:
    """A tokenizer whose ids 0 to vocab_size - 1 all decode."""
    alphabet = [c for byte, c in enumerate(_byte_letters()) if byte not in _NEVER_IN_UTF8]
    special = special_tokens(model)
    merges = model.vocab_size - len(special) - len(alphabet)
    if merges < 0:
        raise error(
            "E412",
            f"vocab_size {model.vocab_size} is too small for a tokenizer: {len(special)} special "
            f"tokens and {len(alphabet)} bytes need {len(special) + len(alphabet)}",
            help="raise vocab_size; 256 is enough",
        )
    if model.engram.compressed_vocabulary is CompressedVocabulary.IDENTITY:
        return _assemble(model, special, alphabet, merges - merges // 3)
    bare = int(compress(_assemble(model, special, alphabet, merges), model.vocab_size).max()) + 1
    wanted = model.engram.engram_compressed_vocab_size
    fresh = merges - (bare - wanted)  # with fresh merges alone, each adds one
    fewest = max(0, -(-(merges - len(_LETTERS)) // 3))  # each fresh run has two variants
    if not fewest <= fresh <= merges:
        raise error(
            "E412",
            f"no tokenizer of {model.vocab_size} tokens compresses to {wanted} here: "
            f"with {merges} merges the size can be {bare - merges + fewest} to {bare}",
            help="set `compressed_vocabulary: identity`, or choose another "
            "engram_compressed_vocab_size",
        )
    return _assemble(model, special, alphabet, fresh)


def _assemble(model: Model, special: dict[int, str], alphabet: list[str], fresh: int) -> Tokenizer:
    """`fresh` merges that add a compressed id, variants for the rest."""
    room = model.vocab_size - len(special) - len(alphabet) - fresh
    merges = [*islice(_fresh(), fresh), *islice(_variants(fresh, room), room)]
    pieces = iter([*alphabet, *(a + b for a, b in merges)])
    vocabulary = {special[i] if i in special else next(pieces): i for i in range(model.vocab_size)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(name, normalized=False, special=True) for _, name in sorted(special.items())]
    )
    return tokenizer


def _fresh() -> Iterator[Merge]:
    """Lower-case runs, shorter ones first, so that each is an earlier run and a letter."""
    for length in count(2):
        for letters in product(_LETTERS, repeat=length):
            yield "".join(letters[:-1]), letters[-1]


def _variants(fresh: int, most: int) -> Iterator[Merge]:
    """At most `most` spellings that fold onto a letter or one of the first `fresh` runs."""

    def spelled() -> Iterator[Merge]:
        yield from ((_SPACE, letter) for letter in _LETTERS)
        for head, tail in islice(_fresh(), fresh):
            yield _SPACE, head + tail
            yield head.capitalize(), tail

    return islice(spelled(), most)


def _byte_letters() -> list[str]:
    """The printable letter that byte-level BPE writes for each byte (GPT-2's table)."""
    kept = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    moved = iter(range(0x100, 0x200))
    return [chr(byte if byte in kept else next(moved)) for byte in range(256)]
