"""The reference's answers: the float64 walker over a prompt, layer by layer.

    prefill rows | decode row | decode row ...  ->  values at every place, next tokens

At each place values are rounded to bf16 before the walk goes on, and the engine goes on from the
same rounded values. So a layer is judged alone: nothing adds up over layers, and the last bits of
this machine's float64 sums end there too, instead of reaching the stored numbers.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from deepinfer_compile.build import build_graph
from deepinfer_compile.ir.graph import Graph
from deepinfer_compile.ir.reference.operand import stored_dtype, stored_shape
from deepinfer_compile.ir.walk import WalkResult, walk
from deepinfer_compile.oracle.points import Place, places
from deepinfer_compile.oracle.stored import Stored
from deepinfer_compile.spec.load import ModelSpec

_PREFILLED, _DECODED = 22, 8
_SLOT = 1
Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Answers:
    """`values[run]` by value name; floats in bf16."""

    tokens: tuple[int, ...]
    prefilled: int
    places: Mapping[str, tuple[Place, ...]]
    values: tuple[Tensors, ...]
    next_tokens: tuple[int, ...]
    logprobs: tuple[float, ...]


def ask(spec: ModelSpec, planned: Mapping[str, Graph], stored: Stored) -> Answers:
    """Walk a prompt through the model; `planned` are the engine's graphs by phase."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # how a sum is split over threads must not reach the answers
    try:
        return _Reference(spec, planned, stored).answers()
    finally:
        torch.set_num_threads(threads)


class _Reference:
    def __init__(self, spec: ModelSpec, planned: Mapping[str, Graph], stored: Stored) -> None:
        engine = spec.engine
        total = min(_PREFILLED + _DECODED, engine.max_context)
        decoded = min(_DECODED, total // 3)
        self._prefilled = min(total - decoded, engine.prefill_chunk)
        draw = random.Random(0)
        more = [draw.randrange(spec.model.vocab_size) for _ in range(self._prefilled + decoded - 1)]
        self._tokens = (spec.model.bos_token_id, *more)
        # The meaning of the graph is the same in caches of just the size.
        pages = -(-len(self._tokens) // engine.page_size)
        small = engine.model_copy(
            update={"max_requests": 1, "max_context": pages * engine.page_size}
        )
        spec = replace(spec, engine=small)
        self._graphs = {phase: build_graph(spec, phase) for phase in planned}
        self._places = {
            phase: places(planned[phase], self._graphs[phase]) for phase in ("prefill", "decode")
        }
        weights = {w.value.name: w for graph in self._graphs.values() for w in graph.weights}
        self._weights = {name: stored.weight(weight) for name, weight in weights.items()}

    def answers(self) -> Answers:
        states = {
            state.name: torch.zeros(
                stored_shape(state.type, 0), dtype=stored_dtype(state.type.dtype)
            )
            for state in self._graphs["prefill"].states
        }
        values: list[Tensors] = []
        hidden: list[Tensor] = []
        ends = [0, *range(self._prefilled, len(self._tokens) + 1)]
        for first, end in itertools.pairwise(ends):
            phase = "prefill" if first == 0 else "decode"
            kept: Tensors = {}
            result = self._forward(phase, states, first, end, kept)
            states = result.states
            values.append(kept)
            hidden.append(_restored(kept["hidden"], result.outputs["hidden"]))
        chosen = [self._sample(rows) for rows in hidden]
        return Answers(
            tokens=self._tokens,
            prefilled=self._prefilled,
            places=self._places,
            values=tuple(values),
            next_tokens=tuple(int(t) for result in chosen for t in result.outputs["token"]),
            logprobs=tuple(
                round(float(p), 4) for result in chosen for p in result.outputs["logprob"]
            ),
        )

    def _forward(
        self, phase: str, states: Tensors, first: int, end: int, kept: Tensors
    ) -> WalkResult:
        stops = [
            (place.walked_step, name) for place in self._places[phase] for name in place.values
        ]

        def visit(step: int, values: Tensors) -> None:
            for name in (name for at, name in stops if at == step):
                kept[name] = _rounded(values[name])
                values[name] = _restored(kept[name], values[name])

        rows = end - first
        zeros = torch.zeros(rows, dtype=torch.int32)
        feeds = {
            "token_id": torch.tensor(self._tokens[first:end], dtype=torch.int32),
            "position": torch.arange(first, end, dtype=torch.int32),
            "slot": zeros + _SLOT,
            "row_start": zeros,
            "image": zeros,
        }
        graph = self._graphs[phase]
        for value in graph.inputs:
            if value.name == "page_table":
                table = torch.zeros(*stored_shape(value.type, 0), dtype=torch.int32)
                table[_SLOT] = 1 + torch.arange(table.shape[1])
                feeds["page_table"] = table
        return walk(graph, feeds, self._weights, states, visit=visit)

    def _sample(self, hidden: Tensor) -> WalkResult:
        """Zeros in every other row array are a greedy row."""
        rows, graph = len(hidden), self._graphs["sample"]
        feeds = {
            value.name: torch.zeros(
                stored_shape(value.type, rows), dtype=stored_dtype(value.type.dtype)
            )
            for value in graph.inputs
        }
        feeds |= {"hidden": hidden, "sample_row": torch.arange(rows, dtype=torch.int32)}
        return walk(graph, feeds, self._weights, {})


def _rounded(value: Tensor) -> Tensor:
    return value.bfloat16() if value.is_floating_point() else value


def _restored(rounded: Tensor, like: Tensor) -> Tensor:
    return rounded.to(like.dtype)
