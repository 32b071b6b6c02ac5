"""The engine plan: sizes against the reference, and buffers that are safe to run."""

import pytest

from deepinfer_compile.checkpoint.tensors import expected_tensors
from deepinfer_compile.driver import find_target, lower
from deepinfer_compile.format import jsons
from deepinfer_compile.format.plan import EnginePlan, Lifetime, MemoryClass
from deepinfer_compile.format.recipes import names_of
from deepinfer_compile.spec.load import load_spec

EXAMPLES = ("v41_nano", "v41_micro", "v41_kshape", "v41_flash")


@pytest.fixture(scope="module", params=EXAMPLES)
def lowered(request):
    spec = load_spec(f"examples/{request.param}.yaml", environment={})
    return spec, lower(spec, find_target("cpu"))


def test_plan_json_reads_back_equal(lowered):
    _, low = lowered
    text = jsons.dump(low.plan)
    assert jsons.load(EnginePlan, text) == low.plan
    assert jsons.dump(jsons.load(EnginePlan, text)) == text


def test_weights_are_the_checkpoint_tensors_that_the_text_model_reads(lowered):
    spec, low = lowered
    read = {
        name: (recipe.dtype, recipe.shape)
        for recipe in low.plan.weights
        if not recipe.pattern.startswith("@")
        for _, names in names_of(recipe)
        for name in names
    }
    skipped = ("mtp.", "vision.", "aligner.", "image_")
    stored = {
        t.name: (t.dtype.value, t.shape)
        for t in expected_tensors(spec.model)
        if not t.name.startswith(skipped)
    }
    assert read == stored
    constants = 4 * spec.model.vocab_size
    sizes = sum(t.nbytes for t in expected_tensors(spec.model) if not t.name.startswith(skipped))
    assert low.plan.memory.weights == sizes + constants


def test_a_step_never_writes_over_what_is_still_needed(lowered):
    """Replays every phase over byte ranges: a value read must be the last one written there."""
    _, low = lowered
    for graph, phase in zip(low.graphs, low.plan.phases, strict=True):
        owner: dict[str, tuple[int, int]] = {}
        for node, step in zip(graph.nodes, phase.steps, strict=True):
            buffers = [low.plan.buffers[i] for i in step.buffers]
            for value, buffer in zip(node.inputs, buffers, strict=False):
                if buffer.memory is MemoryClass.ARENA:
                    assert owner[value.name] == (buffer.offset, buffer.offset + buffer.bytes)
            fresh = node.outputs[len(node.op.consumes) :]
            for value, buffer in zip(fresh, buffers[len(node.inputs) :], strict=True):
                if buffer.memory is not MemoryClass.ARENA:
                    continue
                begin, end = buffer.offset, buffer.offset + buffer.bytes
                owner = {k: r for k, r in owner.items() if r[1] <= begin or end <= r[0]}
                owner[value.name] = (begin, end)


def test_every_buffer_lies_inside_its_memory_class(lowered):
    _, low = lowered
    sizes = {m: getattr(low.plan.memory, m.value) for m in MemoryClass}
    for buffer in low.plan.buffers:
        if buffer.memory is not MemoryClass.WEIGHTS:
            assert buffer.offset % 64 == 0
            assert buffer.offset + buffer.bytes <= sizes[buffer.memory], buffer


def test_flash_caches_cost_what_the_reference_says():
    spec = load_spec("examples/v41_flash.yaml", environment={})
    plan = lower(spec, find_target("cpu")).plan
    paged = [s for s in plan.states if s.lifetime is Lifetime.PAGED]
    per_token = {
        kind: sum(s.bytes for s in paged if s.name.endswith(kind)) / plan.limits.page_size
        for kind in ("kv_pages", "index_pages")
    }
    assert per_token == {"kv_pages": 720, "index_pages": 170}
    window = [s.bytes for s in plan.states if s.name.endswith(".window")]
    assert window == [128 * 528] * 40
    assert [s.bytes for s in plan.states if s.name.endswith(".tail")] == [2 * 4096] * 3
    assert plan.limits.pages == 64 * 1048576 // 128 + 1


def test_forty_layers_compile_to_a_handful_of_kernels():
    spec = load_spec("examples/v41_flash.yaml", environment={})
    low = lower(spec, find_target("cpu"))
    steps = sum(len(phase.steps) for phase in low.plan.phases)
    assert steps == 1624  # 41 a layer, over prefill and decode
    assert len(low.kernels) < 90


def test_the_cache_may_hold_fewer_tokens_than_all_requests_could_have():
    overrides = ["engine.cache_tokens=2000"]
    spec = load_spec("examples/v41_nano.yaml", overrides=overrides, environment={})
    plan = lower(spec, find_target("cpu")).plan
    assert plan.limits.pages == 32 + 1  # of 64 tokens, and padding's
    paged = [s for s in plan.states if s.lifetime is Lifetime.PAGED]
    assert all(plan.buffers[s.buffer].bytes == 33 * s.bytes for s in paged)
