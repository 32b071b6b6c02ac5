"""What a scheduler is told of requests, and what it says of them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple


class Finish(StrEnum):
    """Why a request ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    PROMPT_LENGTH_EXCEEDED = "prompt_length_exceeded"
    INSUFFICIENT_SYSTEM_RESOURCE = "insufficient_system_resource"
    GRAMMAR = "xgrammar runtime errors or timeout"  # DeepInfer's words, whatever the library


@dataclass(frozen=True)
class Request:
    """`max_tokens` bounds what is generated; `ignore_eos` goes on after the end token, but not
    after one of `stop_token_ids`. A smaller `priority` is served first. `pages` names the full
    pages of the prompt; without names nothing is shared."""

    id: int
    prompt_len: int
    max_tokens: int
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    priority: int = 0
    pages: tuple[bytes, ...] = ()


@dataclass(frozen=True)
class Abort:
    """Stop a request wherever it is; unknown ids are ignored: it may just have ended."""

    id: int


class Choice(NamedTuple):
    """A sampled token. `top`: the most likely ones with their log probabilities, as many as asked
    for. `stops`: its text completes a stop string. `prompt_logprobs`: beside the first token.
    `smaller`: the probability of less likely tokens. Empty and -1 if not asked for."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    stops: bool = False
    prompt_logprobs: tuple[float, ...] = ()
    smaller: float = -1.0


@dataclass(frozen=True)
class Failure:
    """In the place of a token: the request's grammar allows none, and why."""

    error: str


class Emitted(NamedTuple):
    """A sampled token, or with `choice` None the end of a request that gets no more. `reused`
    tokens of its prompt were there already when it was last admitted."""

    id: int
    choice: Choice | None
    finish: Finish | None
    error: str = ""
    reused: int = 0
