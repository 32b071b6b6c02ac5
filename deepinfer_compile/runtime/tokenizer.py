"""Text to tokens and back, with the tokenizer copied into the engine.

Decoding works on bytes: a byte-level token is a run of bytes, and a character may be split over
several tokens, so text is handed out when its last byte has arrived, never earlier.
"""

from __future__ import annotations

import codecs
import functools
import json
from collections.abc import Sequence

import tokenizers

from deepinfer_compile.format.manifest import TOKENIZER
from deepinfer_compile.runtime.errors import EngineError, RequestError
from deepinfer_compile.runtime.files import EngineFiles


def check_text(prompt: str) -> None:
    """Refuse what no UTF-8 text holds."""
    try:
        prompt.encode("utf-8")
    except UnicodeEncodeError as bad:  # bytes of a command line that were no text
        place, help = f"character {bad.start + 1}", "give text in UTF-8"
        raise RequestError("E030", "the prompt is not UTF-8", where=place, help=help) from None


def tokenizer_text(engine: EngineFiles) -> str:
    """The engine's tokenizer.json. E463: there is none."""
    if engine.fault(TOKENIZER):
        raise EngineError(
            "E463",
            "the engine has no tokenizer",
            where=str(engine.path),
            help="pass prompt_token_ids, or compile from a checkpoint with tokenizer.json",
        )
    return engine.map(TOKENIZER).tobytes().decode(errors="replace")


class Tokenizer:
    """Plain text in, plain text out: BOS is prepended, special tokens are not printed.

    `text` is the engine's tokenizer.json where it has been read. E463: there is none. E464: it is
    damaged, or of another kind.
    """

    def __init__(
        self, engine: EngineFiles, bos_token_id: int, eos_token_id: int, text: str | None = None
    ) -> None:
        text, where = text or tokenizer_text(engine), str(engine.path / TOKENIZER)
        try:
            decoder = (json.loads(text).get("decoder") or {}).get("type")
        except (ValueError, AttributeError, RecursionError):
            raise EngineError("E464", "the tokenizer is no JSON object", where=where) from None
        if decoder != "ByteLevel":
            message = f"the tokenizer decodes by {decoder}; this runtime reads byte-level ones"
            raise EngineError("E464", message, where=where)
        try:
            self.inner = tokenizers.Tokenizer.from_str(text)
        except Exception as failure:  # the library raises nothing narrower
            raise EngineError("E464", f"not a tokenizer: {failure}", where=where) from None
        self.bos_token_id = bos_token_id
        self.eos_token_id = eos_token_id
        added = self.inner.get_added_tokens_decoder()
        self._special = frozenset(i for i, token in added.items() if token.special)

    def encode(self, text: str, *, add_bos: bool = True) -> list[int]:
        """Token ids of plain text; a text that already begins with BOS gets no second one."""
        check_text(text)
        ids: list[int] = self.inner.encode(text, add_special_tokens=False).ids
        if add_bos and ids[:1] != [self.bos_token_id]:
            return [self.bos_token_id, *ids]
        return ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        stream = Detokenizer(self, skip_special_tokens)
        return "".join(stream.add(i) for i in ids) + stream.finish()

    def bytes_of(self, token: int, *, skip_special_tokens: bool = True) -> bytes:
        """What a token adds to the text; nothing for an id without a token."""
        if skip_special_tokens and token in self._special:
            return b""
        piece = self.inner.id_to_token(token)
        return _bytes(piece) if piece is not None else b""


class Detokenizer:
    """Incremental decoding: the pieces of all calls together are the whole text."""

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def add(self, token: int) -> str:
        """The characters that `token` completes."""
        piece = self._tokenizer.bytes_of(token, skip_special_tokens=self._skip)
        return self._utf8.decode(piece)

    def finish(self) -> str:
        """What is left: U+FFFD if the text ends inside a character."""
        return self._utf8.decode(b"", final=True)


@functools.cache
def _byte_of_letter() -> dict[str, int]:
    """Byte-level BPE writes printable Latin-1 bytes as themselves, the rest from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in printable]
    letters = {chr(byte): byte for byte in printable}
    return letters | {chr(0x100 + i): byte for i, byte in enumerate(rest)}


def _bytes(piece: str) -> bytes:
    """Added tokens may hold letters that stand for no byte: those are plain text."""
    table = _byte_of_letter()
    if all(letter in table for letter in piece):
        return bytes(table[letter] for letter in piece)
    return piece.encode("utf-8")
