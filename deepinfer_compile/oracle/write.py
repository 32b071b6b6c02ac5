"""Write an engine's `oracle/`; returns what the manifest says of it.

A model too large to walk gets fingerprints of its weights and no prompt, and says so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from deepinfer_compile.format import jsons
from deepinfer_compile.format.oracle import ORACLE, VALUES, Oracle, Point, fingerprint
from deepinfer_compile.format.plan import EnginePlan
from deepinfer_compile.format.recipes import names_of
from deepinfer_compile.ir.graph import Graph
from deepinfer_compile.oracle.reference import Answers, ask
from deepinfer_compile.oracle.stored import Stored
from deepinfer_compile.package.weights import Tensors, write_tensors
from deepinfer_compile.spec.load import ModelSpec

# The walker decodes every matrix it meets to float64, on one thread: a minute for as much as this.
WALKED_BYTES = 256 << 20
# The most that a row may be off, and a log probability: docs/oracle.md has the reasons.
MOST_ERROR = 5e-3
MOST_LOGPROB_ERROR = 5e-3
_STORED = {torch.bfloat16: "BF16", torch.int32: "I32", torch.int64: "I64", torch.uint8: "I8"}


def write_oracle(
    folder: Path,
    spec: ModelSpec,
    graphs: tuple[Graph, ...],
    plan: EnginePlan,
    stored: Stored,
    progress: Callable[[int, int], None],
) -> str:
    """`graphs` are those the plan was made of; `progress` gets buffers done and in total."""
    weights = _fingerprints(plan, stored, progress)
    (folder / ORACLE).parent.mkdir()
    if plan.memory.weights > WALKED_BYTES:
        oracle = Oracle((), 0, {}, (), (), MOST_ERROR, MOST_LOGPROB_ERROR, weights)
        size, most = plan.memory.weights / 1e9, WALKED_BYTES / 1e9
        said = f"fingerprints only: {size:.1f} GB, the reference walks up to {most:.1f} GB"
        write_tensors(folder / VALUES, {})
    else:
        planned = {graph.name: graph for graph in graphs}
        answers = ask(spec, planned, stored)
        numbers = {buffer.name: i for i, buffer in enumerate(plan.buffers)}
        oracle = _oracle(answers, numbers, weights)
        decoded = len(answers.tokens) - answers.prefilled
        said = f"fingerprints, {answers.prefilled} prompt tokens, {decoded} decode steps"
        write_tensors(folder / VALUES, _values(answers, numbers))
    (folder / ORACLE).write_text(jsons.dump(oracle), encoding="utf-8")
    return said


def _fingerprints(
    plan: EnginePlan, stored: Stored, progress: Callable[[int, int], None]
) -> dict[str, str]:
    buffers = [
        (plan.buffers[buffer].name, names)
        for recipe in plan.weights
        if not recipe.pattern.startswith("@")
        for buffer, names in names_of(recipe)
    ]
    found = {}
    for done, (buffer, names) in enumerate(buffers):
        found[buffer] = fingerprint([stored.bytes_of(name) for name in names])
        progress(done + 1, len(buffers))
    return found


def _buffer(numbers: Mapping[str, int], phase: str, value: str) -> str:
    """The plan's name of a value's buffer: its own where the host reads it."""
    return value if value in numbers else f"{phase}:{value}"


def _oracle(answers: Answers, numbers: Mapping[str, int], weights: Mapping[str, str]) -> Oracle:
    return Oracle(
        tokens=answers.tokens,
        prefilled=answers.prefilled,
        points={
            phase: tuple(
                Point(
                    place.part,
                    place.planned_step,
                    tuple(numbers[_buffer(numbers, phase, value)] for value in place.values),
                )
                for place in places
            )
            for phase, places in answers.places.items()
        },
        next_tokens=answers.next_tokens,
        logprobs=answers.logprobs,
        most_error=MOST_ERROR,
        most_logprob_error=MOST_LOGPROB_ERROR,
        weights=weights,
    )


def _values(answers: Answers, numbers: Mapping[str, int]) -> Tensors:
    tensors = {}
    for run, values in enumerate(answers.values):
        phase = "decode" if run else "prefill"
        for name, value in values.items():
            data = value.contiguous().view(torch.uint8).numpy().tobytes()
            key = f"{run}/{_buffer(numbers, phase, name)}"
            tensors[key] = (_STORED[value.dtype], tuple(value.shape), data)
    return tensors
