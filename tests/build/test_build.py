"""The semantic graphs against the reference's schedule."""

import pytest

from deepinfer_compile.build import PHASES, build_graph
from deepinfer_compile.ir import ops
from deepinfer_compile.ir.text import parse_graph, print_graph
from deepinfer_compile.ir.types import DType
from deepinfer_compile.ir.verify import verify
from deepinfer_compile.spec.load import load_spec

EXAMPLES = ("v41_nano", "v41_micro", "v41_kshape", "v41_flash")


def spec_of(name, *overrides):
    return load_spec(f"examples/{name}.yaml", overrides=overrides, environment={})


def layers_with(graph, *kinds):
    return [n.origin.layer for n in graph.nodes if type(n.op) in kinds]


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("policy", ["vendor", "f32"])
@pytest.mark.parametrize("name", EXAMPLES)
def test_graphs_are_well_formed_and_read_back_equal(name, policy, phase):
    graph = build_graph(spec_of(name, f"engine.numerics={policy}"), phase)
    verify(graph)
    assert parse_graph(print_graph(graph)) == graph


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_flash_layers_do_what_the_schedule_says(phase):
    graph = build_graph(spec_of("v41_flash"), phase)
    attention = (ops.ChunkAttention,) if phase == "prefill" else (ops.SparseAttention,)
    assert layers_with(graph, *attention) == list(range(40))
    assert layers_with(graph, ops.PoolGroup, ops.ChunkPoolGroup) == [2, 8, 14]
    assert layers_with(graph, ops.IndexScores) == [2, 8, 14, 20]
    assert layers_with(graph, ops.TopBlocks) == [20]
    assert layers_with(graph, ops.CandidateScores) == [24, 28, 32, 36]
    assert layers_with(graph, ops.EngramGate) == [1, 14]
    assert layers_with(graph, ops.PageStore) == [2, 2, 8, 8, 14, 14, 20, 20]
    reads = {n.origin.layer: n.inputs for n in graph.nodes if type(n.op) in attention}
    for layer, inputs in reads.items():
        names = [value.name for value in inputs]
        if layer < 2:
            assert not any("pages" in name for name in names)
            continue
        kv = max(s for s in (2, 8, 14, 20) if s <= layer)
        index = max(s for s in (2, 8, 14, 20, 24, 28, 32, 36) if s <= layer)
        assert f"layers.{kv}.kv_pages.next" in names
        assert f"layers.{index}.selected" in names


def test_sublayers_collapse_with_the_coefficients_of_the_one_before():
    graph = build_graph(spec_of("v41_nano"), "decode")
    used = [n.inputs[1].name for n in graph.nodes if isinstance(n.op, ops.MhcCollapse)]
    expected = [f"layers.{i}.{p}" for i in range(8) for p in ("pre", "ffn_pre")]
    assert used == [*expected, "layers.8.pre"]


def test_the_policy_decides_where_rows_are_quantised():
    """Window, compressed and index records under both; inputs of FP8 weights under vendor only."""
    records = {}
    for policy in ("vendor", "f32"):
        graph = build_graph(spec_of("v41_nano", f"engine.numerics={policy}"), "decode")
        kinds = [n.op.to for n in graph.nodes if isinstance(n.op, ops.Quantize)]
        records[policy] = {kind: kinds.count(kind) for kind in set(kinds)}
    assert records["f32"] == {DType.MXFP8: 8, DType.NVFP4: 2, DType.MXFP4: 2 + 3}
    inputs = {f"layers.{i}.{x}" for i in range(8) for x in ("attn_in", "q_rank", "o_low", "ffn_in")}
    assert records["vendor"][DType.MXFP8] == 8 + len(inputs) + 2 * 8
    wo_a = [n for n in graph.nodes if isinstance(n.op, ops.Linear) and n.op.groups > 1]
    assert {n.inputs[0].type.dtype for n in wo_a} == {DType.F32}


def test_image_rows_reach_router_engram_and_hash():
    graph = build_graph(spec_of("v41_nano"), "decode")
    readers = {type(n.op) for n in graph.nodes for v in n.inputs if v.name == "image"}
    assert readers == {ops.TopKGate, ops.EngramGate, ops.MapToken}
