"""Is the engine ready? Its weights and its numbers on this machine, against `oracle/`.

    check_weights   every weight buffer has the bytes the engine was compiled from
    check_numbers   a prompt, stopped between layers: each must make of the reference's inputs what
                    the reference made of them, and the tokens after it must be the reference's

docs/oracle.md has the formula and where the tolerances come from. All that disagrees is named.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import cast

import numpy as np
from numpy.typing import NDArray

from deepinfer_compile.format.oracle import VALUES, Oracle, Point, fingerprint
from deepinfer_compile.format.plan import EnginePlan
from deepinfer_compile.format.recipes import names_of
from deepinfer_compile.runtime.arrays import Array, bf16_to_f32, f32_to_bf16
from deepinfer_compile.runtime.errors import EngineError, NotReady
from deepinfer_compile.runtime.executor import Executor
from deepinfer_compile.runtime.files import EngineFiles
from deepinfer_compile.runtime.memory import Bytes
from deepinfer_compile.runtime.request_rows import RequestRows
from deepinfer_compile.runtime.shards import TensorView, read_tensors
from deepinfer_compile.runtime.weights import WeightSource

Floats = NDArray[np.float64]
_ROWS = 0.5  # of a part's rows must be within it: a tie may send a row to another expert
_LOGPROBS = "log probabilities"
_SHOWN = 20
_SLOT = 1


def check_weights(
    oracle: Oracle, plan: EnginePlan, source: WeightSource, weights: Mapping[int, Bytes]
) -> None:
    """E470: weights that are not those the engine was compiled from, by tensor."""
    problems = []
    for recipe in plan.weights:
        for buffer, names in names_of(recipe):
            wanted = oracle.weights.get(plan.buffers[buffer].name)
            if wanted is not None and fingerprint([weights[buffer]]) != wanted:
                tensor = f"`{names[0]}`"
                if len(names) > 1:
                    tensor = f"one of {tensor} ... `{names[-1]}`"
                problems.append(f"{tensor}: other bytes than the engine was compiled from")
    if problems:
        raise NotReady(
            "E470",
            "the engine is not ready: its weights are other ones, "
            f"in {len(problems)} of {len(oracle.weights)} places",
            where=f"{source.place} ({source.reason})",
            notes=_few(problems),
            help="point to the checkpoint it was compiled from, or compile an engine for this one",
        )


def check_numbers(oracle: Oracle, executor: Executor, files: EngineFiles) -> None:
    """E471: what this machine computes is not what the reference did, by layer."""
    if not oracle.tokens:
        return
    trial = Trial(oracle, executor, read_tensors(files.path / VALUES, files.map(VALUES)))
    trial.run()
    problems = trial.problems()
    if problems:
        raise NotReady(
            "E471",
            "the engine is not ready: it does not compute here what the reference computes",
            where=str(files.path),
            notes=_few(problems),
            help="look for the cause in the first part named; do not serve what this engine says",
        )


@dataclass
class Trial:
    """The oracle's prompt on an executor whose state is fresh; leaves it used."""

    oracle: Oracle
    executor: Executor
    values: Mapping[str, TensorView]
    errors: dict[tuple[str, str], list[Floats]] = field(default_factory=dict)

    def run(self) -> None:
        """Collect the error of every row, by phase and part."""
        rows = RequestRows(self.executor, _SLOT)
        sampled = 0
        for run, (phase, position, tokens) in enumerate(self.oracle.runs):
            rows.fill(tokens, position)
            done = 0
            for point in self.oracle.points[phase]:
                self.executor.run(phase, len(tokens), done, point.step)
                done = point.step
                self._compare(run, phase, point, len(tokens))
            self._sample(sampled, len(tokens))
            sampled += len(tokens)

    def problems(self) -> list[str]:
        """Parts that are off, as found and as allowed."""
        oracle, found = self.oracle, []
        for (phase, part), errors in self.errors.items():
            rows = np.concatenate(errors)
            most = oracle.most_logprob_error if part == _LOGPROBS else oracle.most_error
            error = float(np.quantile(rows, _ROWS, method="higher"))
            if not error <= most:  # a NaN is no agreement
                found.append(f"{part}, {phase}: off by {error:.2g}, {most:g} allowed")
        return found

    def _compare(self, run: int, phase: str, point: Point, rows: int) -> None:
        """A part's error in a row is that of its worst value. The reference's values replace ours
        for what comes next."""
        worst = np.zeros(rows)
        for number in point.buffers:
            name = f"{run}/{self.executor.plan.buffers[number].name}"
            ours = self._view(phase, number, rows)
            wanted = self._stored(name, ours)
            worst = np.maximum(worst, _row_errors(ours, wanted))
            ours[...] = _floats(wanted) if ours.dtype == np.float32 else wanted
        self.errors.setdefault((phase, point.part), []).append(worst)

    def _stored(self, name: str, like: Array) -> Array:
        dtype = np.dtype(np.uint16) if like.dtype == np.float32 else like.dtype
        stored = self.values.get(name)
        if stored is None or stored.data.nbytes != like.size * dtype.itemsize:
            message = f"the oracle has no value `{name}` of the plan's shape"
            raise EngineError("E455", message, help="recompile the engine")
        return stored.data.view(dtype).reshape(like.shape)

    def _view(self, phase: str, number: int, rows: int) -> Array:
        view = self.executor.view(number, rows)
        if view.dtype != np.uint8:
            return view
        row_bytes = len(view) // self.executor.phase(phase).max_rows  # records come as bytes
        return view[: rows * row_bytes].reshape(rows, row_bytes)

    def _sample(self, first: int, rows: int) -> None:
        """Greedy tokens after each row, and their log probabilities: the sampler's other row arrays
        are still zero."""
        most = self.executor.phase("sample").max_rows
        tokens, logprobs = [], []
        for begin in range(0, rows, most):
            count = min(most, rows - begin)
            places = np.arange(begin, begin + count, dtype=np.int32)
            self.executor.rows["sample_row"][:count] = places
            samples = self.executor.sample(count)
            tokens.append(samples.token)
            logprobs.append(samples.logprob)
        wanted = self.oracle.next_tokens[first : first + rows]
        off = np.abs(np.concatenate(logprobs) - self.oracle.logprobs[first : first + rows])
        other = np.concatenate(tokens) != wanted
        self.errors.setdefault(("sample", _LOGPROBS), []).append(np.where(other, np.inf, off))


def _row_errors(ours: Array, wanted: Array) -> Floats:
    """|ours - wanted| / |wanted| of each row in bf16; of integers and codes, how many differ."""
    rows = len(ours)
    if wanted.dtype != np.uint16:
        return np.asarray((ours != wanted).reshape(rows, -1).mean(axis=1), dtype=np.float64)
    bits = f32_to_bf16(cast(NDArray[np.float32], ours)) if ours.dtype == np.float32 else ours
    x, y = (_floats(side).reshape(rows, -1).astype(np.float64) for side in (bits, wanted))
    size = np.maximum(np.linalg.norm(y, axis=1), np.finfo(np.float32).tiny)
    return np.asarray(np.linalg.norm(x - y, axis=1) / size, dtype=np.float64)


def _floats(bits: Array) -> NDArray[np.float32]:
    return bf16_to_f32(cast(NDArray[np.uint16], bits))


def _few(problems: list[str]) -> list[str]:
    rest = len(problems) - _SHOWN
    return problems[:_SHOWN] + ([f"and {rest} more"] if rest > 0 else [])
