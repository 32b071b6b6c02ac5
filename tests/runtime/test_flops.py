"""Operations of a step, against counting every pair of the model's definition one by one."""

from __future__ import annotations

import functools
import random
import timeit

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepinfer_compile.driver import build, find_target, lower
from deepinfer_compile.format import jsons
from deepinfer_compile.format.entries import PerEntry
from deepinfer_compile.format.manifest import Manifest
from deepinfer_compile.ir import ops
from deepinfer_compile.package.manifest import make_manifest
from deepinfer_compile.runtime.records import kernel_records
from deepinfer_compile.runtime.scheduler import Kind, StepPlan, Work
from deepinfer_compile.runtime.statistics import step_flops
from deepinfer_compile.spec.load import load_spec

PRODUCTS = (ops.Linear, ops.ExpertLinear)
MOVES = (ops.RingStore, ops.PageStore)
LONGEST = {"v41_nano": 256, "v41_kshape": 8}  # rows of a span: counting pairs takes long


@functools.cache
def spec_of(name):
    return load_spec(f"examples/{name}.yaml", environment={})


@pytest.fixture(scope="module", params=["v41_nano", "v41_kshape"])
def counted(request, tmp_path_factory):
    """The example's name, and what an engine of it counts by what its manifest says."""
    spec, target = spec_of(request.param), find_target("cpu")
    low = lower(spec, target)
    facts = (spec, low.plan, low.kernels, target, (), {}, False, "")
    manifest = make_manifest(tmp_path_factory.mktemp("empty"), request.param, *facts)
    manifest = jsons.load(Manifest, jsons.dump(manifest))
    return request.param, step_flops(low.plan, kernel_records(manifest, low.plan))


def step(kind, *spans):
    works = tuple(Work(id, id, *span, False) for id, span in enumerate(spans))
    return StepPlan(kind, works, (), (), (), ())


