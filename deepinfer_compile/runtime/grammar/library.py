"""The package that matches tokens: llguidance. Only this file knows it.

LLTokenizer    the vocabulary as bytes, made once for an engine
LLMatcher      a compiled grammar and where a text is in it; requests work on copies
"""

from __future__ import annotations

import importlib.util
import threading
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from deepinfer_compile.runtime.errors import RequestError
from deepinfer_compile.runtime.grammar.asked import SchemaType
from deepinfer_compile.runtime.grammar.ebnf import read_ebnf
from deepinfer_compile.runtime.grammar.errors import GrammarError
from deepinfer_compile.runtime.grammar.fault import fault_place
from deepinfer_compile.runtime.grammar.lark import lark_of
from deepinfer_compile.runtime.grammar.schema import Json, closed, read_schema
from deepinfer_compile.runtime.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer


def check_installed() -> None:
    """E038: the package is missing, with the command that installs it."""
    if importlib.util.find_spec("llguidance") is None:
        raise RequestError(
            "E038",
            "structured output needs the package llguidance",
            help="pip install 'deepinfer-compile[structured]'",
        )


_NO_TOKEN = "the grammar needs text here that no token of the vocabulary has"


class Matcher:
    """A grammar and the tokens it has taken so far; the end token is none of them."""

    def __init__(self, inner: LLMatcher) -> None:
        self._inner = inner

    def copy(self) -> Matcher:
        """One of its own, in the same place."""
        return Matcher(self._inner.deep_copy())

    def take(self, token: int) -> bool:
        """Go on by a token; false, and nothing changes, if the grammar forbids it. GrammarError:
        the library gave up."""
        taken = self._inner.try_consume_tokens([token]) == 1
        if self._inner.is_error():
            raise GrammarError(_first_line(self._inner.get_error()))
        return taken

    def back(self, count: int) -> None:
        """Forget the last `count` tokens."""
        if count:
            self._inner.rollback(count)

    def may_end(self) -> bool:
        """The text is complete, though there may be a longer one."""
        return self._inner.is_accepting()

    def fill(self, words: NDArray[np.int32]) -> None:
        """Write the mask of what may follow, end token included. GrammarError: no token may, or
        the library gave up."""
        assert words.flags.c_contiguous
        self._inner.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        if self._inner.is_error():
            message = _first_line(self._inner.get_error())
            raise GrammarError(_NO_TOKEN if message == "NoExtensionBias" else message)


class Library:
    """Compiles grammars for the vocabulary of one engine. May be called from several threads."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._vocabulary: LLTokenizer | None = None
        self._making = threading.Lock()

    def compile(self, type: SchemaType, schema: str) -> Matcher:
        """A matcher at its beginning. GrammarError: what is wrong with the schema, and where."""
        match type:
            case SchemaType.JSON:
                return self._json(schema)
            case SchemaType.REGEX:
                return self._regex(schema)
            case SchemaType.EBNF:
                return self._ebnf(schema)

    def _json(self, text: str) -> Matcher:
        from llguidance import LLMatcher

        def compiled(schema: Json) -> LLMatcher:
            assert isinstance(schema, dict | bool)
            wrapped: dict[str, Json] = schema if isinstance(schema, dict) else {"allOf": [schema]}
            return self._matcher(LLMatcher.grammar_from_json_schema(wrapped))

        def fault(schema: Json) -> str:
            # Of references it adds through which it came: the place says that.
            return compiled(schema).get_error().partition("\n  while processing")[0].strip()

        schema = closed(read_schema(text))
        inner = compiled(schema)
        if inner.is_error():
            raise GrammarError(f"schema {fault_place(schema, fault)}: {fault(schema)}")
        return Matcher(inner)

    def _regex(self, text: str) -> Matcher:
        from llguidance import LLMatcher, regex_to_lark

        # \d, \w and \s are those of ASCII, as in JSON Schema.
        inner = self._matcher(LLMatcher.grammar_from_regex(regex_to_lark(text, "dws")))
        if inner.is_error():
            # The library quotes the grammar around the expression, before and after what it says.
            _, _, message = inner.get_error().partition("(in regex): ")
            message = (message or inner.get_error()).partition("\n   1 |")[0]
            raise GrammarError(message.strip())
        return Matcher(inner)

    def _ebnf(self, text: str) -> Matcher:
        from llguidance import LLMatcher

        try:
            grammar = lark_of(read_ebnf(text))
        except RecursionError:
            raise GrammarError("the grammar is nested too deeply to be read") from None
        inner = self._matcher(LLMatcher.grammar_from_lark(grammar))
        if inner.is_error():
            raise GrammarError(_first_line(inner.get_error()))
        return Matcher(inner)

    def _matcher(self, grammar: str) -> LLMatcher:
        from llguidance import LLMatcher

        return LLMatcher(self._shared_vocabulary(), grammar, log_level=0)

    def _shared_vocabulary(self) -> LLTokenizer:
        """Made by the first grammar: for 129,280 tokens it takes a second."""
        from llguidance import LLTokenizer, TokenizerWrapper

        with self._making:
            if self._vocabulary is None:
                words = _Words(self._tokenizer, self._vocab_size)
                self._vocabulary = LLTokenizer(TokenizerWrapper(words))
            return self._vocabulary


class _Words:
    """The vocabulary in the form that the library reads; ids without text are in no grammar."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self.eos_token_id = tokenizer.eos_token_id
        self.bos_token_id = tokenizer.bos_token_id
        self.tokens = [tokenizer.bytes_of(token) for token in range(vocab_size)]
        self.special_token_ids = [i for i, text in enumerate(self.tokens) if not text]
        self._bytes = {text[0]: i for i, text in enumerate(self.tokens) if len(text) == 1}
        self._tokenizer = tokenizer

    def __call__(self, text: str) -> list[int]:
        """The tokens that a forced text is written with: the library allows no others. Where the
        tokenizer reads a special token, which is none of a text, it is written byte by byte."""
        whole = text.encode("utf-8")
        tokens = self._tokenizer.encode(text, add_bos=False)
        if b"".join(self.tokens[token] for token in tokens) == whole:
            return tokens
        return [self._bytes[byte] for byte in whole if byte in self._bytes]


def _first_line(message: str) -> str:
    return message.strip().partition("\n")[0]
