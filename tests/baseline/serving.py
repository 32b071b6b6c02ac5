"""What serving costs beside the kernels: `python -m tests.baseline.serving ENGINE [CHECKPOINT]`.

    host        what the host does per decode step, and how much of it the device does not wait for
    batch       tokens per second of many requests together and one after another
    prefix      time to first token of a prompt that is new and of one that was asked before

Modes take turns within a table, every run is a line. Times are wall clock; `device` is time inside
the engine's library, planned ahead with the wait for Python's lock after it. The part of the host's
time that is hidden is what a step planned ahead is shorter by. An engine of 256 requests:
`--set engine.max_requests=256 --set engine.max_rows=256`.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from pathlib import Path

from deepinfer_compile.runtime import LLM, SamplingParams
from deepinfer_compile.runtime.loop import StepLoop

GREEDY = {"temperature": 0.0, "ignore_eos": True}


class Device:
    """Counts the seconds inside the library."""

    def __init__(self, llm: LLM) -> None:
        self.seconds = 0.0
        executor = llm.engine.executor
        self._run = executor.run
        executor.run = self._timed  # type: ignore[method-assign]

    def _timed(self, phase: str, rows: int, first: int, last: int) -> None:
        begin = time.perf_counter()
        self._run(phase, rows, first, last)
        self.seconds += time.perf_counter() - begin


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    p.add_argument("engine", type=Path)
    p.add_argument("checkpoint", type=Path, nargs="?")
    p.add_argument("--runs", type=int, default=3)
    p.add_argument("--tokens", type=int, default=100, help="of each answer")
    p.add_argument("--prompt", type=int, default=400, help="tokens of the prefix table's prompts")
    a = p.parse_args()
    llm = LLM(a.engine, checkpoint=a.checkpoint, threads=1)
    device = Device(llm)
    most = llm.engine.plan.limits.max_requests
    counts = [n for n in (1, 8, 64, 256) if n <= most]
    _host(llm, device, counts, a.tokens, a.runs)
    _batch(llm, counts[-1], a.tokens, a.runs)
    _prefix(llm, a.prompt, a.runs)
    llm.close()


def _loop(llm: LLM, *, ahead: bool = True) -> StepLoop:
    """As the LLM would make it, with nothing kept from another."""
    engine = llm.engine
    return StepLoop(engine.plan, engine.executor, asynchronous=ahead, statistics=llm.statistics)


def _decode(llm: LLM, device: Device, count: int, tokens: int, ahead: bool) -> tuple[float, float]:
    """Seconds of a decode step of `count` requests: all of it, and inside the library."""
    loop = _loop(llm, ahead=ahead)
    for i in range(count):
        loop.submit([5 + i % 200] * 4, SamplingParams(max_tokens=tokens, **GREEDY))
    steps: list[tuple[float, float]] = []
    while loop.busy:
        device.seconds, begin = 0.0, time.perf_counter()
        loop.step()
        steps.append((time.perf_counter() - begin, device.seconds))
    loop.close()
    middle = steps[len(steps) // 4 : len(steps) * 3 // 4]  # decode only, all of them running
    return (
        statistics.median(wall for wall, _ in middle),
        statistics.median(inside for _, inside in middle),
    )


def _host(llm: LLM, device: Device, counts: list[int], tokens: int, runs: int) -> None:
    print("decode step, ms           requests   step  device   host")
    for count in counts:
        found: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
        for _ in range(runs):
            for ahead in (False, True):
                wall, inside = _decode(llm, device, count, tokens, ahead)
                found[ahead].append((wall, inside))
                name = "planned ahead" if ahead else "one by one"
                figures = (wall * 1e3, inside * 1e3, (wall - inside) * 1e3)
                print(f"{name:<25} {count:>8}", *(f"{x:6.3f}" for x in figures), flush=True)
        host = statistics.median(wall - inside for wall, inside in found[False])
        whole, ahead_whole = (
            statistics.median(wall for wall, _ in found[ahead]) for ahead in (False, True)
        )
        hidden = (whole - ahead_whole) / host
        print(f"* {count} requests: host {host * 1e3:.3f} ms a step, {hidden:.0%} of it hidden")


def _batch(llm: LLM, count: int, tokens: int, runs: int) -> None:
    print(f"\ntokens per second, {count} requests")
    for _ in range(runs):
        rates = []
        for together in (False, True):
            loop = _loop(llm)
            begin = time.perf_counter()
            for i in range(count):
                loop.submit([5 + i % 200] * 4, SamplingParams(max_tokens=tokens, **GREEDY))
                while not together and loop.busy:
                    loop.step()
            while loop.busy:
                loop.step()
            rates.append(count * tokens / (time.perf_counter() - begin))
            loop.close()
        print(f"one after another {rates[0]:8.0f}   together {rates[1]:8.0f}", flush=True)


def _prefix(llm: LLM, length: int, runs: int) -> None:
    print(f"\nfirst token of {length}, ms")
    for run in range(runs):
        loop = _loop(llm)
        rng = random.Random(run)
        prompt = [rng.randrange(3, 250) for _ in range(length)]
        cold, again = (_first_token(loop, prompt) for _ in range(2))
        loop.close()
        print(f"new {cold * 1e3:8.2f}   asked before {again * 1e3:8.2f}", flush=True)


def _first_token(loop: StepLoop, prompt: list[int]) -> float:
    begin = time.perf_counter()
    loop.submit(prompt, SamplingParams(max_tokens=1, **GREEDY))
    while not loop.step():
        pass
    seconds = time.perf_counter() - begin
    while loop.busy:
        loop.step()
    return seconds


if __name__ == "__main__":
    main()
