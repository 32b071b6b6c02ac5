"""What becomes of a request's events: outputs under DeepInfer's names, and text."""

from __future__ import annotations

from dataclasses import dataclass

from deepinfer_compile.runtime.scheduler import Choice, Emitted
from deepinfer_compile.runtime.text_stream import TextStream

_LEAST_LOGPROB = -9999.0  # DeepInfer's floor


@dataclass(frozen=True)
class RequestOutput:
    """One generated token, under DeepInfer's names. `finish_reason` is empty while running.

    `top_token_ids` are the most likely tokens, `SamplingParams.top_logprobs` of them or the whole
    vocabulary, and `top_logprobs` theirs. Log probabilities are as `SamplingParams` says, at least
    -9999; those of the prompt come with the first token. A request that ends without another token
    has a last output that repeats `token_id`, as DeepInfer does; `num_output_tokens` is then what
    it was. `error` says why a grammar failed. `num_cached_tokens` of the prompt were in the cache
    already, from earlier requests. `sum_smaller_probs` is the probability of the tokens less likely
    than this one, and of equally likely ones up to its id, itself included; -1 without
    DEEPINFER_COMPUTE_SUM_SMALLER_PROBS.
    """

    request_id: int
    prompt_len: int
    token_id: int
    finish_reason: str
    finished: bool
    token_logprobs: float
    num_output_tokens: int
    top_logprobs: tuple[float, ...] = ()
    top_token_ids: tuple[int, ...] = ()
    draft_tok: int = 1
    accept_tok: int = 1
    error: str = ""
    num_cached_tokens: int = 0
    prompt_logprobs: tuple[float, ...] = ()
    sum_smaller_probs: float = -1.0


@dataclass(frozen=True)
class Piece:
    """The characters that can be shown since the last token, of answer number `index`: the `n` of
    the first prompt come first, then those of the next."""

    index: int
    text: str
    token: RequestOutput


class Reply:
    """One request's outputs as they come. `last` is its newest token, at first the prompt's."""

    def __init__(self, prompt_len: int, last: int, text: TextStream | None) -> None:
        self.text = text
        self._prompt_len = prompt_len
        self._last = last
        self._count = 0
        self._failure: Exception | None = None

    def watch(self, token: int) -> bool:
        """A token was sampled; true when the text now holds a stop string, or cannot go on: the
        step is everybody's, so `piece` raises what went wrong."""
        try:
            return self.text is not None and self.text.add(token)
        except Exception as failure:
            self._failure = failure
            return True

    def output(self, event: Emitted) -> RequestOutput:
        """The event for the user; with the last one the text is complete."""
        choice = event.choice
        if choice is None:
            choice = Choice(self._last, _LEAST_LOGPROB)
        else:
            self._last = choice.token
            self._count += 1
        if self.text is not None and event.finish is not None:
            self.text.close()
        return RequestOutput(
            request_id=event.id,
            prompt_len=self._prompt_len,
            token_id=choice.token,
            finish_reason="" if event.finish is None else event.finish.value,
            finished=event.finish is not None,
            token_logprobs=max(choice.logprob, _LEAST_LOGPROB),
            num_output_tokens=self._count,
            top_logprobs=tuple(max(logprob, _LEAST_LOGPROB) for _, logprob in choice.top),
            top_token_ids=tuple(token for token, _ in choice.top),
            error=event.error,
            num_cached_tokens=event.reused,
            prompt_logprobs=tuple(max(one, _LEAST_LOGPROB) for one in choice.prompt_logprobs),
            sum_smaller_probs=choice.smaller,
        )

    def piece(self, index: int, event: Emitted) -> Piece:
        """The event with the text it completes; raises what its text failed with."""
        if self._failure is not None:
            raise self._failure
        output = self.output(event)
        return Piece(index, self.text.take() if self.text else "", output)
