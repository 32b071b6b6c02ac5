"""The measuring stick computes the model: its logits are the golden set's."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from tests.baseline.torch_model import State, TorchModel
from tests.baseline.torch_weights import load_checkpoint
from tests.golden_data import golden_root


@pytest.fixture(scope="module")
def model() -> TorchModel:
    root = golden_root() / "v41_tiny"
    token_map = load_file(root / "engram_tables.safetensors")["token_map"]
    return TorchModel(load_checkpoint(root, torch.float32), token_map)


def divergence(logits: torch.Tensor, golden: torch.Tensor) -> torch.Tensor:
    """KL of each row from the golden one."""
    ours, theirs = logits.log_softmax(-1), golden.float().log_softmax(-1)
    return (theirs.exp() * (theirs - ours)).sum(-1)


@pytest.mark.parametrize("tag", ["short", "medium"])
def test_the_torch_model_gives_the_golden_logits(model: TorchModel, tag: str) -> None:
    golden = load_file(golden_root() / "v41_tiny" / f"golden_{tag}.safetensors")
    state = State()
    logits = model.forward(state, golden["input_ids"].tolist(), every=True)
    at = golden["sel_positions"]
    assert divergence(logits[at], golden["prefill.logits_sel"]).median() <= 1e-5
    tokens = golden["decode.greedy_tokens"].tolist()
    decoded = torch.stack([model.forward(state, [token]) for token in tokens])
    assert divergence(decoded, golden["decode.logits"]).median() <= 1e-5
