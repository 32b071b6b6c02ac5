"""Log probabilities of prompts: the sample phase over a chunk's rows, the next token forced.

    prompt  t0 t1 t2 | t3 t4          rows of chunk 1: t0 t1 t2, forced t1 t2 t3
                                      rows of chunk 2: t3 t4,    forced t4, then one is drawn

A prompt's rows may come again after a preemption: they give the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from deepinfer_compile.runtime.arrays import Array
from deepinfer_compile.runtime.executor import Samples
from deepinfer_compile.runtime.sampling import SamplingParams
from deepinfer_compile.runtime.scheduler import StepPlan

# What changes a row's logits, or is not asked for.
_IDLE = ("biased", "counted", "masked", "top_count", "summed")


@dataclass(frozen=True)
class _Prompt:
    tokens: tuple[int, ...]
    params: SamplingParams
    logprobs: NDArray[np.float32]


@dataclass(frozen=True)
class PromptRow:
    """A row of the step, and the place in its prompt of the token that follows it."""

    row: int
    prompt: _Prompt
    place: int


class PromptScores:
    """The prompts of a step loop that want them, until their first token is drawn. `rows` are the
    executor's row arrays."""

    def __init__(self, rows: Mapping[str, Array], shortlist: int) -> None:
        self._rows = rows
        self._shortlist = shortlist
        self._prompts: dict[int, _Prompt] = {}

    def add(self, id: int, prompt: Sequence[int], params: SamplingParams) -> None:
        logprobs = np.zeros(len(prompt) - 1, dtype=np.float32)
        self._prompts[id] = _Prompt(tuple(prompt), params, logprobs)

    def take(self, id: int) -> tuple[float, ...]:
        """Those of a prompt that has been through the model; empty if it asked for none, or they
        were taken."""
        prompt = self._prompts.pop(id, None)
        return () if prompt is None else tuple(prompt.logprobs.tolist())

    def rows_of(self, step: StepPlan) -> tuple[PromptRow, ...]:
        """The rows of a step that are to be scored."""
        found: list[PromptRow] = []
        first = 0
        for work in step.work:
            if prompt := self._prompts.get(work.id):
                end = min(work.position + work.count, len(prompt.tokens) - 1)
                shift = first - work.position
                found += [PromptRow(shift + i, prompt, i + 1) for i in range(work.position, end)]
            first += work.count
        return tuple(found)

    def run(self, scored: Sequence[PromptRow], sample: Callable[[int], Samples]) -> None:
        """Score rows that went through the model, in portions of the sample phase."""
        most = len(self._rows["sample_row"])
        for first in range(0, len(scored), most):
            portion = scored[first : first + most]
            self._fill(portion)
            logprobs = sample(len(portion)).logprob
            for one, logprob in zip(portion, logprobs, strict=True):
                one.prompt.logprobs[one.place - 1] = logprob

    def _fill(self, portion: Sequence[PromptRow]) -> None:
        params = [one.prompt.params for one in portion]
        columns: dict[str, Sequence[float]] = {
            "sample_row": [one.row for one in portion],
            "forced": [one.prompt.tokens[one.place] + 1 for one in portion],
            **distribution(params, self._shortlist),
        }
        fill(self._rows, columns | dict.fromkeys(_IDLE, [0] * len(portion)))


def distribution(params: Sequence[SamplingParams], shortlist: int) -> dict[str, Sequence[float]]:
    """The operands that make logits a distribution."""
    return {
        "shortlist": [shortlist] * len(params),
        "temperature": [one.temperature for one in params],
        "top_p": [one.top_p for one in params],
        "top_k": [one.top_k for one in params],
        "min_p": [one.min_p for one in params],
    }


def fill(rows: Mapping[str, Array], columns: Mapping[str, Sequence[float]]) -> None:
    """Write the beginning of row arrays."""
    for name, values in columns.items():
        rows[name][: len(values)] = values
