"""How each request's next token is drawn: the sample phase's operands, and what its results mean.

    prepare(step) -> Draw              operands filled for the rows of a step that sample
    choices(draw, samples) -> Choice   by request, once the phase has run

Requests hold what their next token depends on besides the logits: parameters, grammar, how many
tokens there are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from deepinfer_compile.runtime.arrays import Array
from deepinfer_compile.runtime.executor import Samples
from deepinfer_compile.runtime.grammar.errors import GrammarError
from deepinfer_compile.runtime.grammar.waiting import Structured
from deepinfer_compile.runtime.sampling import SamplingParams
from deepinfer_compile.runtime.scheduler import Choice, Failure, StepPlan

# Told every token of a request; true when its text now holds a stop string.
Watch = Callable[[int], bool]


@dataclass
class _Sampled:
    """A request: `generated` counts its tokens so far."""

    params: SamplingParams
    watch: Watch | None
    generated: int = 0


@dataclass(frozen=True)
class Draw:
    """`ids`: the request of each sample row. `failed`: those that get no token, and why."""

    ids: tuple[int, ...]
    failed: Mapping[int, Failure]


class Sampler:
    """The requests of one step loop, from submission to their last token. `rows` are the
    executor's row arrays."""

    def __init__(
        self, rows: Mapping[str, Array], structured: Structured, eos_token_id: int
    ) -> None:
        self._rows = rows
        self._structured = structured
        self._eos = eos_token_id
        self._requests: dict[int, _Sampled] = {}

    def add(self, id: int, params: SamplingParams, watch: Watch | None) -> None:
        self._requests[id] = _Sampled(params, watch)

    def forget(self, id: int) -> None:
        """The request has ended."""
        del self._requests[id]

    def prepare(self, step: StepPlan) -> Draw:
        """Fill the operands of every request whose last row samples, but of those that have ended
        meanwhile or whose grammar allows no token."""
        ends = np.cumsum([work.count for work in step.work]).tolist()
        words = self._rows["allowed"]
        failed: dict[int, Failure] = {}
        ids: list[int] = []
        rows: list[int] = []
        positions: list[int] = []
        masked: list[bool] = []
        for work, end in zip(step.work, ends, strict=True):
            if not work.samples or work.id not in self._requests:
                continue
            try:
                masked.append(self._mask(work.id, words[len(ids)]))
            except GrammarError as fault:
                failed[work.id] = Failure(str(fault))
                continue
            ids.append(work.id)
            rows.append(end - 1)
            positions.append(work.position + work.count)
        self._fill(ids, rows, positions, masked)
        return Draw(tuple(ids), failed)

    def choices(self, draw: Draw, samples: Samples | None) -> dict[int, Choice | Failure]:
        """What follows each request of a draw. `samples` None: none was drawn."""
        if samples is None:
            return dict(draw.failed)
        pairs = zip(samples.token.tolist(), samples.logprob.tolist(), strict=True)
        chosen = {
            id: self._choice(id, token, logprob, samples, i)
            for i, (id, (token, logprob)) in enumerate(zip(draw.ids, pairs, strict=True))
            if id in self._requests
        }
        return {**draw.failed, **chosen}

    def _mask(self, id: int, words: NDArray[np.int32]) -> bool:
        """Whether a request's next token has a mask, written to `words`."""
        request = self._requests[id]
        held = self._structured.fill(id, words)
        early = request.params.too_early(request.generated, self._eos)
        if not early:
            return held
        if not held:
            words[:] = -1
        for token in early:
            words.view(np.uint32)[token // 32] &= np.uint32(~(1 << token % 32) & 0xFFFFFFFF)
        if held and not words.any():
            raise GrammarError("so_args: the text is complete before min_tokens")
        return True

    def _fill(
        self,
        ids: Sequence[int],
        rows: Sequence[int],
        positions: Sequence[int],
        masked: Sequence[bool],
    ) -> None:
        params = [self._requests[id].params for id in ids]
        columns: dict[str, Sequence[float]] = {
            "sample_row": rows,
            "masked": masked,
            "temperature": [one.temperature for one in params],
            "top_p": [one.top_p for one in params],
            "top_k": [one.top_k for one in params],
            "min_p": [one.min_p for one in params],
            "top_count": [one.top_logprobs for one in params],
            "sample_position": positions,
        }
        for name, values in columns.items():
            self._rows[name][: len(rows)] = values
        seeds = np.array([one.seed for one in params], dtype=np.uint64)
        self._rows["seed"][: len(rows)] = seeds.view(np.int64)

    def _choice(
        self, id: int, token: int, logprob: float, samples: Samples, i: int
    ) -> Choice | Failure:
        if fault := self._structured.take(id, token):
            return Failure(fault)
        request = self._requests[id]
        request.generated += 1
        watch, count = request.watch, request.params.top_logprobs
        top: tuple[tuple[int, float], ...] = ()
        if count:
            tokens, logprobs = samples.top_token[i, :count], samples.top_logprob[i, :count]
            top = tuple(zip(tokens.tolist(), logprobs.tolist(), strict=True))
        return Choice(token, logprob, top, watch is not None and watch(token))
