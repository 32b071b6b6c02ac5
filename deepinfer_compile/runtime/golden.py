"""Write what an engine computes for golden prompts, under the golden files' own tensor names.

    golden_<tag>.safetensors (input_ids, decode.greedy_tokens)  ->  the same name, our values
    golden_teacher.safetensors (h_in, pre_mix_in)               ->  attn_out, ffn_out per layer

Everything is read through the named probes of an engine compiled with --probes, so which layers
select, route or hash is whatever the plan says. Decode is teacher-forced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import cast

import numpy as np
from numpy.typing import NDArray

from deepinfer_compile.format.plan import Probe
from deepinfer_compile.runtime.arrays import Array
from deepinfer_compile.runtime.errors import EngineError
from deepinfer_compile.runtime.executor import Executor
from deepinfer_compile.runtime.probed import (
    HOW_TO_GET,
    LAYER,
    as_stored,
    floats,
    read_logits,
    visit_probes,
)
from deepinfer_compile.runtime.request_rows import RequestRows
from deepinfer_compile.runtime.shards import TensorView, read_file

_STORED: Mapping[str, type[np.generic]] = {
    "F16": np.float16,
    "F32": np.float32,
    "BF16": np.uint16,
    "F64": np.float64,
    "I8": np.int8,
    "U8": np.uint8,
    "I16": np.int16,
    "I32": np.int32,
    "I64": np.int64,
    "BOOL": np.bool_,
}

Visit = Callable[[int, int, Probe], None]  # first row, rows


def write_golden(executor: Executor, vectors: Path, out: Path) -> list[Path]:
    """A candidate file for every golden file in `vectors`; returns their paths."""
    from safetensors.numpy import save_file  # here: --help should not pay for it

    if not executor.phase("prefill").probes:
        raise EngineError(
            "E465",
            "golden needs an engine with probes",
            help=HOW_TO_GET,
        )
    files = sorted(vectors.glob("golden_*.safetensors"))
    if not files:
        message = "no golden_*.safetensors here"
        raise EngineError("E466", message, where=str(vectors), help="give a folder of golden files")
    written = []
    for file in files:
        golden = Golden(file, read_file(file))
        tensors = _teacher(executor, golden) if golden.has("h_in") else _prompt(executor, golden)
        try:
            out.mkdir(parents=True, exist_ok=True)
            save_file(tensors, out / file.name)
        except OSError as failure:
            message = f"cannot write the file: {failure.strerror or failure}"
            raise EngineError("E551", message, where=str(out / file.name)) from None
        written.append(out / file.name)
    return written


@dataclass(frozen=True)
class Golden:
    """One golden file."""

    path: Path
    tensors: Mapping[str, TensorView]

    def has(self, name: str) -> bool:
        return name in self.tensors

    def get(self, name: str) -> Array:
        """A tensor's values; bf16 as bits."""
        view = self.tensors.get(name)
        if view is None or view.dtype not in _STORED:
            message = f"the golden file has no usable `{name}`"
            raise EngineError("E466", message, where=str(self.path))
        return view.data.view(_STORED[view.dtype]).reshape(view.shape)

    def ids(self, name: str = "input_ids") -> list[int]:
        return [int(token) for token in self.get(name)]

    def like(self, name: str, values: Array) -> Array:
        """`values` in the dtype the golden file stores under `name`; f32 for bf16 or nothing."""
        dtype = self.tensors[name].dtype if self.has(name) else "F32"
        stored = np.float32 if dtype == "BF16" else _STORED[dtype]
        return np.ascontiguousarray(values.astype(stored))


@dataclass
class _Taps:
    """Probe values by name, collected chunk by chunk."""

    values: dict[str, list[Array]] = field(default_factory=dict)

    def add(self, name: str, value: Array) -> None:
        self.values.setdefault(name, []).append(value)

    def layers(self, part: str) -> list[Array]:
        """All rows of `layers.*.<part>`, layers in order."""
        found = {
            int(match[1]): np.concatenate(pieces)
            for name, pieces in self.values.items()
            if (match := LAYER.fullmatch(name)) and match[2] == part
        }
        return [found[layer] for layer in sorted(found)]


