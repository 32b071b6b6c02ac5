"""The step loop: requests in, tokens out, one step of the engine at a time.

    submit(prompt, params) -> id        step() -> (Emitted, ...)

The scheduler decides, the executor runs; this file carries values between the two.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from deepinfer_compile.format.plan import EnginePlan
from deepinfer_compile.runtime import scheduler
from deepinfer_compile.runtime.errors import RequestError
from deepinfer_compile.runtime.executor import Executor, Samples
from deepinfer_compile.runtime.request_rows import Span, fill_rows, set_pages
from deepinfer_compile.runtime.sampling import SamplingParams
from deepinfer_compile.runtime.scheduler import (
    Abort,
    Capacity,
    Choice,
    Emitted,
    Load,
    Preemption,
    Request,
    StepPlan,
    Work,
)

_SHOWN = 5

# Told every token of a request; true when its text now holds a stop string.
Watch = Callable[[int], bool]


def capacity_of(plan: EnginePlan) -> Capacity:
    """What the scheduler needs to know of an engine."""
    rows = {phase.name: phase.max_rows for phase in plan.phases}
    limits = plan.limits
    return Capacity(
        requests=min(limits.max_requests, limits.slots - 1),
        pages=limits.pages - 1,
        page_size=limits.page_size,
        max_context=limits.max_context,
        prefill_rows=rows["prefill"],
        decode_rows=rows["decode"],
        sample_rows=rows["sample"],
        eos_token_id=limits.eos_token_id,
    )


def check_prompt(plan: EnginePlan, prompt: Sequence[int]) -> None:
    """Refuse what could never run, with what was found and what the engine holds."""
    limits = plan.limits
    if not prompt:
        raise RequestError("E030", "the prompt is empty", help="give at least one token")
    check_tokens(plan, prompt, "token ids")
    if len(prompt) >= limits.max_context:
        raise RequestError(
            "E032",
            f"the prompt has {len(prompt)} tokens, this engine takes {limits.max_context - 1}",
            notes=[f"max_context {limits.max_context} includes at least one generated token"],
            help="shorten the prompt, or compile with a larger engine.max_context",
        )


def check_tokens(plan: EnginePlan, tokens: Sequence[int], what: str) -> None:
    """Refuse ids that name no token, all at once."""
    vocabulary = plan.limits.vocab_size
    outside = [token for token in tokens if not 0 <= token < vocabulary]
    if outside:
        shown = ", ".join(str(token) for token in outside[:_SHOWN])
        more = f" and {len(outside) - _SHOWN} more" if len(outside) > _SHOWN else ""
        raise RequestError(
            "E031",
            f"{what} outside the vocabulary: {shown}{more}",
            notes=[f"this engine knows 0 to {vocabulary - 1}"],
        )


class StepLoop:
    """Requests of one engine, from submission to their last token."""

    def __init__(
        self,
        plan: EnginePlan,
        executor: Executor,
        preemption: Preemption = Preemption.RECOMPUTE,
    ) -> None:
        self._plan = plan
        self._executor = executor
        self._state = scheduler.initial(capacity_of(plan), preemption)
        self._events: list[Request | Abort] = []
        self._tokens: dict[int, list[int]] = {}
        self._params: dict[int, SamplingParams] = {}
        self._watches: dict[int, Watch] = {}
        self._next_id = 0

    def submit(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        watch: Watch | None = None,
        priority: int = 0,
    ) -> int:
        """Queue a request; its first token comes out of a later `step`. `watch` looks for the stop
        strings of `params`: this loop knows no text. A smaller `priority` is served first."""
        check_prompt(self._plan, prompt)
        check_tokens(self._plan, params.stop_ids, "stop_token_ids")
        id, self._next_id = self._next_id, self._next_id + 1
        self._events.append(
            Request(
                id, len(prompt), params.max_tokens, params.ignore_eos, params.stop_ids, priority
            )
        )
        self._tokens[id] = list(prompt)
        self._params[id] = params
        if watch is not None:
            self._watches[id] = watch
        return id

    def abort(self, id: int) -> None:
        """End a request; its last event comes out of the next `step`."""
        self._events.append(Abort(id))

    @property
    def load(self) -> Load:
        """How full the engine is, requests not counted that the next `step` takes in."""
        return scheduler.load(self._state)

    @property
    def busy(self) -> bool:
        return bool(self._events) or not scheduler.idle(self._state)

    def step(self) -> tuple[Emitted, ...]:
        """Run one step. Each request's last event carries its finish reason."""
        events, self._events = self._events, []
        self._state, step = scheduler.plan(self._state, events)
        emitted = step.ended
        if step.kind is not None:
            sampled = self._run(step)
            self._state, tokens = scheduler.commit(self._state, step, sampled)
            emitted = (*emitted, *tokens)
        for event in emitted:
            if event.choice is not None:
                self._tokens[event.id].append(event.choice.token)
            if event.finish is not None:
                del self._tokens[event.id]
                del self._params[event.id]
                self._watches.pop(event.id, None)
        return emitted

    def _run(self, step: StepPlan) -> dict[int, Choice]:
        for grown in step.grown:
            set_pages(self._executor, grown.slot, grown.pages, grown.first)
        assert step.kind is not None
        rows = fill_rows(self._executor, [self._span(work) for work in step.work])
        self._executor.forward(step.kind.value, rows)
        return self._sample(step)

    def _span(self, work: Work) -> Span:
        tokens = self._tokens[work.id][work.position : work.position + work.count]
        return Span(work.slot, work.position, tuple(tokens))

    def _sample(self, step: StepPlan) -> dict[int, Choice]:
        """What follows each request whose last row samples."""
        ends = np.cumsum([work.count for work in step.work])
        chosen = [(work, end) for work, end in zip(step.work, ends, strict=True) if work.samples]
        if not chosen:
            return {}
        self._fill([work for work, _ in chosen], [int(end) - 1 for _, end in chosen])
        samples = self._executor.sample(len(chosen))
        pairs = zip(samples.token.tolist(), samples.logprob.tolist(), strict=True)
        return {
            work.id: self._choice(work.id, token, logprob, samples, i)
            for i, ((work, _), (token, logprob)) in enumerate(zip(chosen, pairs, strict=True))
        }

    def _fill(self, sampled: Sequence[Work], rows: Sequence[int]) -> None:
        """Sample rows: which rows of the step they are, and how each is sampled."""
        params = [self._params[work.id] for work in sampled]
        columns: dict[str, Sequence[float]] = {
            "sample_row": rows,
            "temperature": [one.temperature for one in params],
            "top_p": [one.top_p for one in params],
            "top_k": [one.top_k for one in params],
            "min_p": [one.min_p for one in params],
            "top_count": [one.top_logprobs for one in params],
            "sample_position": [work.position + work.count for work in sampled],
        }
        for name, values in columns.items():
            self._executor.rows[name][: len(rows)] = values
        seeds = np.array([one.seed for one in params], dtype=np.uint64)
        self._executor.rows["seed"][: len(rows)] = seeds.view(np.int64)

    def _choice(self, id: int, token: int, logprob: float, samples: Samples, i: int) -> Choice:
        watch, count = self._watches.get(id), self._params[id].top_logprobs
        top: tuple[tuple[int, float], ...] = ()
        if count:
            ids, logprobs = samples.top_token[i, :count], samples.top_logprob[i, :count]
            top = tuple(zip(ids.tolist(), logprobs.tolist(), strict=True))
        return Choice(token, logprob, top, watch is not None and watch(token))
