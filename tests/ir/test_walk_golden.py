"""The built graphs of the tiny golden model through the walker, judged by the golden set's tool.

Prompts at once and in chunks, decode with the golden's tokens, and the teacher file, whose layer
inputs are injected; policy `f32` in mode f32, policy `vendor` in mode fp8.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from deepinfer_compile.build import build_graph
from deepinfer_compile.ir.graph import Graph, Value
from deepinfer_compile.ir.reference.operand import stored_dtype, stored_shape
from deepinfer_compile.ir.text import parse_graph, print_graph
from deepinfer_compile.ir.types import DType
from deepinfer_compile.ir.verify import verify
from deepinfer_compile.ir.walk import WalkResult, walk
from deepinfer_compile.spec.hf import from_hf
from tests.golden_data import golden_root
from tests.ir.given import zero_feeds

SLOT = 1
SETTINGS = (
    "engine.max_requests=1",
    "engine.max_rows=8",
    "engine.max_context=640",
    "engine.prefill_chunk=256",
)
Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Tiny:
    """The golden folder, the graphs of its model, and its weights by value name.

    `mode` is how the golden set's tool judges the policy; `activation`, what layers hand on."""

    folder: Path
    mode: str
    activation: torch.dtype
    graphs: dict[str, Graph]
    weights: Tensors

    def golden(self, tag: str) -> Tensors:
        return load_file(self.folder / f"golden_{tag}.safetensors")

    def fresh_states(self) -> Tensors:
        """0xff everywhere: reading what was never written shows up as NaN."""
        states = self.graphs["prefill"].states
        return {state.name: blank(state) for state in states}


def blank(value: Value) -> Tensor:
    dtype = stored_dtype(value.type.dtype)
    empty = torch.empty(stored_shape(value.type, 0), dtype=dtype)
    empty.view(torch.uint8).fill_(0xFF)
    return empty


def weight_tensor(tensors: Tensors, source: str, experts: int) -> Tensor:
    """As stored; one-byte types as bytes, stacked experts on the first dim."""
    if "{e}" in source:
        return torch.stack(
            [weight_tensor(tensors, source.replace("{e}", str(e)), experts) for e in range(experts)]
        )
    tensor = tensors[source]
    return tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor


def load(numerics: str, mode: str, activation: torch.dtype) -> Tiny:
    folder = golden_root() / "v41_tiny"
    overrides = (*SETTINGS, f"engine.numerics={numerics}")
    spec = from_hf(folder, overrides=overrides, environment={})
    graphs = {phase: build_graph(spec, phase) for phase in ("prefill", "decode", "sample")}
    tensors = load_file(folder / "model.safetensors")
    tensors["@token_map"] = load_file(folder / "engram_tables.safetensors")["token_map"]
    experts = spec.model.moe.n_routed_experts
    weights = {
        weight.value.name: weight_tensor(tensors, weight.source, experts)
        for graph in graphs.values()
        for weight in graph.weights
    }
    return Tiny(folder, mode, activation, graphs, weights)


@pytest.fixture(scope="module")
def tiny() -> Tiny:
    return load("f32", "f32", torch.float32)


@pytest.fixture(scope="module")
def vendor() -> Tiny:
    return load("vendor", "fp8", torch.bfloat16)


def probes(graph: Graph) -> list[str]:
    ends = ("experts", "selected", "candidates", "engram_rows", "attn_out", "ffn_out", "hidden")
    return [v.name for node in graph.nodes for v in node.outputs if v.name.endswith(ends)]


def forward(
    tiny: Tiny,
    phase: str,
    states: Tensors,
    tokens: Tensor,
    first: int,
    inject: Tensors | None = None,
) -> WalkResult:
    """One request's rows from position `first`, in slot 1 and pages 1, 2, ..."""
    graph, rows = tiny.graphs[phase], len(tokens)
    zeros = torch.zeros(rows, dtype=torch.int32)
    (table,) = (value for value in graph.inputs if value.name == "page_table")
    slots, pages = stored_shape(table.type, 0)
    feeds = {
        "token_id": tokens,
        "image": zeros,
        "slot": zeros + SLOT,
        "position": torch.arange(first, first + rows, dtype=torch.int32),
        "row_start": zeros,
        "page_table": torch.zeros(slots, pages, dtype=torch.int32),
    }
    feeds["page_table"][SLOT] = 1 + torch.arange(pages)
    return walk(graph, feeds, tiny.weights, states, probes(graph), inject or {})


def logits(tiny: Tiny, result: WalkResult) -> Tensor:
    """Of every row, at temperature 0."""
    (hidden,) = result.outputs.values()
    rows = len(hidden)
    graph = tiny.graphs["sample"]
    feeds = zero_feeds(graph, rows) | {
        "hidden": hidden,
        "sample_row": torch.arange(rows, dtype=torch.int32),
    }
    sampled = walk(graph, feeds, tiny.weights, {}, taps=("logits",))
    assert torch.equal(sampled.outputs["token"][:, 0].long(), sampled.taps["logits"].argmax(1))
    return sampled.taps["logits"]


def stacked(parts: list[WalkResult], end: str) -> Tensor:
    """The taps that end so, [layers,S,...], over the chunks."""
    names = [name for name in parts[0].taps if name.endswith(end)]
    return torch.stack([torch.cat([part.taps[name] for part in parts]) for name in names])


