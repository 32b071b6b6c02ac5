"""How each request's next token is drawn: the sample phase's operands, and what its results mean.

    prepare(step) -> Draw              operands filled for the rows of a step that sample
    score(draw, sample)                then, for prompts that want log probabilities, more of them
    choices(draw, samples) -> Choice   by request, once both have run

Requests hold what their next token depends on besides the logits: parameters, grammar, the tokens
before it or only how many there are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
from numpy.typing import NDArray

from deepinfer_compile.runtime.arrays import Array
from deepinfer_compile.runtime.executor import Samples
from deepinfer_compile.runtime.grammar.errors import GrammarError
from deepinfer_compile.runtime.grammar.waiting import Structured
from deepinfer_compile.runtime.prompt_scores import PromptRow, PromptScores, distribution, fill
from deepinfer_compile.runtime.sampling import SamplingParams
from deepinfer_compile.runtime.scheduler import Choice, Failure, StepPlan, Work
from deepinfer_compile.runtime.settings import Drawing
from deepinfer_compile.runtime.token_counts import TokenCounts
from deepinfer_compile.runtime.token_mask import TokenMask

# Told every token of a request; true when its text now holds a stop string.
Watch = Callable[[int], bool]


@dataclass
class _Sampled:
    """A request: `generated` counts its tokens so far. `known` are all of them, the prompt's first,
    if they matter; `bias` are token ids and what is added. `free`: it never has a mask."""

    params: SamplingParams
    watch: Watch | None
    prompt_len: int
    known: list[int] | None
    bias: tuple[NDArray[np.int32], NDArray[np.float32]]
    free: bool
    generated: int = 0


@dataclass(frozen=True)
class Draw:
    """`ids`: the request of each sample row. `failed`: those that get no token, and why. `scored`:
    rows whose next prompt token wants its log probability."""

    ids: tuple[int, ...]
    failed: Mapping[int, Failure]
    scored: tuple[PromptRow, ...]


class Sampler:
    """The requests of one step loop, from submission to their last token. `rows` are the
    executor's row arrays."""

    def __init__(
        self,
        rows: Mapping[str, Array],
        structured: Structured,
        eos_token_id: int,
        drawing: Drawing,
    ) -> None:
        self._rows = rows
        self._structured = structured
        self._eos = eos_token_id
        self._drawing = drawing
        table = cast("NDArray[np.int32]", rows["token_counts"])
        self._counts = TokenCounts(table)
        self._mask = TokenMask(table.shape[1], drawing.blacklist)
        self._scores = PromptScores(rows, drawing.shortlist)
        self._requests: dict[int, _Sampled] = {}
        self._filled: tuple[int, ...] = ()  # whose parameters the operands hold

    def add(
        self, id: int, prompt: Sequence[int], params: SamplingParams, watch: Watch | None
    ) -> None:
        known = list(prompt) if params.penalises else None
        tokens = params.biased_ids
        values = [(params.logit_bias or {})[token] for token in tokens]
        bias = np.array(tokens, dtype=np.int32), np.array(values, dtype=np.float32)
        bounded = params.min_tokens or params.first_n_token_no_eos
        free = params.structure is None and not bounded and not self._drawing.blacklist
        self._requests[id] = _Sampled(params, watch, len(prompt), known, bias, free)
        if params.prompt_logprobs:
            self._scores.add(id, prompt, params)

    def forget(self, id: int) -> None:
        """The request has ended."""
        del self._requests[id]
        self._scores.take(id)

    def prepare(self, step: StepPlan) -> Draw:
        """Fill the operands of every request whose last row samples, but of those that have ended
        meanwhile or whose grammar allows no token."""
        ends = np.cumsum([work.count for work in step.work]).tolist()
        failed: dict[int, Failure] = {}
        drawn: list[Work] = []
        rows: list[int] = []
        masked: list[bool] = []
        for work, end in zip(step.work, ends, strict=True):
            if not work.samples or work.id not in self._requests:
                continue
            try:
                masked.append(self._masked(work.id, len(drawn)))
            except GrammarError as fault:
                failed[work.id] = Failure(str(fault))
                continue
            drawn.append(work)
            rows.append(end - 1)
        ids, scored = tuple(work.id for work in drawn), self._scores.rows_of(step)
        if ids != self._filled:
            self._fill_parameters(drawn)
        self._fill(drawn, {"sample_row": rows, "masked": masked})
        self._filled = () if scored else ids  # scores are taken with these operands
        return Draw(ids, failed, scored)

    def score(self, draw: Draw, sample: Callable[[int], Samples]) -> None:
        """Log probabilities of prompts. `sample` runs the phase: over the operands of the draw, so
        that its own run comes before, and over its tokens, but not its lists."""
        self._scores.run(draw.scored, sample)

    def choices(self, draw: Draw, samples: Samples | None) -> dict[int, Choice | Failure]:
        """What follows each request of a draw; `samples` is None if it has none."""
        chosen: dict[int, Choice | Failure] = dict(draw.failed)
        if samples is None:
            return chosen
        tokens, logprobs = samples.token.tolist(), samples.logprob.tolist()
        for i, id in enumerate(draw.ids):
            if id in self._requests:
                chosen[id] = self._choice(id, tokens[i], logprobs[i], samples, i)
        return chosen

    def _masked(self, id: int, row: int) -> bool:
        """Whether a request's next token has a mask, written to sample row `row`."""
        request = self._requests[id]
        if request.free:
            return False
        words = cast("NDArray[np.int32]", self._rows["allowed"][row])
        held = self._structured.fill(id, words)
        early = request.params.too_early(request.generated, self._eos)
        masked = self._mask.fill(words, held, early)
        if masked and not words.any():
            if held and not self._drawing.blacklist:
                raise GrammarError("so_args: the text is complete before min_tokens")
            raise GrammarError("no token is left by so_args, min_tokens and the blacklist")
        return masked

    def _fill_parameters(self, drawn: Sequence[Work]) -> None:
        """The operands that stay as long as the same requests are drawn."""
        requests = [self._requests[work.id] for work in drawn]
        params = [one.params for one in requests]
        for row, one in enumerate(requests):
            if count := len(one.bias[0]):
                self._rows["bias_token"][row, :count], self._rows["bias"][row, :count] = one.bias
        columns = distribution(params, self._drawing.shortlist) | {
            "biased": [len(one.bias[0]) for one in requests],
            "repetition": [one.repetition_penalty for one in params],
            "frequency": [one.frequency_penalty for one in params],
            "presence": [one.presence_penalty for one in params],
            "top_count": [one.top_logprobs for one in params],
            "summed": [self._drawing.sum_smaller] * len(drawn),
        }
        fill(self._rows, columns)
        seeds = np.array([one.seed for one in params], dtype=np.uint64)
        self._rows["seed"][: len(drawn)] = seeds.view(np.int64)

    def _fill(self, drawn: Sequence[Work], columns: dict[str, Sequence[float]]) -> None:
        """Those of this step."""
        counted: list[int] = []
        forced: list[int] = []
        for work in drawn:
            one = self._requests[work.id]
            if one.known is not None:
                self._counts.bring_up(work.slot, work.id, one.prompt_len, one.known)
            counted.append(0 if one.known is None else work.slot)
            forced.append(one.params.forced(one.generated) + 1)
        positions = [work.position + work.count for work in drawn]
        columns |= {"counted": counted, "forced": forced, "sample_position": positions}
        fill(self._rows, columns)

    def _choice(
        self, id: int, token: int, logprob: float, samples: Samples, i: int
    ) -> Choice | Failure:
        if fault := self._structured.take(id, token):
            return Failure(fault)
        request = self._requests[id]
        request.generated += 1
        if request.known is not None:
            request.known.append(token)
        watch, count = request.watch, request.params.top_logprobs
        top: tuple[tuple[int, float], ...] = ()
        if count:
            tokens, logprobs = samples.top_token[i, :count], samples.top_logprob[i, :count]
            top = tuple(zip(tokens.tolist(), logprobs.tolist(), strict=True))
        return Choice(
            token,
            logprob,
            top,
            stops=watch is not None and watch(token),
            prompt_logprobs=self._scores.take(id),
            smaller=float(samples.smaller[i]) if self._drawing.sum_smaller else -1.0,
        )
