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
        for i, (work, end) in enumerate(chosen):
            self._fill(i, work, end - 1)
        samples = self._executor.sample(len(chosen))
        return {work.id: self._choice(samples, i, work.id) for i, (work, _) in enumerate(chosen)}

    def _fill(self, i: int, work: Work, row: int) -> None:
        """Sample row `i`: what is sampled, and how."""
        arrays, params = self._executor.rows, self._params[work.id]
        arrays["sample_row"][i] = row
        arrays["temperature"][i] = params.temperature
        arrays["top_p"][i] = params.top_p
        arrays["top_k"][i] = params.top_k
        arrays["min_p"][i] = params.min_p
        arrays["top_count"][i] = params.top_logprobs
        arrays["seed"][i] = np.uint64(params.seed).astype(np.int64)
        arrays["sample_position"][i] = work.position + work.count

    def _choice(self, samples: Samples, i: int, id: int) -> Choice:
        token, watch = int(samples.token[i]), self._watches.get(id)
        count = self._params[id].top_logprobs
        ids, logprobs = samples.top_token[i, :count], samples.top_logprob[i, :count]
        return Choice(
            token=token,
            logprob=float(samples.logprob[i]),
            top=tuple(zip(ids.tolist(), logprobs.tolist(), strict=True)),
            stops=watch is not None and watch(token),
        )
