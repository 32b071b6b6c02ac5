"""The step loop: requests in, tokens out, one step of the engine at a time.

    submit(prompt, params) -> id        step() -> (Emitted, ...)

The scheduler decides, the executor runs; this file carries values between the two.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from deepinfer_compile.format.plan import EnginePlan
from deepinfer_compile.runtime import scheduler
from deepinfer_compile.runtime.errors import RequestError
from deepinfer_compile.runtime.executor import Executor
from deepinfer_compile.runtime.grammar.library import check_installed
from deepinfer_compile.runtime.grammar.pool import GrammarPool
from deepinfer_compile.runtime.grammar.waiting import Structured
from deepinfer_compile.runtime.request_rows import Span, fill_rows, set_pages
from deepinfer_compile.runtime.sampler import Sampler, Watch
from deepinfer_compile.runtime.sampling import SamplingParams
from deepinfer_compile.runtime.scheduler import (
    Abort,
    Capacity,
    Choice,
    Emitted,
    Failure,
    Load,
    Preemption,
    Request,
    StepPlan,
    Work,
)

_SHOWN = 5


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


def check_params(plan: EnginePlan, params: SamplingParams) -> None:
    """Refuse tokens that the engine has not, and what no installed package can do."""
    check_tokens(plan, params.stop_ids, "stop_token_ids")
    if params.structure is not None:
        check_tokens(plan, params.structure.tokens, "so_args has token ids")
        check_installed()


class StepLoop:
    """Requests of one engine, from submission to their last token. `grammars` makes the pool for
    those with `so_args`, when the first one comes."""

    def __init__(
        self,
        plan: EnginePlan,
        executor: Executor,
        preemption: Preemption = Preemption.RECOMPUTE,
        grammars: Callable[[], GrammarPool] | None = None,
    ) -> None:
        self._plan = plan
        self._executor = executor
        self._state = scheduler.initial(capacity_of(plan), preemption)
        self._events: list[Request | Abort] = []
        eos = plan.limits.eos_token_id
        self._structured = Structured(grammars, eos)
        self._sampler = Sampler(executor.rows, self._structured, eos)
        self._ended: list[Emitted] = []
        self._tokens: dict[int, list[int]] = {}
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
        check_params(self._plan, params)
        id, self._next_id = self._next_id, self._next_id + 1
        request = Request(
            id, len(prompt), params.max_tokens, params.ignore_eos, params.stop_ids, priority
        )
        if params.structure is None:
            self._events.append(request)
        else:
            self._structured.submit(request, params.structure)
        self._tokens[id] = list(prompt)
        self._sampler.add(id, params, watch)
        return id

    def abort(self, id: int) -> None:
        """End a request; its last event comes out of the next `step`."""
        ended = self._structured.abort(id)
        if ended is None:
            self._events.append(Abort(id))
        else:
            self._ended.append(ended)

    @property
    def load(self) -> Load:
        """How full the engine is, requests not counted that the next `step` takes in."""
        return scheduler.load(self._state)

    @property
    def busy(self) -> bool:
        waiting = self._events or self._ended or self._structured.busy
        return bool(waiting) or not scheduler.idle(self._state)

    def step(self) -> tuple[Emitted, ...]:
        """Run one step, or with nothing to run wait a moment for a grammar. Each request's last
        event carries its finish reason."""
        ready, failed = self._structured.ready()
        events, self._events = [*self._events, *ready], []
        ended, self._ended = [*self._ended, *failed], []
        self._state, step = scheduler.plan(self._state, events)
        emitted = (*ended, *step.ended)
        if step.kind is not None:
            sampled = self._run(step)
            self._state, tokens = scheduler.commit(self._state, step, sampled)
            emitted = (*emitted, *tokens)
        elif self._structured.busy and not emitted:
            self._structured.wait()
        for event in emitted:
            if event.choice is not None:
                self._tokens[event.id].append(event.choice.token)
            if event.finish is not None:
                del self._tokens[event.id]
                self._sampler.forget(event.id)
                self._structured.forget(event.id)
        return emitted

    def _run(self, step: StepPlan) -> dict[int, Choice | Failure]:
        for grown in step.grown:
            set_pages(self._executor, grown.slot, grown.pages, grown.first)
        assert step.kind is not None
        rows = fill_rows(self._executor, [self._span(work) for work in step.work])
        self._executor.forward(step.kind.value, rows)
        draw = self._sampler.prepare(step)
        if not draw.ids:
            return dict(draw.failed)
        return self._sampler.choices(draw, self._executor.sample(len(draw.ids)))

    def _span(self, work: Work) -> Span:
        tokens = self._tokens[work.id][work.position : work.position + work.count]
        return Span(work.slot, work.position, tuple(tokens))
