"""What `run` prints: texts as they grow, or everything at the end as facts."""

from __future__ import annotations

import time

from deepinfer_compile.runtime.llm import Piece, RequestOutput


class Printer:
    """Prints prompts in order, each as soon as the ones before it are done."""

    def __init__(self, count: int, silent: bool) -> None:
        self.count = 0
        self.first = 0.0
        self._texts = ["" for _ in range(count)]
        self._tokens: list[list[RequestOutput]] = [[] for _ in range(count)]
        self._current = 0
        self._silent = silent

    def add(self, piece: Piece) -> None:
        if not self.count:
            self.first = time.perf_counter()
        self.count += 1
        self._texts[piece.index] += piece.text
        self._tokens[piece.index].append(piece.token)
        if piece.index == self._current:
            self._print(piece.text)
        while self._current < len(self._texts) and self._finished(self._current):
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
                "finish_reason": tokens[-1].finish_reason,
                **({"logprobs": [_logprobs(token) for token in tokens]} if logprobs else {}),
            }
            for text, tokens in zip(self._texts, self._tokens, strict=True)
        ]

    def _finished(self, index: int) -> bool:
        tokens = self._tokens[index]
        return bool(tokens) and tokens[-1].finished

    def _print(self, text: str) -> None:
        if not self._silent:
            print(text, end="", flush=True)


def _logprobs(token: RequestOutput) -> dict[str, object]:
    top = zip(token.top_token_ids, token.top_logprobs, strict=True)
    return {
        "logprob": token.token_logprobs,
        "top": [{"token_id": id, "logprob": logprob} for id, logprob in top],
    }