def _prompt(executor: Executor, golden: Golden) -> dict[str, Array]:
    prompt = golden.ids()
    forced = golden.ids("decode.greedy_tokens") if golden.has("decode.greedy_tokens") else []
    _check_length(executor, golden, len(prompt) + len(forced))
    rows = RequestRows(executor, slot=1)
    taps, logits = _Taps(), []
    wanted = ("selected", "candidates", "experts", "engram_rows")

    def tap(first: int, count: int, probe: Probe) -> None:
        match = LAYER.fullmatch(probe.name)
        if match and match[2] in wanted:
            taps.add(probe.name, executor.read(probe, count))

    for first, count in _prefill(executor, rows, prompt, tap):
        del first
        logits.append(read_logits(executor, count))
    out = {"prefill.logits": golden.like("prefill.logits", np.concatenate(logits))}
    if forced:
        steps = []
        for i, token in enumerate(forced):
            rows.fill([token], len(prompt) + i)
            executor.forward("decode", 1)
            steps.append(read_logits(executor, 1))
        out["decode.logits"] = golden.like("decode.logits", np.concatenate(steps))
    out |= _sets(golden, taps, len(prompt))
    return out


def _check_length(executor: Executor, golden: Golden, length: int) -> None:
    """The page table holds no more: past it, a request would read another's pages."""
    limit = executor.plan.limits.max_context
    if length > limit:
        raise EngineError(
            "E022",
            f"the golden file needs {length} positions, this engine holds {limit}",
            where=str(golden.path),
            help=f"compile it with --set engine.max_context={length}",
        )


def _sets(golden: Golden, taps: _Taps, length: int) -> dict[str, Array]:
    """Selections, candidates, routing and hashes, shaped as the golden file has them."""
    out: dict[str, Array] = {}
    if golden.has(name := "prefill.topk_idxs") and (picks := taps.layers("selected")):
        k = golden.tensors[name].shape[-1]
        out[name] = golden.like(name, np.stack([_resized(p, k) for p in picks]))
    if golden.has(name := "prefill.candidate_blocks") and (kept := taps.layers("candidates")):
        blocks = np.zeros((length, golden.tensors[name].shape[-1] + 1), dtype=np.bool_)
        ids = cast(NDArray[np.int32], kept[0])
        np.put_along_axis(blocks, np.where(ids < 0, blocks.shape[1] - 1, ids), True, axis=1)
        out[name] = np.ascontiguousarray(blocks[:, :-1])
    if golden.has(name := "prefill.router_idx") and (experts := taps.layers("experts")):
        out[name] = golden.like(name, np.stack(experts))
    if golden.has(name := "prefill.engram_hashes") and (hashes := taps.layers("engram_rows")):
        out[name] = golden.like(name, np.stack(hashes, axis=1))
    return out


def _resized(picks: Array, k: int) -> Array:
    """Exactly k columns: -1 columns are added, or dropped from the end."""
    ids = cast(NDArray[np.int32], picks)
    order = np.argsort(ids < 0, axis=1, kind="stable")
    ids = np.take_along_axis(ids, order, axis=1)
    if ids.shape[1] < k:
        return np.pad(ids, ((0, 0), (0, k - ids.shape[1])), constant_values=-1)
    assert np.all(ids[:, k:] < 0), f"more than {k} picks for a golden file of {k}"
    return ids[:, :k]


def _teacher(executor: Executor, golden: Golden) -> dict[str, Array]:
    """Each layer on the golden's inputs, in one pass: its caches are what later chunks read."""
    prompt = golden.ids()
    _check_length(executor, golden, len(prompt))
    forced = {"streams": golden.get("h_in"), "pre": golden.get("pre_mix_in")}
    rows = RequestRows(executor, slot=1)
    taps = _Taps()

    def visit(first: int, count: int, probe: Probe) -> None:
        match = LAYER.fullmatch(probe.name)
        if not match:
            return
        layer, part = int(match[1]), match[2]
        if part in forced and layer < len(forced[part]):
            value = forced[part][layer, first : first + count]
            executor.inject(probe, count, as_stored(executor, probe, value))
        elif part in ("attn_out", "ffn_out"):
            taps.add(probe.name, floats(executor.read(probe, count)))

    for _ in _prefill(executor, rows, prompt, visit):
        pass
    return {
        part: golden.like(part, np.stack(taps.layers(part)))
        for part in ("attn_out", "ffn_out")
        if golden.has(part)
    }


def _prefill(
    executor: Executor, rows: RequestRows, prompt: Sequence[int], visit: Visit
) -> Iterator[tuple[int, int]]:
    """Run the prompt in chunks, stopping at every probe; yields after each chunk."""
    most = executor.phase("prefill").max_rows
    for first in range(0, len(prompt), most):
        chunk = prompt[first : first + most]
        rows.fill(chunk, first)
        visit_probes(executor, "prefill", len(chunk), partial(visit, first, len(chunk)))
        yield first, len(chunk)
