"""Engine against plain torch: `python -m tests.baseline.measure ENGINE CHECKPOINT`.

Each run is a fresh process on one thread; ours and torch's (fp32, and bf16 with --bf16) take turns,
and every run is a line. A run loads, reads `--prompt` random tokens, then feeds back `--tokens`
greedy ones, all twice: the first time warms up. Times exclude importing torch.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

Run = dict[str, float]
COLUMNS = ("load_s", "prefill_s", "tokens_per_s", "peak_mib")


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    p.add_argument("engine", type=Path)
    p.add_argument("checkpoint", type=Path, help="the folder the engine was compiled from")
    p.add_argument("--prompt", type=int, default=512)
    p.add_argument("--tokens", type=int, default=64)
    p.add_argument("--runs", type=int, default=3)
    p.add_argument("--bf16", action="store_true", help="torch in bf16 too")
    p.add_argument("--only", choices=("engine", "f32", "bf16"), help=argparse.SUPPRESS)
    a = p.parse_args()
    if a.only:
        print(json.dumps(_run(a)))
        return
    sides = ["engine", "f32", *(["bf16"] if a.bf16 else [])]
    print("side    ", *(f"{c:>13}" for c in COLUMNS))
    runs: dict[str, list[Run]] = {side: [] for side in sides}
    for _ in range(a.runs):
        for side in sides:
            command = [sys.executable, "-m", "tests.baseline.measure", *sys.argv[1:]]
            done = subprocess.run([*command, "--only", side], capture_output=True, check=True)
            runs[side].append(json.loads(done.stdout))
            _line(side, runs[side][-1])
    middle = {s: {c: statistics.median(r[c] for r in runs[s]) for c in COLUMNS} for s in sides}
    for side in sides:
        _line(f"{side}*", middle[side])
    best_rate = max(middle[s]["tokens_per_s"] for s in sides[1:])
    best_prefill = min(middle[s]["prefill_s"] for s in sides[1:])
    ours = middle["engine"]
    print(f"* median. decode {ours['tokens_per_s'] / best_rate:.2f}x, ", end="")
    print(f"prefill {best_prefill / ours['prefill_s']:.2f}x of the faster torch")


def _line(side: str, run: Run) -> None:
    print(f"{side:<8}", *(f"{run[c]:13.3f}" for c in COLUMNS), flush=True)


def _run(a: argparse.Namespace) -> Run:
    torch.set_num_threads(1)
    begin = time.perf_counter()
    generate = _engine(a) if a.only == "engine" else _torch(a)
    load = time.perf_counter() - begin
    seeded = torch.Generator().manual_seed(0)
    prompt = torch.randint(3, 250, (a.prompt,), generator=seeded).tolist()
    for _ in range(2):
        prefill, decode = generate(prompt, a.tokens)
    return {
        "load_s": load,
        "prefill_s": prefill,
        "tokens_per_s": a.tokens / decode,
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


Generate = Callable[[list[int], int], tuple[float, float]]


def _engine(a: argparse.Namespace) -> Generate:
    from deepinfer_compile.runtime import SamplingParams
    from deepinfer_compile.runtime.loader import load_engine
    from deepinfer_compile.runtime.loop import StepLoop

    engine = load_engine(a.engine, checkpoint=a.checkpoint, threads=1)

    def generate(prompt: list[int], tokens: int) -> tuple[float, float]:
        loop = StepLoop(engine.plan, engine.executor)
        params = SamplingParams(temperature=0, max_tokens=1 + tokens, ignore_eos=True)
        begin = time.perf_counter()
        loop.submit(prompt, params)
        while not loop.step():
            pass
        read = time.perf_counter()
        while loop.busy:
            loop.step()
        return read - begin, time.perf_counter() - read

    return generate


def _torch(a: argparse.Namespace) -> Generate:
    from tests.baseline.torch_model import State, TorchModel
    from tests.baseline.torch_weights import load_checkpoint

    dtype = torch.float32 if a.only == "f32" else torch.bfloat16
    model = TorchModel(load_checkpoint(a.checkpoint, dtype))

    def generate(prompt: list[int], tokens: int) -> tuple[float, float]:
        state = State()
        begin = time.perf_counter()
        token = int(model.forward(state, prompt).argmax())
        read = time.perf_counter()
        for _ in range(tokens):
            token = int(model.forward(state, [token]).argmax())
        return read - begin, time.perf_counter() - read

    return generate


if __name__ == "__main__":
    main()
