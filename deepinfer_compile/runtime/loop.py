"""The step loop: requests in, tokens out, one step of the engine at a time.

    submit(prompt, params) -> id        step() -> (Emitted, ...)

The scheduler decides, the executor runs; this file carries values between the two. A call of `step`
gives the device a step while the one before runs, then hands out the tokens of that one, and says
last how the new one is to sample:

    host      plan N+1, rows | tokens of N | operands of N+1 | plan N+2, rows | tokens of N+1 ...
    device    ... sample N   | forward N+1                     sample N+1     | forward N+2 ...
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from deepinfer_compile.format.plan import EnginePlan
from deepinfer_compile.runtime import scheduler
from deepinfer_compile.runtime.executor import Executor, Samples
from deepinfer_compile.runtime.grammar.pool import GrammarPool
from deepinfer_compile.runtime.grammar.waiting import Structured
from deepinfer_compile.runtime.late_binding import bind, rows_of
from deepinfer_compile.runtime.request_checks import check_params, check_prompt
from deepinfer_compile.runtime.request_rows import fill_rows, set_pages
from deepinfer_compile.runtime.sampler import Draw, Sampler, Watch
from deepinfer_compile.runtime.sampling import SamplingParams
from deepinfer_compile.runtime.scheduler import (
    Abort,
    Capacity,
    Emitted,
    Kind,
    Load,
    Preemption,
    Request,
    StepPlan,
)
from deepinfer_compile.runtime.scheduler.prefixes import page_names
from deepinfer_compile.runtime.settings import ALL_TOKENS, Drawing
from deepinfer_compile.runtime.snapshot import copy_slot
from deepinfer_compile.runtime.statistics import Statistics
from deepinfer_compile.runtime.stream import Pending, Stream


def capacity_of(plan: EnginePlan) -> Capacity:
    """What the scheduler needs to know of an engine."""
    rows = {phase.name: phase.max_rows for phase in plan.phases}
    limits = plan.limits
    return Capacity(
        requests=min(limits.max_requests, limits.slots - limits.snapshots - 1),
        snapshots=limits.snapshots,
        pages=limits.pages - 1,
        page_size=limits.page_size,
        max_context=limits.max_context,
        prefill_rows=rows["prefill"],
        decode_rows=rows["decode"],
        sample_rows=rows["sample"],
        eos_token_id=limits.eos_token_id,
    )


@dataclass(frozen=True)
class _Flight:
    """A step that was given to the device. Its samples are None if no row of it is sampled from."""

    step: StepPlan
    draw: Draw
    samples: Pending[Samples | None]


class StepLoop:
    """Requests of one engine, from submission to their last token. `grammars` makes the pool for
    those with `so_args`, when the first one comes. Not `asynchronous`, a step has ended when `step`
    returns; the tokens are the same."""

    def __init__(
        self,
        plan: EnginePlan,
        executor: Executor,
        preemption: Preemption = Preemption.RECOMPUTE,
        grammars: Callable[[], GrammarPool] | None = None,
        drawing: Drawing = ALL_TOKENS,
        *,
        asynchronous: bool = True,
        statistics: Statistics | None = None,
    ) -> None:
        self._plan = plan
        self._executor = executor
        self._state = scheduler.initial(capacity_of(plan), preemption)
        self._events: list[Request | Abort] = []
        eos = plan.limits.eos_token_id
        self._structured = Structured(grammars, eos)
        self._drawing = drawing
        self._sampler = Sampler(executor.rows, self._structured, eos, drawing)
        self._ended: list[Emitted] = []
        self._tokens: dict[int, list[int]] = {}
        self._next_id = 0
        self._stream = Stream(asynchronous=asynchronous)
        self._asynchronous = asynchronous
        self._flight: _Flight | None = None
        self._statistics = statistics or Statistics()

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
        check_params(self._plan, params, self._drawing)
        assert params.n == 1, "every answer is a request of its own"
        id, self._next_id = self._next_id, self._next_id + 1
        limits = self._plan.limits
        shares = limits.snapshots and not params.prompt_logprobs  # rows that do not run have none
        request = Request(
            id=id,
            prompt_len=len(prompt),
            max_tokens=params.max_tokens,
            ignore_eos=params.ignore_eos,
            stop_token_ids=params.stop_ids,
            priority=priority,
            pages=page_names(prompt, limits.page_size) if shares else (),
        )
        if params.structure is None:
            self._events.append(request)
        else:
            self._structured.submit(request, params.structure)
        self._statistics.arrived(id)
        self._tokens[id] = list(prompt)
        self._sampler.add(id, prompt, params, watch)
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
        return bool(waiting) or self._flight is not None or not scheduler.idle(self._state)

    def step(self) -> tuple[Emitted, ...]:
        """Give the device a step and hand out the tokens of the one before, or with nothing to do
        wait a moment for a grammar. Each request's last event carries its finish reason."""
        ready, failed = self._structured.ready()
        events, self._events = [*self._events, *ready], []
        ended, self._ended = [*self._ended, *failed], []
        self._state, step = scheduler.plan(self._state, events)
        if step.kind is not None:
            with self._stream.launching():
                self._launch(step, step.kind)
        emitted = (*ended, *step.ended, *self._settle())
        self._note(emitted)
        if step.kind is not None:
            self._flight = self._sample(step)
            if not self._asynchronous:
                tokens = self._settle()
                self._note(tokens)
                emitted = (*emitted, *tokens)
        elif self._structured.busy and not emitted:
            self._structured.wait()
        return emitted

    def close(self) -> None:
        """Wait for what the device still does; no step can follow."""
        self._stream.close()

    def _launch(self, step: StepPlan, kind: Kind) -> None:
        """The forward pass, by what is known of its rows."""
        if self._flight is None:
            self._statistics.begin()
        before = self._flight.draw.ids if self._flight is not None else ()
        drawn = {id: row for row, id in enumerate(before)}
        rows = rows_of(step.work, self._tokens, drawn)
        executor = self._executor

        def forward() -> None:
            for grown in step.grown:
                set_pages(executor, grown.slot, grown.pages, grown.first)
            for copy in step.restored:
                copy_slot(executor, copy.source, copy.target)
            count = fill_rows(executor, rows.spans)
            bind(executor, rows)
            executor.forward(kind.value, count)
            for copy in step.saved:
                copy_slot(executor, copy.source, copy.target)

        self._stream.run(forward)

    def _sample(self, step: StepPlan) -> _Flight:
        """The sample phase of the step that was launched: the tokens before it are known now."""
        draw = self._sampler.prepare(step)
        return _Flight(step, draw, self._stream.run(lambda: self._draw(draw)))

    def _draw(self, draw: Draw) -> Samples | None:
        executor, rows = self._executor, len(draw.ids)
        samples = executor.sample(rows) if rows else None
        self._sampler.score(draw, executor.sample)
        if samples is not None:  # where the next step looks for its tokens
            executor.sampled_tokens[:rows] = samples.token
        return samples

    def _settle(self) -> tuple[Emitted, ...]:
        """The tokens of the step in flight."""
        flight, self._flight = self._flight, None
        if flight is None:
            return ()
        sampled = self._sampler.choices(flight.draw, flight.samples.result())
        self._state, tokens = scheduler.commit(self._state, flight.step, sampled)
        self._statistics.ran(flight.step, len(flight.draw.ids), tokens)
        return tokens

    def _note(self, emitted: Sequence[Emitted]) -> None:
        """What events say of tokens and of requests that have ended."""
        self._statistics.note(emitted, self.load)
        for event in emitted:
            if event.choice is not None:
                self._tokens[event.id].append(event.choice.token)
            if event.finish is not None:
                del self._tokens[event.id]
                self._sampler.forget(event.id)
                self._structured.forget(event.id)
