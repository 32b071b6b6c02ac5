"""What a bench measures: defaults that fit the engine, refusals of what does not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from deepinfer_compile.format.plan import EnginePlan
from deepinfer_compile.runtime.errors import RequestError
from deepinfer_compile.runtime.loop import capacity_of

_CONTEXT = 256


@dataclass(frozen=True)
class Ask:
    """Decode steps of `rows` requests with `context` tokens each, `tokens` steps a run; prefill of
    a prompt of `prompt` tokens. Each is timed `runs` times."""

    rows: tuple[int, ...]
    prompt: int
    context: int
    tokens: int
    runs: int


def settle(
    plan: EnginePlan,
    rows: Sequence[int] | None,
    prompt: int | None,
    context: int | None,
    tokens: int,
    runs: int,
    csv: Path | None,
) -> Ask:
    """What was asked, None replaced by defaults. E022 with all that this engine cannot run."""
    capacity, limits = capacity_of(plan), plan.limits
    most = min(capacity.requests, capacity.decode_rows, capacity.sample_rows)
    smallest = next(phase.buckets[0] for phase in plan.phases if phase.name == "decode")
    asked = tuple(sorted(set(rows or (min(smallest, most), most))))
    if prompt is None:
        prompt = min(capacity.prefill_rows, limits.max_context - 1)
    if context is None:
        held = capacity.pages // max(1, *asked) * limits.page_size
        context = max(1, min(_CONTEXT, limits.max_context - tokens, held - tokens))
    ask = Ask(asked, prompt, context, tokens, runs)
    problems = _problems(plan, ask, most)
    if csv is not None and not csv.absolute().parent.is_dir():
        problems.append(f"--csv {csv}: its folder does not exist")
    if problems:
        raise RequestError("E022", "this cannot be measured", notes=problems, help="ask for less")
    return ask


def _problems(plan: EnginePlan, ask: Ask, most: int) -> list[str]:
    limits = plan.limits
    counts = {
        "--prompt": ask.prompt,
        "--context": ask.context,
        "--tokens": ask.tokens,
        "--runs": ask.runs,
    }
    problems = [
        f"{name} {count}: 1 or more is expected" for name, count in counts.items() if count < 1
    ]
    outside = [count for count in ask.rows if not 1 <= count <= most]
    problems += [
        f"--rows {count}: this engine decodes 1 to {most}, each a request of its own "
        f"(max_rows {limits.max_rows}, max_requests {limits.max_requests})"
        for count in outside
    ]
    if ask.prompt >= limits.max_context:
        problems.append(f"--prompt {ask.prompt}: this engine takes {limits.max_context - 1} tokens")
    length = ask.context + ask.tokens
    if length > limits.max_context:
        problems.append(
            f"--context {ask.context} and --tokens {ask.tokens} are {length} positions: "
            f"this engine holds {limits.max_context}"
        )
    needs = [("--prompt", 1, ask.prompt)]
    needs += [(f"--rows {count}", count, length) for count in ask.rows if count not in outside]
    for name, requests, positions in needs:
        pages = requests * -(-positions // limits.page_size)
        if pages > limits.pages - 1:
            problems.append(f"{name}: needs {pages} pages, this engine has {limits.pages - 1}")
    return problems
