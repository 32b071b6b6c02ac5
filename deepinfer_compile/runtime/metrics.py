"""What a serving loop counts, and its text for Prometheus.

Names are vLLM's under our prefix (`deepinfer:num_requests_running`), so that dashboards need one
replacement. Times are seconds of an injected clock: a test decides how late it is.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from time import monotonic

from deepinfer_compile.runtime.scheduler import Emitted, Finish, Load

PREFIX = "deepinfer:"
_FIRST = (0.001, 0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_BETWEEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
_WHOLE = (0.1, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0)


@dataclass
class Histogram:
    """Seconds, counted by upper bounds."""

    bounds: Sequence[float]
    counts: list[int] = field(init=False)
    total: float = 0.0

    def __post_init__(self) -> None:
        self.counts = [0] * (len(self.bounds) + 1)

    def add(self, seconds: float) -> None:
        self.counts[bisect_left(self.bounds, seconds)] += 1
        self.total += seconds


@dataclass
class _Request:
    """When it came, and when its newest token did."""

    arrived: float
    newest: float | None = None


class Metrics:
    """Counts of one step loop. Written by the loop's thread; `text` may be asked from any."""

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._requests: dict[int, _Request] = {}
        self.prompt_tokens = 0
        self.generation_tokens = 0
        self.finished: Counter[Finish] = Counter()
        self.first_token = Histogram(_FIRST)
        self.between_tokens = Histogram(_BETWEEN)
        self.whole_request = Histogram(_WHOLE)

    def arrived(self, id: int, prompt_tokens: int) -> None:
        """A request was taken in."""
        self._requests[id] = _Request(self._clock())
        self.prompt_tokens += prompt_tokens

    def emitted(self, event: Emitted) -> None:
        """A token, or an end, of a request that arrived."""
        now, request = self._clock(), self._requests[event.id]
        if event.choice is not None:
            self.generation_tokens += 1
            if request.newest is None:
                self.first_token.add(now - request.arrived)
            else:
                self.between_tokens.add(now - request.newest)
            request.newest = now
        if event.finish is not None:
            self.finished[event.finish] += 1
            self.whole_request.add(now - request.arrived)
            del self._requests[event.id]

    def text(self, load: Load, flops: int, labels: Mapping[str, str]) -> str:
        """Prometheus' text format, version 0.0.4. `flops`: done so far; `labels` are on every
        sample."""
        gauges = {
            "num_requests_running": ("requests with a slot", load.running),
            "num_requests_waiting": ("requests without one", load.waiting),
            "kv_cache_usage_perc": ("used part of the cache pages, 0 to 1", load.page_usage),
        }
        counters = {
            "num_preemptions_total": ("requests that lost their slot", load.preemptions),
            "prefix_cache_queries_total": ("prompt tokens looked for", load.prefix_queries),
            "prefix_cache_hits_total": ("prompt tokens found", load.prefix_hits),
            "prompt_tokens_total": ("tokens of prompts", self.prompt_tokens),
            "generation_tokens_total": ("tokens generated", self.generation_tokens),
            "estimated_flops_per_gpu_total": ("operations of the steps that ran", flops),
        }
        histograms = {
            "time_to_first_token_seconds": ("from arrival", self.first_token),
            "inter_token_latency_seconds": ("between tokens of a request", self.between_tokens),
            "e2e_request_latency_seconds": ("from arrival to the end", self.whole_request),
        }
        lines: list[str] = []
        for name, (help, value) in gauges.items():
            lines += [*_head(name, help, "gauge"), _sample(name, labels, value)]
        for name, (help, count) in counters.items():
            lines += [*_head(name, help, "counter"), _sample(name, labels, count)]
        name = "request_success_total"
        lines += _head(name, "requests that ended, by reason", "counter")
        for reason in Finish:
            own = {**labels, "finished_reason": reason.value}
            lines.append(_sample(name, own, self.finished[reason]))
        for name, (help, histogram) in histograms.items():
            lines += [*_head(name, help, "histogram"), *_buckets(name, labels, histogram)]
        return "\n".join(lines) + "\n"


def _head(name: str, help: str, kind: str) -> tuple[str, str]:
    return f"# HELP {PREFIX}{name} {help}", f"# TYPE {PREFIX}{name} {kind}"


def _buckets(name: str, labels: Mapping[str, str], histogram: Histogram) -> Iterator[str]:
    bounds = [*(repr(bound) for bound in histogram.bounds), "+Inf"]
    counts = tuple(histogram.counts)  # the loop's thread goes on counting
    for bound, count in zip(bounds, accumulate(counts), strict=True):
        yield _sample(f"{name}_bucket", {**labels, "le": bound}, count)
    yield _sample(f"{name}_sum", labels, histogram.total)
    yield _sample(f"{name}_count", labels, sum(counts))


def _sample(name: str, labels: Mapping[str, str], value: float) -> str:
    said = ",".join(f'{key}="{_escaped(text)}"' for key, text in labels.items())
    return f"{PREFIX}{name}{{{said}}} {value!r}"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
