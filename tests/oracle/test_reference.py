"""The reference's answers: the same bytes everywhere, and none where it would take too long."""

from __future__ import annotations

import pytest
import torch

from deepinfer_compile.checkpoint.headers import read_checkpoint
from deepinfer_compile.checkpoint.synthetic import write_checkpoint
from deepinfer_compile.driver import find_target, lower
from deepinfer_compile.format import jsons
from deepinfer_compile.format.oracle import ORACLE, VALUES, Oracle
from deepinfer_compile.ir.reference import dense
from deepinfer_compile.oracle import write
from deepinfer_compile.oracle.stored import Stored
from deepinfer_compile.spec.hf import from_hf
from tests.golden.topologies import named_model


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A model of windows and Engram only, lowered, with its checkpoint."""
    folder = tmp_path_factory.mktemp("small") / "checkpoint"
    model = named_model("windows_only")
    write_checkpoint(model, folder, seed=5)
    spec = from_hf(folder, overrides=["engine.numerics=f32"], environment={})
    return spec, lower(spec, find_target("cpu")), read_checkpoint(folder)


def written(small, out):
    from deepinfer_compile.driver import _constants

    spec, lowered, index = small
    stored = Stored(index, _constants(spec, index))
    said = write.write_oracle(
        out, spec, lowered.graphs, lowered.plan, stored, lambda done, total: None
    )
    return said, (out / ORACLE).read_bytes(), (out / VALUES).read_bytes()


@pytest.fixture(scope="module")
def first(small, tmp_path_factory):
    return written(small, tmp_path_factory.mktemp("first"))


def test_threads_do_not_reach_the_bytes(small, first, tmp_path):
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 3)
    try:
        assert written(small, tmp_path) == first
        assert torch.get_num_threads() == threads + 3
    finally:
        torch.set_num_threads(threads)


def test_the_order_of_float64_sums_does_not_reach_the_bytes(small, first, tmp_path, monkeypatch):
    """Another machine's matrix library adds in another order: here, every sum runs backwards."""
    forwards, others = dense.linear, []

    def linear(op, x, w, scale=None):
        rows = x.reals.reshape(x.rows, op.groups, -1).flip(2)
        parts = dense.weight_reals(w, scale)
        parts = parts.reshape(op.groups, -1, parts.shape[-1]).flip(2)
        result = torch.einsum("rgk,gnk->rgn", rows, parts).flatten(1)
        others.append(not torch.equal(result, forwards(op, x, w, scale)))
        return result

    monkeypatch.setattr(dense, "linear", linear)
    assert written(small, tmp_path) == first
    assert any(others), "the last bits were the same"


def test_it_says_what_there_is(small, first):
    said, text, _ = first
    oracle = jsons.load(Oracle, text.decode())
    assert said == "fingerprints, 22 prompt tokens, 8 decode steps"
    assert (oracle.prefilled, len(oracle.tokens), len(oracle.logprobs)) == (22, 30, 30)
    parts = [[point.part for point in points] for points in oracle.points.values()]
    assert parts == [["embedding", *(f"layers.{i}" for i in range(4))]] * 2


@pytest.mark.parametrize(
    ("limit", "prefilled", "decoded"),
    [("max_context=2", 2, 0), ("max_context=9", 6, 3), ("prefill_chunk=1", 1, 8)],
)
def test_small_engines_are_asked_less(tmp_path, small, limit, prefilled, decoded):
    _, _, index = small
    overrides = [f"engine.{limit}", "engine.max_requests=1"]
    spec = from_hf(index.folder, overrides=overrides, environment={})
    said, text, _ = written((spec, lower(spec, find_target("cpu")), index), tmp_path)
    assert said == f"fingerprints, {prefilled} prompt tokens, {decoded} decode steps"
    oracle = jsons.load(Oracle, text.decode())
    assert [phase for phase, _, _ in oracle.runs] == ["prefill", *["decode"] * decoded]


def test_a_model_too_large_to_walk_gets_fingerprints_and_says_so(
    small, first, tmp_path, monkeypatch
):
    monkeypatch.setattr(write, "WALKED_BYTES", 1)
    monkeypatch.setattr(write, "ask", None)
    said, text, _ = written(small, tmp_path)
    oracle = jsons.load(Oracle, text.decode())
    assert said.startswith("fingerprints only: ")
    assert (oracle.tokens, oracle.points) == ((), {})
    assert oracle.weights == jsons.load(Oracle, first[1].decode()).weights
