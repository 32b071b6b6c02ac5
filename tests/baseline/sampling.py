"""What drawing a token costs at the real vocabulary: `python -m tests.baseline.sampling`.

Microseconds of the CPU kernel for one row of 129,280 normal logits times four, the best of --runs,
for rows that ask for more and more.
"""

from __future__ import annotations

import argparse
import ctypes
import time

import torch

from tests.kernels.harness import Range, library_of, node_of, plan_of, render, storage
from tests.kernels.sampling import op_for, words_of
from tests.sample_operands import operands

VOCAB = 129_280
FILTERS = {
    "greedy": {},
    "temperature 1": {"temperature": 1.0},
    "top-p 0.9": {"temperature": 1.0, "top_p": 0.9},
    "top-k 50": {"temperature": 1.0, "top_k": 50},
}


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    p.add_argument("--runs", type=int, default=60)
    runs = p.parse_args().runs
    changes = _changes()
    print(f"{'':<14}", *(f"{name:>15}" for name in changes))
    for name, filters in FILTERS.items():
        figures = (_time(runs, **filters, **change) for change in changes.values())
        print(f"{name:<14}", *(f"{x:15.0f}" for x in figures), flush=True)


def _changes() -> dict[str, dict[str, object]]:
    seeded = torch.Generator().manual_seed(0)
    allowed = torch.rand(1, VOCAB, generator=seeded) < 0.5
    counts = torch.zeros(3, VOCAB, dtype=torch.int32)
    counts[1, torch.randint(VOCAB, (2000,), generator=seeded)] = 2
    tokens = torch.randperm(VOCAB, generator=seeded)[:300].sort().values
    return {
        "as it is": {},
        "masked": {"masked": 1, "allowed": words_of(allowed)},
        "penalised": {
            "counted": 1,
            "token_counts": counts,
            "repetition": 1.2,
            "frequency": 0.5,
            "presence": 0.5,
        },
        "300 biases": {"biased": 300, "bias_token": tokens[None], "bias": torch.ones(1, 300)},
        "shortlist 1000": {"shortlist": 1000},
        "summed": {"summed": 1},
    }


def _time(runs: int, **arrays: object) -> float:
    logits = 4 * torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(1))
    tensors, types = operands(logits, **arrays)
    op = op_for(logits)
    plan = plan_of(op, types)
    function = getattr(library_of(render(plan)), str(plan.name))
    fresh = [storage(value.type, 1) for value in node_of(op, types).outputs]
    held = [t.contiguous() for t in (*tensors, *fresh)]
    pointers = [ctypes.c_void_p(t.data_ptr()) for t in held]
    items = Range(0, plan.items.at(1))
    best = float("inf")
    for _ in range(runs):
        begin = time.perf_counter()
        function(items, ctypes.c_int32(1), *pointers)
        best = min(best, time.perf_counter() - begin)
    return best * 1e6


if __name__ == "__main__":
    main()
