"""The text of one request as it may be shown: nothing that belongs to a stop string ever is.

    tokens "Hel" "lo S" "TO" "P now"   stop "STOP"   shown  "Hel" "lo " "" ""

What could still become a stop string is held back until it is one or cannot be. The string that is
completed first ends the text, and of those completed by the same character the longest: so the
text does not depend on where tokens are cut.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from deepinfer_compile.runtime.tokenizer import Detokenizer, Tokenizer


class TextStream:
    """Tokens in with `add`, text out with `take`; after the last token, `close`."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        stops: Sequence[str] = (),
        stop_token_ids: Collection[int] = (),
    ) -> None:
        self._detokenizer = Detokenizer(tokenizer)
        self._stops = stops
        self._stop_token_ids = stop_token_ids
        self._shown = ""  # may be taken
        self._held = ""  # a beginning of a stop string, or nothing
        self._stopped = False

    def add(self, token: int) -> bool:
        """The next token; true when the text now holds a stop string, which ends it."""
        if token not in self._stop_token_ids:
            self._extend(self._detokenizer.add(token))
        return self._stopped

    def take(self) -> str:
        """What has become text since the last call."""
        text, self._shown = self._shown, ""
        return text

    def close(self) -> None:
        """No token follows: what was held back is text."""
        self._extend(self._detokenizer.finish())
        self._shown += self._held
        self._held = ""

    def _extend(self, piece: str) -> None:
        if self._stopped:
            return
        text = self._held + piece
        begin = self._first_stop(text)
        self._stopped = begin is not None
        keep = len(text) - self._pending(text) if begin is None else begin
        self._shown += text[:keep]
        self._held = "" if self._stopped else text[keep:]

    def _first_stop(self, text: str) -> int | None:
        """Where the stop string that is completed first begins."""
        found = [(text.find(stop), len(stop)) for stop in self._stops]
        ends = [(begin + length, begin) for begin, length in found if begin >= 0]
        return min(ends)[1] if ends else None

    def _pending(self, text: str) -> int:
        """The length of the longest end of `text` that a stop string begins with."""
        return max(
            (
                length
                for stop in self._stops
                for length in range(1, min(len(stop), len(text) + 1))
                if text.endswith(stop[:length])
            ),
            default=0,
        )
