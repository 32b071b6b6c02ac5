"""How long a plan takes with many pages: `python -m tests.baseline.scheduling`.

Prompts of their own go through schedulers of a small and a large pool until every page is kept;
then plans are timed, in microseconds. No engine runs.
"""

from __future__ import annotations

import statistics
import time

from deepinfer_compile.runtime.scheduler import (
    Capacity,
    Choice,
    Kind,
    Request,
    commit,
    idle,
    initial,
    plan,
)
from deepinfer_compile.runtime.scheduler.prefixes import page_names

PAGE = 128
PROMPT = 400 * PAGE + 5


def main() -> None:
    print("pages    step      median      most")
    for pages in (5_000, 524_288):
        times = _times(pages)
        for kind in Kind:
            found = times[kind]
            print(f"{pages:<8} {kind:<8} {statistics.median(found):8.0f} {max(found):10.0f}")


def _times(pages: int) -> dict[Kind, list[float]]:
    state = initial(
        Capacity(
            requests=64,
            snapshots=128,
            pages=pages,
            page_size=PAGE,
            max_context=1 << 20,
            prefill_rows=4096,
            decode_rows=64,
            sample_rows=64,
            eos_token_id=1,
        )
    )
    times: dict[Kind, list[float]] = {kind: [] for kind in Kind}
    filled = pages * PAGE // PROMPT + 2
    for id in range(filled + 20):
        names = page_names([id] * PROMPT, PAGE)
        events = [Request(id, PROMPT, 4, True, pages=names)]
        while events or not idle(state):
            begin = time.perf_counter()
            state, step = plan(state, events)
            if id >= filled and step.kind is not None:
                times[step.kind].append((time.perf_counter() - begin) * 1e6)
            sampled = {work.id: Choice(5, -1.0) for work in step.work if work.samples}
            state, _ = commit(state, step, sampled)
            events = []
    return times


if __name__ == "__main__":
    main()
