"""What `run` prints: texts as they grow, or everything at the end as facts."""

from __future__ import annotations

import time

from deepinfer_compile.runtime.reply import Piece, RequestOutput


class Printer:
    """Prints prompts in order, each as soon as the ones before it are done."""

    def __init__(self, count: int, silent: bool) -> None:
        self.count = 0
        self.first = 0.0
        self._texts = ["" for _ in range(count)]
        self._tokens: list[list[RequestOutput]] = [[] for _ in range(count)]
        self._ends = ["" for _ in range(count)]  # why each ended
        self._current = 0
        self._silent = silent

    def add(self, piece: Piece) -> None:
        tokens = self._tokens[piece.index]
        if piece.token.num_output_tokens > len(tokens):  # else it ends without another token
            if not self.count:
                self.first = time.perf_counter()
            self.count += 1
            tokens.append(piece.token)
        self._ends[piece.index] = piece.token.finish_reason
        self._texts[piece.index] += piece.text
        if piece.index == self._current:
            self._print(piece.text)
        while self._current < len(self._texts) and self._ends[self._current]:
            self._print("\n")
            self._current += 1
            if self._current < len(self._texts):
                self._print(self._texts[self._current])

    def outputs(self, logprobs: bool) -> list[dict[str, object]]:
        """What --json says of each prompt."""
        return [
            {
                "text": text,
                "token_ids": [token.token_id for token in tokens],
                "finish_reason": end,
                **({"logprobs": [_logprobs(token) for token in tokens]} if logprobs else {}),
            }
            for text, tokens, end in zip(self._texts, self._tokens, self._ends, strict=True)
        ]

    def _print(self, text: str) -> None:
        if not self._silent:
            print(text, end="", flush=True)


def _logprobs(token: RequestOutput) -> dict[str, object]:
    top = zip(token.top_token_ids, token.top_logprobs, strict=True)
    return {
        "logprob": token.token_logprobs,
        "top": [{"token_id": id, "logprob": logprob} for id, logprob in top],
    }
