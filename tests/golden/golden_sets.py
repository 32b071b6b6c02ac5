"""Golden folders of any model, made by the float64 walker: the released golden set's layout.

    Model, seed -> checkpoint, and vectors for each policy:
                   golden_prompt.safetensors, golden_teacher.safetensors, stats.json

The prompt is long enough for top-k and candidate blocks to leave something out.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from deepinfer_compile.build import build_graph
from deepinfer_compile.checkpoint.vocabulary import token_map
from deepinfer_compile.ir.graph import Graph
from deepinfer_compile.ir.reference.operand import stored_dtype, stored_shape
from deepinfer_compile.ir.walk import WalkResult, walk
from deepinfer_compile.spec.hf import from_hf
from deepinfer_compile.spec.load import ModelSpec
from deepinfer_compile.spec.schema import Model, Numerics
from tests.ir.given import zero_feeds

LENGTH, STEPS, CUT = 290, 6, 131  # tokens of the prompt, decode steps, the walker's first chunk
SLOT = 1
TAPS = ("streams", "pre", "attn_out", "ffn_out", "selected", "candidates", "experts", "engram_rows")
Tensors = dict[str, Tensor]


def make_vectors(checkpoint: Path, folder: Path, numerics: str, seed: int) -> None:
    """Write what the model in `checkpoint` computes under a policy into `folder`."""
    walker = Walker(checkpoint, numerics)
    tokens = prompt(walker.spec.model, seed)
    run = walker.run(tokens)
    folder.mkdir()
    shutil.copyfile(checkpoint / "config.json", folder / "config.json")
    files = {
        "prompt": _prompt_file(walker.spec.model, tokens, run),
        "teacher": _teacher_file(tokens, run),
    }
    for tag, tensors in files.items():
        save_file(contiguous(tensors), folder / f"golden_{tag}.safetensors")
    noise = divergence(run.prefill, walker.run(tokens, steps=0, jiggle=1e-6).prefill)
    stats = {"stats": {"prompt": {"f32_jiggle_1e-6_vs_f32": noise}}}
    (folder / "stats.json").write_text(json.dumps(stats), encoding="utf-8")


def prompt(model: Model, seed: int) -> Tensor:
    """Random tokens and, later, some of them again: n-grams repeat."""
    draw = random.Random(seed)
    tokens = [draw.randrange(3, model.vocab_size) for _ in range(LENGTH)]
    tokens[LENGTH // 2 : LENGTH // 2 + 40] = tokens[20:60]
    return torch.tensor(tokens, dtype=torch.int32)


@dataclass(frozen=True)
class Run:
    """What a policy computes for a prompt and its own greedy tokens after it."""

    taps: Tensors
    prefill: Tensor
    decode: Tensor
    greedy: Tensor

    def layers(self, part: str) -> list[Tensor]:
        names = [f"layers.{i}.{part}" for i in range(100)]
        return [self.taps[name] for name in names if name in self.taps]


class Walker:
    """A checkpoint folder under a policy, in caches of just the size."""

    def __init__(self, folder: Path, numerics: str) -> None:
        self.folder = folder
        self.spec: ModelSpec = from_hf(
            folder,
            overrides=(
                f"engine.numerics={numerics}",
                "engine.max_requests=1",
                "engine.max_rows=8",
                "engine.max_context=320",
                f"engine.prefill_chunk={LENGTH}",
            ),
            environment={},
        )
        self.graphs = {
            phase: build_graph(self.spec, phase) for phase in ("prefill", "decode", "sample")
        }
        self._weights = {phase: self._read(graph) for phase, graph in self.graphs.items()}

    @cached_property
    def _stored(self) -> Tensors:
        stored = {
            name: tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor
            for file in self.folder.glob("model*.safetensors")
            for name, tensor in load_file(file).items()
        }
        if self.spec.model.engram.engram_layer_ids:
            stored["@token_map"] = torch.from_numpy(token_map(self.spec.model, self.folder))
        return stored

    def _read(self, graph: Graph) -> Tensors:
        experts = range(self.spec.model.moe.n_routed_experts)

        def tensor(source: str) -> Tensor:
            if "{e}" not in source:
                return self._stored[source]
            return torch.stack([self._stored[source.replace("{e}", str(e))] for e in experts])

        return {w.value.name: tensor(w.source) for w in graph.weights}

    def run(self, tokens: Tensor, steps: int = STEPS, jiggle: float = 0.0) -> Run:
        """The prompt in two chunks, then greedy decode; `jiggle` moves embeddings by so much."""
        states: Tensors = {}
        for state in self.graphs["prefill"].states:
            blank = torch.empty(stored_shape(state.type, 0), dtype=stored_dtype(state.type.dtype))
            blank.view(torch.uint8).fill_(0xFF)  # what was never written shows up as NaN
            states[state.name] = blank
        parts = []
        for first, last in ((0, CUT), (CUT, len(tokens))):
            part = tokens[first:last]
            moved = self._moved(part, jiggle) if jiggle else {}
            parts.append(self.forward("prefill", states, part, first, moved))
            states = parts[-1].states
        prefill = torch.cat([self._logits(part) for part in parts])
        greedy, decode = [prefill[-1].argmax()], []
        for step in range(steps):
            token = greedy[-1].reshape(1).to(torch.int32)
            result = self.forward("decode", states, token, len(tokens) + step)
            states = result.states
            decode.append(self._logits(result))
            greedy.append(decode[-1][0].argmax())
        taps = {name: torch.cat([part.taps[name] for part in parts]) for name in parts[0].taps}
        fed = torch.tensor(greedy[:-1], dtype=torch.int32)
        return Run(taps, prefill, torch.cat([prefill[:0], *decode]), fed)

    def _moved(self, tokens: Tensor, jiggle: float) -> Tensors:
        """The first streams, off by a relative `jiggle`."""
        noise = torch.Generator().manual_seed(1)
        streams = self.spec.model.hyper_connections.hc_mult
        rows = self._weights["prefill"]["embed.weight"][tokens.long()]
        x = rows.float().unsqueeze(1).repeat(1, streams, 1)
        x *= 1 + jiggle * torch.randn(x.shape, generator=noise)
        kept = x if self.spec.engine.numerics is Numerics.F32 else x.bfloat16()
        return {"layers.0.streams": kept}

    def forward(
        self,
        phase: str,
        states: Tensors,
        tokens: Tensor,
        first: int,
        inject: Mapping[str, Tensor] | None = None,
    ) -> WalkResult:
        graph, rows = self.graphs[phase], len(tokens)
        zeros = torch.zeros(rows, dtype=torch.int32)
        feeds = {
            "token_id": tokens,
            "image": zeros,
            "slot": zeros + SLOT,
            "position": torch.arange(first, first + rows, dtype=torch.int32),
            "row_start": zeros,
        }
        for value in graph.inputs:
            if value.name == "page_table":
                table = torch.zeros(*stored_shape(value.type, 0), dtype=torch.int32)
                table[SLOT] = 1 + torch.arange(table.shape[1])
                feeds["page_table"] = table
        feeds = {value.name: feeds[value.name] for value in graph.inputs}
        made = (value.name for node in graph.nodes for value in node.outputs)
        taps = [name for name in made if name.rsplit(".", 1)[-1] in TAPS]
        return walk(graph, feeds, self._weights[phase], states, taps, inject or {})

    def _logits(self, result: WalkResult) -> Tensor:
        (hidden,) = result.outputs.values()
        rows = len(hidden)
        graph = self.graphs["sample"]
        feeds = zero_feeds(graph, rows) | {
            "hidden": hidden,
            "sample_row": torch.arange(rows, dtype=torch.int32),
        }
        weights = self._weights["sample"]
        return walk(graph, feeds, weights, {}, taps=("logits",)).taps["logits"]


def _prompt_file(model: Model, tokens: Tensor, run: Run) -> Tensors:
    """Only what the model has: no selections without sources, no hashes without Engram."""
    file = {
        "input_ids": tokens,
        "prefill.logits": run.prefill,
        "decode.greedy_tokens": run.greedy,
        "decode.logits": run.decode,
        "prefill.router_idx": torch.stack(run.layers("experts")).to(torch.int16),
    }
    if selected := run.layers("selected"):
        file["prefill.topk_idxs"] = torch.stack(selected).to(torch.int16)
    if candidates := run.layers("candidates"):
        blocks = torch.arange(-(-len(tokens) // model.indexer.candidate_block_size))
        file["prefill.candidate_blocks"] = (candidates[0].unsqueeze(2) == blocks).any(1)
    if rows := run.layers("engram_rows"):
        file["prefill.engram_hashes"] = torch.stack(rows, dim=1).to(torch.int64)
    return file


def _teacher_file(tokens: Tensor, run: Run) -> Tensors:
    """Every layer's inputs, and what it made of them."""
    layers = len(run.layers("attn_out"))
    return {
        "input_ids": tokens,
        "h_in": torch.stack(run.layers("streams")[:layers]),
        "pre_mix_in": torch.stack(run.layers("pre")[:layers]),
        "attn_out": torch.stack(run.layers("attn_out")),
        "ffn_out": torch.stack(run.layers("ffn_out")),
    }


def divergence(wanted: Tensor, found: Tensor) -> dict[str, float]:
    """KL of the rows of two logits, and how often the same token is first."""
    p, q = wanted.double().log_softmax(-1), found.double().log_softmax(-1)
    kl = (p.exp() * (p - q)).sum(-1)
    same = (wanted.argmax(-1) == found.argmax(-1)).double()
    return {"median": kl.median().item(), "mean": kl.mean().item(), "top1": same.mean().item()}


def contiguous(tensors: Tensors) -> Tensors:
    return {name: tensor.contiguous() for name, tensor in tensors.items()}
