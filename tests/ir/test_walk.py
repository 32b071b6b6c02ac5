"""The walker names values, carries states to their last version, taps and injects."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from deepinfer_compile.ir.text import parse_graph
from deepinfer_compile.ir.walk import walk
from tests.ir.small_graph import TEXT

GRAPH = parse_graph(TEXT)


def noise(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


FEEDS = {
    "token_id": torch.tensor([1, 5, 1], dtype=torch.int32),
    "slot": torch.tensor([1, 1, 2], dtype=torch.int32),
    "position": torch.tensor([0, 1, 6], dtype=torch.int32),
}
WEIGHTS = {
    "embed": noise(6, 32, seed=0).bfloat16(),
    "w": torch.ones(32).bfloat16(),
    "wv": noise(4, 32, seed=1).bfloat16(),
    "wg": noise(4, 32, seed=2).bfloat16(),
}
STATES = {
    "tail": torch.zeros(3, 4, 2, 4),
    "window.0": torch.zeros(3, 4, 33, dtype=torch.uint8),
}


def test_walk_equals_the_graph_by_hand() -> None:
    result = walk(GRAPH, FEEDS, WEIGHTS, STATES, taps=("y", "v", "g"))
    assert sorted(result.outputs) == ["kv", "pooled"]
    assert sorted(result.taps) == ["g", "v", "y"]
    x = WEIGHTS["embed"][[1, 5, 1]].double()
    y = (x / x.square().mean(1, keepdim=True).sqrt()).bfloat16()
    assert torch.equal(result.taps["y"], y)
    v, g = (y.double() @ WEIGHTS[name].double().T for name in ("wv", "wg"))
    pooled = (torch.softmax(g[:2].float().double(), 0) * v[:2].float().double()).sum(0)
    assert torch.equal(result.outputs["pooled"][1], pooled.float())
    assert not result.outputs["pooled"][[0, 2]].any()


def test_walk_returns_final_states_under_their_first_names() -> None:
    result = walk(GRAPH, FEEDS, WEIGHTS, STATES)
    assert sorted(result.states) == ["tail", "window.0"]
    window = result.states["window.0"]
    assert torch.equal(window[[1, 1, 2], [0, 1, 2]], result.outputs["kv"])
    assert int(window.any(2).sum()) == 3
    assert not any(state.any() for state in STATES.values()), "the given states are unchanged"
    again = walk(GRAPH, FEEDS, WEIGHTS, dict(result.states))
    assert all(torch.equal(again.states[name], result.states[name]) for name in result.states)


def test_walk_injects_after_computing_and_checks_the_fit() -> None:
    other = torch.ones(3, 32).bfloat16()
    result = walk(GRAPH, FEEDS, WEIGHTS, STATES, taps=("y", "v"), inject={"y": other})
    assert torch.equal(result.taps["y"], other)
    expect = WEIGHTS["wv"].double().sum(1).float().expand(3, 4)
    assert torch.equal(result.taps["v"], expect)
    with pytest.raises(AssertionError, match="%y"):
        walk(GRAPH, FEEDS, WEIGHTS, STATES, inject={"y": other.float()})