@functools.cache
def pairs(name, position):
    """Operations of a row on what it sees: section 3.8 and 3.9 of the model, entry by entry."""
    model, context = spec_of(name).model, spec_of(name).engine.max_context
    a, indexer, compression = model.attention, model.indexer, model.compression
    attend = 2 * a.head_dim + 2 * a.head_dim  # a head's product with a key, and with its value
    score = indexer.index_n_heads * 2 * indexer.index_head_dim
    rng, total = random.Random(position), 0
    candidates: set[int] | None = None
    window = [key for key in range(position + 1) if position - key < a.sliding_window]
    sights = {  # entries whose tokens have all been there
        ratio: [j for j in range(context // ratio) if (j + 1) * ratio - 1 <= position]
        for ratio in {*compression.ratios} - {0}
    }
    for layer in range(model.num_hidden_layers):
        ratio = compression.ratios[layer]
        keys = len(window)
        if layer in compression.index_source_layer_ids:
            seen = sights[ratio]
            if candidates is not None:
                seen = [j for j in seen if j // indexer.candidate_block_size in candidates]
            total += len(seen) * (score + 4)  # and looked at by top-k
            selected = seen[: indexer.index_topk]  # which of them, is all the same here
            if layer == indexer.candidate_source_layer_id:
                total += len(seen) * 2  # looked at for the best of its block
                candidates = chosen_blocks(rng, indexer, seen)
        if ratio:
            keys += len(selected)
        total += a.num_attention_heads * keys * attend
    return total


def chosen_blocks(rng, indexer, seen):
    """The newest block and, by any scores, the best ones of the others."""
    blocks = sorted({j // indexer.candidate_block_size for j in seen})
    others = blocks[:-1]
    most = min(indexer.candidate_topk_blocks - 1, len(others))
    return {*blocks[-1:], *rng.sample(others, most)}


def weights_met(model):
    """Of matrices, by one row; and by a row that is sampled from (sections 3.6 to 3.13)."""
    a, indexer, moe, engram = model.attention, model.indexer, model.moe, model.engram
    hidden, channels = model.hidden_size, model.attention.num_attention_heads * a.head_dim
    index_channels = indexer.index_n_heads * indexer.index_head_dim
    total = 0
    for layer in range(model.num_hidden_layers):
        total += hidden * a.q_lora_rank + a.q_lora_rank * channels  # queries
        total += hidden * a.head_dim  # key and value in one
        total += channels * a.o_lora_rank + a.o_groups * a.o_lora_rank * hidden
        if layer in model.compression.kv_source_layer_ids:
            pooled = model.compression.ratios[layer] > 1
            total += (2 if pooled else 1) * hidden * a.head_dim  # values, and scores to pool by
            total += a.head_dim * indexer.index_head_dim
        if layer in model.compression.index_source_layer_ids:
            total += a.q_lora_rank * index_channels + hidden * indexer.index_n_heads
        if layer in engram.engram_layer_ids:
            columns = (engram.engram_max_ngram_size - 1) * engram.engram_n_heads
            streams = model.hyper_connections.hc_mult
            total += columns * engram.engram_head_dim * (streams + 1) * hidden
        total += hidden * moe.n_routed_experts
        experts = moe.num_experts_per_tok + moe.n_shared_experts
        total += experts * 3 * hidden * moe.moe_intermediate_size
    return total, hidden * model.vocab_size


def other_work(spec):
    """A row's operations in each phase that are neither products with matrices nor on entries: by
    the graphs before any fusion."""
    return {
        graph.name: sum(
            node.op.cost(tuple(value.type for value in node.inputs)).flops_per_row
            for node in graph.nodes
            if not isinstance(node.op, (*PRODUCTS, *MOVES, ops.EntryOp))
        )
        for graph in build(spec)
    }


def spans(spec, kind, rng, longest):
    """What a step may hold: a token of each of a few requests, or a part of a prompt."""
    last = spec.engine.max_context - 1
    if kind is Kind.DECODE:
        return [(rng.randint(0, last), 1) for _ in range(rng.randint(1, spec.engine.max_requests))]
    position = rng.randint(0, last)
    return [(position, min(rng.randint(1, longest), last + 1 - position))]


@pytest.mark.parametrize("kind", list(Kind))
def test_operations_are_those_of_every_pair_counted_one_by_one(counted, kind):
    """200 steps: of what each row sees, of the matrices by their shapes, and of the rest."""
    name, flops = counted
    spec = spec_of(name)
    met, met_to_sample = weights_met(spec.model)
    rest = other_work(spec)
    rng = random.Random(17)
    for _ in range(200):
        some = spans(spec, kind, rng, LONGEST[name])
        rows = [p for first, count in some for p in range(first, first + count)]
        expect = sum(pairs(name, p) for p in rows) + len(rows) * (2 * met + rest[kind])
        assert flops(step(kind, *some), 0) == expect, some
        sampled = rng.randint(1, spec.engine.max_requests)
        expect += sampled * (2 * met_to_sample + rest["sample"])
        assert flops(step(kind, *some), sampled) == expect, some


def test_candidates_and_lists_are_full_in_what_was_counted():
    """The counts above go past every cap, and past none at the first positions."""
    for name in ("v41_nano", "v41_kshape"):
        last = spec_of(name).engine.max_context - 1
        growth = [pairs(name, p + 16) - pairs(name, p) for p in (0, last - 16)]
        assert growth[0] > growth[1] > 0


@given(
    st.integers(1, 5),
    st.integers(1, 6),
    st.integers(1, 9),
    st.integers(0, 300),
    st.integers(0, 80),
)
def test_rows_together_are_the_sum_of_each(ratio, blocks, block, position, count):
    part = PerEntry(1, ratio, blocks * block, block)
    each = []
    for p in range(position, position + count):
        visible = (p + 1) // ratio
        newest = max(visible - 1, 0) // block  # the blocks before it are whole
        kept = {*range(max(newest - blocks + 1, 0), newest + 1)}
        each.append(sum(entry // block in kept for entry in range(visible)))
    assert part.entries([(position, count)]) == sum(each)


@given(st.integers(1, 5), st.integers(1, 9), st.integers(0, 2**40), *[st.integers(0, 2**40)] * 2)
def test_a_span_is_the_sum_of_its_parts_however_long(ratio, block, position, first, second):
    part = PerEntry(1, ratio, 2**20 * block, block)
    parts = [(position, first), (position + first, second)]
    assert part.entries([(position, first + second)]) == part.entries(parts)


def test_counting_a_decode_step_takes_no_time(counted):
    """20 us for 8 rows of the longest contexts, when nobody else has the core."""
    name, flops = counted
    last = spec_of(name).engine.max_context - 1
    asked = step(Kind.DECODE, *((last - n, 1) for n in range(8)))
    assert min(timeit.repeat(lambda: flops(asked, 8), number=1, repeat=10_000)) < 20e-6
