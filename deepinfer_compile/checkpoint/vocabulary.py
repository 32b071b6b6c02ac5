"""The compressed vocabulary of Engram: which tokens count as the same word.

    tokenizer.json -> int32[vocab_size], ids in order of first appearance

"The", " The" and "THE" share an id (model_v41.md section 3.12 a). The rule is DeepSeek's; the
released tokenizer gives 99,092 ids, any other count means another tokenizer or another rule.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from tokenizers import Regex, Tokenizer, normalizers

from deepinfer_compile.diagnostics import error
from deepinfer_compile.spec.schema import CompressedVocabulary, Model

TOKENIZER_NAME = "tokenizer.json"
_REPLACEMENT = "�"  # what a decoder prints for bytes that are no UTF-8 by themselves
_LONE_SPACE = "\ue000"  # private use: stands for a lone space while the text is stripped

TokenMap = np.ndarray[tuple[int], np.dtype[np.int32]]


def token_map(model: Model, folder: Path) -> TokenMap:
    """The map the model declares, with `folder` the checkpoint's; checked against its size."""
    engram = model.engram
    if engram.compressed_vocabulary is CompressedVocabulary.IDENTITY:
        return np.arange(model.vocab_size, dtype=np.int32)
    path = folder / TOKENIZER_NAME
    mapped = compressed_vocabulary(path, model.vocab_size)
    found, wanted = int(mapped.max()) + 1, engram.engram_compressed_vocab_size
    if found != wanted:
        raise error(
            "E411",
            f"the tokenizer compresses to {found} ids, the spec says "
            f"engram_compressed_vocab_size: {wanted}",
            where=str(path),
            help="use the tokenizer.json that the model was trained with, or correct the spec",
        )
    return mapped


def compressed_vocabulary(path: Path, vocab_size: int) -> TokenMap:
    """Token id -> compressed id, for ids 0 to `vocab_size` - 1."""
    return compress(read_tokenizer(path, vocab_size), vocab_size)


def read_tokenizer(path: Path, vocab_size: int) -> Tokenizer:
    """A tokenizer in which every id below `vocab_size` names a token."""
    if not path.is_file():
        help = "complete the checkpoint folder: it must hold the model's tokenizer"
        raise error("E410", "the tokenizer does not exist", where=str(path), help=help)
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as failure:  # the library raises nothing narrower
        message = f"not a tokenizer: {failure}"
        help = "fetch the file again; only tokenizers in the `tokenizers` JSON format are read"
        raise error("E410", message, where=str(path), help=help) from None
    unnamed = [i for i in range(vocab_size) if tokenizer.id_to_token(i) is None]
    if unnamed:
        message = (
            f"{len(unnamed)} of {vocab_size} token ids name no token, the first is {unnamed[0]}"
        )
        help = "correct vocab_size, or use the model's own tokenizer"
        raise error("E410", message, where=str(path), help=help)
    return tokenizer


def compress(tokenizer: Tokenizer, vocab_size: int) -> TokenMap:
    """The rule itself, for a tokenizer that names every id."""
    fold = _folding()
    texts = tokenizer.decode_batch([[i] for i in range(vocab_size)], skip_special_tokens=False)
    ids: dict[str, int] = {}
    mapped = np.empty(vocab_size, dtype=np.int32)
    for token, text in enumerate(texts):
        if _REPLACEMENT in text:
            key = tokenizer.id_to_token(token) or text  # part of a character is only itself
        else:
            key = fold.normalize_str(text) or text
        mapped[token] = ids.setdefault(key, len(ids))
    return mapped


def _folding() -> normalizers.Sequence:
    """Case, accents, width and surrounding space do not matter; a lone space stays a space."""
    return normalizers.Sequence(
        [
            normalizers.NFKC(),
            normalizers.NFD(),
            normalizers.StripAccents(),
            normalizers.Lowercase(),
            normalizers.Replace(Regex(r"[ \t\r\n]+"), " "),
            normalizers.Replace(Regex(r"^ $"), _LONE_SPACE),
            normalizers.Strip(),
            normalizers.Replace(_LONE_SPACE, " "),
        ]
    )
