"""A batch as the user writes it: token ids, and what goes with every prompt and every answer."""

from __future__ import annotations

from collections.abc import Sequence
from operator import index

from deepinfer_compile.runtime.errors import RequestError
from deepinfer_compile.runtime.sampling import SamplingParams


def whole(ids: Sequence[int]) -> list[int]:
    """Token ids as integers; nothing is rounded."""
    try:
        return [index(token) for token in ids]
    except TypeError as other:
        raise RequestError("E031", f"token ids are whole numbers: {other}") from None


def params_of(
    given: SamplingParams | Sequence[SamplingParams] | None, count: int
) -> list[SamplingParams]:
    """Of every prompt. E024: as many were not given."""
    if given is None:
        return [SamplingParams() for _ in range(count)]
    if isinstance(given, SamplingParams):
        return [given] * count
    if len(given) != count:
        raise RequestError("E024", f"{count} prompts, but {len(given)} sampling_params")
    return list(given)


def answers_of(
    batch: Sequence[list[int]],
    params: Sequence[SamplingParams],
    priority: Sequence[int] | None,
) -> tuple[list[list[int]], list[SamplingParams], list[int]]:
    """Prompt, parameters and priority of every answer; a prompt's answers stand together."""
    ranks = [0] * len(batch) if priority is None else list(priority)
    if len(ranks) != len(batch):
        raise RequestError("E024", f"{len(batch)} prompts, but {len(ranks)} priorities")
    asked = list(zip(batch, params, ranks, strict=True))
    return (
        [prompt for prompt, one, _ in asked for _ in range(one.n)],
        [answer for _, one, _ in asked for answer in one.answers],
        [rank for _, one, rank in asked for _ in range(one.n)],
    )
