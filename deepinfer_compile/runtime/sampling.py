"""`SamplingParams`: DeepInfer's names and defaults; what DeepInfer has not, `min_p`, `stop`,
`stop_token_ids`, penalties, `logit_bias` and `n`, as vLLM and the OpenAI API name them.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeGuard

from deepinfer_compile.runtime.errors import RequestError
from deepinfer_compile.runtime.grammar.asked import Structure, problems, structure_of

_GREEDY = 1e-5  # below it DeepInfer sharpens the softmax; here it is the exact arg max
_MOST_TOKENS = 2**31 - 1
_SEED_MASK = 2**64 - 1
_MOST_FLOAT = 3.4028234663852886e38  # the largest fp32
_MOST_FACTOR = 2.0**64  # a logit that it is applied to stays finite, over any temperature too
_MOST_ANSWERS = 128
_MOST_BIASED = 300  # as in the OpenAI API


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are chosen, and when to stop.

    Temperature 0 is greedy. Otherwise logits are divided by it and tokens put in order, of equal
    ones the lower id first; then `top_p` keeps a token if the mass before it is at most `top_p`,
    `top_k` the first `top_k` of those, and `min_p` those with at least `min_p` of the best one's
    probability. As in DeepInfer, top-p comes before top-k.

    Log probabilities are those of the distribution that is sampled from: after temperature and
    filters, -9999 for what is filtered out. Of greedy requests they are those of the logits, where
    DeepInfer divides by its least temperature. Every token has its own; `top_logprobs` adds the
    most likely tokens.

    Before all that, logits change in vLLM's order. `logit_bias` adds to those of up to 300 tokens.
    `repetition_penalty` divides positive logits of tokens in the prompt or the answer, and
    multiplies others; `frequency_penalty` is taken off for each time a token is in the answer,
    `presence_penalty` if it is there at all.

    `golden_token_ids` force what is generated: output i is entry i, -1 and what lies behind the end
    are free. A forced token has the log probability it would have had, and ends the request as a
    drawn one does; `min_tokens` does not hold it back. `prompt_logprobs` gives those of the tokens
    of the prompt but the first, each after all before it, at this temperature and with these
    filters, but without bias, penalties and masks.

    A prompt gets `n` answers: answer i is that of `seq_seed + i` alone.

    `stop` ends the text before the first of these strings to be completed, `stop_token_ids` at a
    token of these; neither is part of the text. Before `min_tokens` tokens none of these and no end
    token can come; `first_n_token_no_eos` 1 keeps the end token from being the first. `so_args`
    hold the text to a JSON schema, a regular expression or a grammar (docs/structured.md).
    `seq_seed` None draws 64 random bits once.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    ignore_eos: bool = False
    max_tokens: int = 16
    logprobs: int | None = None  # accepted and without effect, as in DeepInfer
    prompt_logprobs: bool = False
    top_logprobs: int = 0
    first_n_token_no_eos: int = 0
    eos_id: int = 0  # the engine's own end token is used, as in DeepInfer
    so_args: Mapping[str, object] | None = None
    golden_token_ids: Sequence[int] | None = None
    seq_seed: int | None = None
    min_p: float = 0.0
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    min_tokens: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] | None = None
    n: int = 1

    def __post_init__(self) -> None:
        problems = self._out_of_range()
        if problems:
            raise RequestError("E033", "sampling parameters cannot be served", notes=problems)
        if self.temperature < _GREEDY:  # filters change nothing about the most likely token
            object.__setattr__(self, "temperature", 0.0)
            object.__setattr__(self, "top_p", 1.0)
            object.__setattr__(self, "top_k", -1)
            object.__setattr__(self, "min_p", 0.0)
        object.__setattr__(self, "max_tokens", max(1, self.max_tokens))
        seed = secrets.randbits(64) if self.seq_seed is None else self.seq_seed & _SEED_MASK
        object.__setattr__(self, "seq_seed", seed)

    @property
    def seed(self) -> int:
        """The 64 bits that the request's random numbers come from."""
        assert self.seq_seed is not None
        return self.seq_seed

    @property
    def structure(self) -> Structure | None:
        """What `so_args` ask for."""
        return None if self.so_args is None else structure_of(self.so_args)

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """The stop tokens, without the end token."""
        return tuple(self.stop_token_ids or ())

    @property
    def golden_ids(self) -> tuple[int, ...]:
        """The tokens that are forced somewhere."""
        return tuple(token for token in self.golden_token_ids or () if token != -1)

    @property
    def biased_ids(self) -> tuple[int, ...]:
        """The tokens that have a bias, ascending."""
        return tuple(sorted(self.logit_bias or ()))

    @property
    def penalises(self) -> bool:
        """Whether logits depend on the tokens before."""
        penalties = (self.presence_penalty, self.frequency_penalty, self.repetition_penalty)
        return penalties != (0, 0, 1)

    @property
    def answers(self) -> tuple[SamplingParams, ...]:
        """The parameters of each of the `n` answers."""
        if self.n == 1:
            return (self,)
        return tuple(replace(self, n=1, seq_seed=self.seed + i) for i in range(self.n))

    def forced(self, generated: int) -> int:
        """The token that must come after so many, -1 for any."""
        golden = self.golden_token_ids or ()
        return golden[generated] if generated < len(golden) else -1

    def too_early(self, generated: int, eos_token_id: int) -> tuple[int, ...]:
        """Tokens that cannot come after so many."""
        if generated < self.min_tokens:
            return (eos_token_id, *self.stop_ids)
        first = generated == 0 and self.first_n_token_no_eos == 1  # DeepInfer: other values idle
        return (eos_token_id,) if first else ()

    def _out_of_range(self) -> list[str]:
        checks = (
            (
                "temperature",
                _number(self.temperature) and self.temperature >= 0,
                "finite, 0 or more",
            ),
            ("top_p", _number(self.top_p) and 0 < self.top_p <= 1, "over 0, at most 1"),
            ("top_k", self.top_k == -1 or _whole(self.top_k, 1, _MOST_TOKENS), "-1, or 1 or more"),
            ("min_p", _number(self.min_p) and 0 <= self.min_p <= 1, "0 to 1"),
            ("max_tokens", _whole(self.max_tokens, 0, _MOST_TOKENS), f"0 to {_MOST_TOKENS}"),
            ("min_tokens", _whole(self.min_tokens, 0, _MOST_TOKENS), f"0 to {_MOST_TOKENS}"),
            ("top_logprobs", _whole(self.top_logprobs, 0, 1000), "0 to 1000"),
            ("seq_seed", self.seq_seed is None or type(self.seq_seed) is int, "an integer or None"),
            ("stop", _each(self.stop, _text), "strings with at least one character"),
            ("stop_token_ids", _each(self.stop_token_ids, _token), "token ids"),
            ("golden_token_ids", _each(self.golden_token_ids, _golden), "token ids or -1"),
            ("prompt_logprobs", isinstance(self.prompt_logprobs, bool), "True or False"),
            ("presence_penalty", _within(self.presence_penalty, 2), "-2 to 2"),
            ("frequency_penalty", _within(self.frequency_penalty, 2), "-2 to 2"),
            (
                "repetition_penalty",
                _number(self.repetition_penalty)
                and 1 / _MOST_FACTOR <= self.repetition_penalty <= _MOST_FACTOR,
                "2**-64 to 2**64",
            ),
            (
                "logit_bias",
                self.logit_bias is None or _biases(self.logit_bias),
                f"at most {_MOST_BIASED} token ids, each with -100 to 100",
            ),
            ("n", _whole(self.n, 1, _MOST_ANSWERS), f"1 to {_MOST_ANSWERS}"),
        )
        found = [
            f"{name} must be {accepts}, found {getattr(self, name)!r}"
            for name, holds, accepts in checks
            if not holds
        ]
        if self.so_args is None:
            return found
        if self.golden_token_ids is not None:
            found.append("golden_token_ids cannot be held to so_args: give one of them")
        return found + problems(self.so_args)


def _number(value: object) -> TypeGuard[float]:
    """An int or float that fp32 holds; NaN compares false."""
    return isinstance(value, int | float) and abs(value) <= _MOST_FLOAT


def _each(value: object, accepts: Callable[[object], bool]) -> bool:
    """Nothing, or a sequence of acceptable entries; a string is a sequence of one."""
    if value is None or isinstance(value, str):
        return value is None or accepts(value)
    return isinstance(value, Sequence) and all(accepts(entry) for entry in value)


def _text(value: object) -> bool:
    return isinstance(value, str) and value != ""


def _token(value: object) -> bool:
    return _whole(value, 0, _MOST_TOKENS)


def _golden(value: object) -> bool:
    return _whole(value, -1, _MOST_TOKENS)


def _within(value: object, most: float) -> bool:
    return _number(value) and abs(value) <= most


def _biases(value: object) -> bool:
    return (
        isinstance(value, Mapping)
        and len(value) <= _MOST_BIASED
        and all(_token(token) and _within(bias, 100) for token, bias in value.items())
    )


def _whole(value: object, least: int, most: int) -> bool:
    return type(value) is int and least <= value <= most