def selections(parts: list[WalkResult], golden: Tensors) -> Tensors:
    """What the prompt files hold beside logits."""
    hashes = golden["prefill.engram_hashes"]
    (candidates,) = stacked(parts, ".candidates")
    blocks = torch.arange(golden["prefill.candidate_blocks"].shape[1])
    width = golden["prefill.topk_idxs"].shape[2]
    return {
        "prefill.engram_hashes": stacked(parts, "engram_rows").transpose(0, 1).to(hashes.dtype),
        "prefill.candidate_blocks": (candidates.unsqueeze(2) == blocks).any(1),
        "prefill.topk_idxs": stacked(parts, "selected")[:, :, :width].to(torch.int16),
        "prefill.router_idx": stacked(parts, "experts").to(torch.int16),
    }


def judge(tiny: Tiny, candidate: Path, tag: str, tensors: Tensors) -> None:
    """Write the candidate file and run the golden set's own tool on it."""
    path = candidate / f"golden_{tag}.safetensors"
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)
    tool = golden_root() / "check_golden.py"
    command = [sys.executable, str(tool), str(tiny.folder), str(candidate), "--mode", tiny.mode]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{tag} " in done.stdout, "the tool compared nothing"


@pytest.mark.parametrize("phase", ["prefill", "decode", "sample"])
def test_built_graphs_are_well_formed_and_print(tiny: Tiny, phase: str) -> None:
    graph = tiny.graphs[phase]
    verify(graph)
    assert parse_graph(print_graph(graph)) == graph


def prefill(tiny: Tiny, tokens: Tensor, cuts: tuple[int, ...]) -> list[WalkResult]:
    """The prompt in chunks that end at `cuts`."""
    states, parts = tiny.fresh_states(), []
    for first, last in zip((0, *cuts), (*cuts, len(tokens)), strict=True):
        parts.append(forward(tiny, "prefill", states, tokens[first:last], first))
        states = parts[-1].states
    return parts


def prompt_file(tiny: Tiny, parts: list[WalkResult], golden: Tensors) -> Tensors:
    found = selections(parts, golden)
    found["prefill.logits"] = torch.cat([logits(tiny, part) for part in parts])
    assert torch.equal(found["prefill.engram_hashes"], golden["prefill.engram_hashes"])
    return found


def test_short_prompt_at_once_passes_the_golden_check(tiny: Tiny, tmp_path: Path) -> None:
    golden = tiny.golden("short")
    parts = prefill(tiny, golden["input_ids"], ())
    judge(tiny, tmp_path, "short", prompt_file(tiny, parts, golden))


def test_short_prompt_in_chunks_and_its_decode_pass(tiny: Tiny, tmp_path: Path) -> None:
    """The first chunk leaves a group open; the last is one token."""
    golden = tiny.golden("short")
    tokens = golden["input_ids"]
    parts = prefill(tiny, tokens, (37, 59))
    found = prompt_file(tiny, parts, golden)
    states, steps = parts[-1].states, []
    for at, token in enumerate(golden["decode.greedy_tokens"]):
        result = forward(tiny, "decode", states, token.reshape(1), len(tokens) + at)
        states = result.states
        steps.append(logits(tiny, result))
    found["decode.logits"] = torch.cat(steps)
    judge(tiny, tmp_path, "short", found)


@pytest.mark.slow
@pytest.mark.parametrize("tag", ["medium", "long"])
def test_longer_prompts_pass(tiny: Tiny, tag: str, tmp_path: Path) -> None:
    """Only here top-k and candidate blocks leave anything out, and chunks outgrow the window."""
    golden = tiny.golden(tag)
    cuts = (131,) if tag == "medium" else (200, 201, 441)
    parts = prefill(tiny, golden["input_ids"], cuts)
    judge(tiny, tmp_path, tag, prompt_file(tiny, parts, golden))


def teacher(tiny: Tiny, candidate: Path) -> float:
    """Judge every layer on the golden's inputs; the relative error of the logits at the end."""
    golden = tiny.golden("teacher")
    inject: Tensors = {}
    for layer, (h, pre) in enumerate(zip(golden["h_in"], golden["pre_mix_in"], strict=True)):
        inject[f"layers.{layer}.streams"] = h.to(tiny.activation)
        inject[f"layers.{layer}.pre"] = pre
    result = forward(tiny, "prefill", tiny.fresh_states(), golden["input_ids"], 0, inject)
    found = {end: stacked([result], end) for end in ("attn_out", "ffn_out")}
    judge(tiny, candidate, "teacher", found)
    off = logits(tiny, result).double() - golden["logits"]
    return float(off.norm() / golden["logits"].norm())


def test_every_layer_passes_the_teacher_file(tiny: Tiny, tmp_path: Path) -> None:
    assert teacher(tiny, tmp_path) < 2e-3


def test_the_vendor_policy_passes_in_mode_fp8(vendor: Tiny, tmp_path: Path) -> None:
    assert teacher(vendor, tmp_path) < 0.13
    golden = vendor.golden("short")
    parts = prefill(vendor, golden["input_ids"], (37,))
    judge(vendor, tmp_path, "short", prompt_file(vendor, parts, golden))


def test_graphs_hold_records_only_where_the_policy_says(tiny: Tiny) -> None:
    """Policy f32 keeps the cache quantisers and drops those of linear inputs."""
    kinds = {v.name: v.type.dtype for node in tiny.graphs["decode"].nodes for v in node.outputs}
    records = {name.rsplit(".", 1)[-1] for name, dtype in kinds.items() if dtype.is_record}
    ends = {"kv_record", "kv_entry", "index_k_record", "index_q_record", "engram_record", "next"}
    assert records == ends
    assert DType.BF16 not in kinds.values()
