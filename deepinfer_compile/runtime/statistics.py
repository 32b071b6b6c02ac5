"""What a step loop does over its last steps, in DeepInfer's words, and a log line of it.

    [stats] steps=400 prompt_TPS=812.5 completion_TPS=96.1 running=8 pending=2 ... MFU=4.1%

Throughput is over the steps of a window, from the beginning of the first until now. Operations are
those that the rows of a step ask for at their positions: attention counts the keys that a row sees,
the indexer the entries that it scores. `bench` and rooflines count them as at the longest context.
Times are seconds of an injected clock.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from time import monotonic

from deepinfer_compile.format.entries import PerEntry
from deepinfer_compile.format.manifest import KernelRecord
from deepinfer_compile.format.plan import EnginePlan
from deepinfer_compile.format.roofline import fixed_flops_per_row
from deepinfer_compile.runtime.scheduler import Emitted, Finish, Kind, Load, StepPlan

WINDOW = 100  # steps
_LOG = logging.getLogger(__name__)

StepFlops = Callable[[StepPlan, int], int]  # a step, and how many rows it samples from


@dataclass(frozen=True)
class Stats:
    """Of one moment. Counts of requests are since loading; rates, shares and waits to the first
    token are of the window; 0 where nothing happened. Rates are per second, waits are seconds.

    `prefill_share`, `decode_share`: of the time in steps. `reused_share`: of the prompt tokens that
    were looked for among kept pages, those found there. `peak_share`: of the operations that the
    machine of the manifest could have done between the window's first step and its last (MFU).
    """

    steps: int
    prompt_tokens_rate: float
    completion_tokens_rate: float
    running: int
    waiting: int
    page_usage: float
    prefill_share: float
    decode_share: float
    reused_share: float
    first_token_mean: float
    first_token_max: float
    finished: int
    aborted: int
    preempted: int
    flops_rate: float
    peak_share: float

    def __str__(self) -> str:
        return (
            f"[stats] steps={self.steps} "
            f"prompt_TPS={self.prompt_tokens_rate:.1f} "
            f"completion_TPS={self.completion_tokens_rate:.1f} "
            f"running={self.running} pending={self.waiting} "
            f"KV_cache_usage={self.page_usage:.1%} "
            f"prefill_time={self.prefill_share:.1%} decode_time={self.decode_share:.1%} "
            f"prefill_caching_rate={self.reused_share:.1%} "
            f"TTFT_mean={self.first_token_mean:.3f} TTFT_max={self.first_token_max:.3f} "
            f"finished={self.finished} preempted={self.preempted} aborted={self.aborted} "
            f"GFLOPs={self.flops_rate / 1e9:.2f} MFU={self.peak_share:.1%}"
        )


@dataclass(frozen=True)
class _Step:
    """`waits`: of the requests whose first token it made."""

    began: float
    seconds: float
    kind: Kind
    prompt_tokens: int
    completion_tokens: int
    flops: int
    waits: tuple[float, ...]


class Statistics:
    """Told by one step loop, in its thread; `stats` may be asked from any. A line is logged after
    every `interval` steps, none for 0. `peak`: operations per second of the machine."""

    def __init__(
        self,
        flops: StepFlops = lambda step, sampled: 0,
        peak: float = 0.0,
        *,
        interval: int = 0,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._flops_of = flops
        self._peak = peak
        self._interval = interval
        self._clock = clock
        self._window: deque[_Step] = deque(maxlen=WINDOW)
        self._arrived: dict[int, float] = {}  # those that have no token yet
        self._began = 0.0
        self._due = False
        self.steps = 0
        self.flops = 0
        self.finished = 0
        self.aborted = 0

    def arrived(self, id: int) -> None:
        """A request was taken in."""
        self._arrived[id] = self._clock()

    def begin(self) -> None:
        """A step is given to an idle device. The next ones begin when the one before has run."""
        self._began = self._clock()

    def ran(self, step: StepPlan, sampled: int, tokens: Sequence[Emitted]) -> None:
        """The oldest step that has not run has, `sampled` rows of it were sampled from, and these
        tokens came out of it."""
        assert step.kind is not None
        began, self._began = self._began, self._clock()
        rows = sum(work.count for work in step.work)
        flops = self._flops_of(step, sampled)
        first = [event.id for event in tokens if event.choice and event.id in self._arrived]
        waits = tuple(self._began - self._arrived.pop(id) for id in first)
        prompt_tokens = rows if step.kind is Kind.PREFILL else 0
        made = sum(event.choice is not None for event in tokens)
        seconds = self._began - began
        self._window.append(_Step(began, seconds, step.kind, prompt_tokens, made, flops, waits))
        self.steps += 1
        self.flops += flops
        self._due = self._interval > 0 and self.steps % self._interval == 0

    def note(self, events: Sequence[Emitted], load: Load) -> None:
        """Of all events, those that end a request are counted; then the line that may be due is
        logged."""
        for event in events:
            if event.finish is not None:
                self._arrived.pop(event.id, None)
                self.aborted += event.finish is Finish.ABORT
                self.finished += event.finish is not Finish.ABORT
        if self._due:
            self._due = False
            _LOG.info("%s", self.stats(load))

    def stats(self, load: Load) -> Stats:
        """As of now; `load`: of the same loop."""
        window = list(self._window)
        first = window[0].began if window else 0.0
        span = window[-1].began + window[-1].seconds - first if window else 0.0
        until_now = self._clock() - first if window else 0.0
        busy = {kind: sum(s.seconds for s in window if s.kind is kind) for kind in Kind}
        waits = [wait for step in window for wait in step.waits]
        flops_rate = _ratio(sum(step.flops for step in window), span)
        return Stats(
            steps=self.steps,
            prompt_tokens_rate=_ratio(sum(s.prompt_tokens for s in window), until_now),
            completion_tokens_rate=_ratio(sum(s.completion_tokens for s in window), until_now),
            running=load.running,
            waiting=load.waiting,
            page_usage=load.page_usage,
            prefill_share=_ratio(busy[Kind.PREFILL], sum(busy.values())),
            decode_share=_ratio(busy[Kind.DECODE], sum(busy.values())),
            reused_share=_ratio(load.prefix_hits, load.prefix_queries),
            first_token_mean=_ratio(sum(waits), len(waits)),
            first_token_max=max(waits, default=0.0),
            finished=self.finished,
            aborted=self.aborted,
            preempted=load.preemptions,
            flops_rate=flops_rate,
            peak_share=_ratio(flops_rate, self._peak),
        )


def step_flops(plan: EnginePlan, records: Mapping[str, KernelRecord]) -> StepFlops:
    """Operations of a step's launches for the positions of its rows, exactly as if counted row by
    row; the time it takes does not depend on how many rows a request has."""
    of_phase = {
        (phase.name, bucket): _sum(records[step.at(bucket).kernel] for step in phase.steps)
        for phase in plan.phases
        for bucket in phase.buckets
    }
    buckets = {phase.name: phase.buckets for phase in plan.phases}

    def launches(phase: str, rows: int) -> _Flops:
        return of_phase[phase, next(bucket for bucket in buckets[phase] if rows <= bucket)]

    def flops(step: StepPlan, sampled: int) -> int:
        assert step.kind is not None
        spans = [(work.position, work.count) for work in step.work]
        rows = sum(count for _, count in spans)
        forward = launches(step.kind.value, rows)
        total = rows * forward.per_row
        total += sum(part.flops * part.entries(spans) for part in forward.per_entry)
        return total + (sampled * launches("sample", sampled).per_row if sampled else 0)

    return flops


@dataclass(frozen=True)
class _Flops:
    """Of all launches of a phase: of each row, whatever its position, and of its entries."""

    per_row: int
    per_entry: tuple[PerEntry, ...]


def _sum(records: Iterable[KernelRecord]) -> _Flops:
    """Kernels that work on equally many entries count as one."""
    per_row, of_entry = 0, Counter[tuple[int, int, int]]()
    for record in records:
        per_row += fixed_flops_per_row(record)
        for part in record.per_entry:
            of_entry[part.ratio, part.most, part.block] += part.flops
    return _Flops(per_row, tuple(PerEntry(flops, *key) for key, flops in of_entry.items()))


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole > 0 else 0.0
