"""Buckets and row classes: what a step of any number of rows runs."""

from itertools import pairwise

import pytest

from deepinfer_compile.driver import find_target, lower
from deepinfer_compile.plan.buckets import buckets
from deepinfer_compile.plan.roofline import step_bounds
from deepinfer_compile.spec.load import load_spec


def test_decode_buckets_waste_little():
    sizes = buckets("decode", 1000, ())
    assert sizes[:12] == (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64, 80)
    assert sizes[-1] == 1000
    for below, above in pairwise(sizes[sizes.index(64) :]):
        assert above - below <= above / 5


def test_prefill_buckets_double_up_to_the_chunk():
    assert buckets("prefill", 2048, ()) == (64, 128, 256, 512, 1024, 2048)
    assert buckets("prefill", 700, (4,)) == (4, 64, 128, 256, 512, 700)
    assert buckets("prefill", 3, ()) == (3,)


@pytest.mark.parametrize("rows", [1, 3, 4, 5, 17])
def test_every_step_has_one_kernel_for_every_bucket(rows):
    """And engines for few rows hold no kernel for many."""
    overrides = [f"engine.max_rows={rows}", f"engine.max_requests={rows}"]
    spec = load_spec("examples/v41_nano.yaml", overrides=overrides, environment={})
    lowered = lower(spec, find_target("cpu"))
    launched = set()
    for phase in lowered.plan.phases:
        assert phase.max_rows == phase.buckets[-1]
        assert list(phase.buckets) == sorted(set(phase.buckets))
        for step in phase.steps:
            ends = [variant.most_rows for variant in step.variants]
            assert ends == sorted(set(ends))
            assert {*ends} <= {*phase.buckets}
            launched |= {step.at(bucket).kernel for bucket in phase.buckets}
            for r in range(1, phase.max_rows + 1):
                bucket = next(b for b in phase.buckets if r <= b)
                assert step.at(r) is step.at(bucket)
    assert launched == set(lowered.kernels)
    classes = {
        len(step.variants) for p in lowered.plan.phases if p.name == "decode" for step in p.steps
    }
    assert classes == ({1} if rows <= 4 else {1, 2})


def test_the_bound_of_a_step_is_what_its_weights_and_rows_cost():
    """Of the released model's decode at one row, almost all bytes are weights that a row reads."""
    spec = load_spec("examples/v41_flash.yaml", environment={})
    target = find_target("cpu")
    lowered = lower(spec, target)
    bounds = {
        (b.phase, b.rows): b for b in step_bounds(lowered.graphs, lowered.plan, target.machine)
    }
    assert {rows for phase, rows in bounds if phase == "decode"} == {
        *lowered.plan.phases[1].buckets
    }
    one = bounds["decode", 1]
    assert one.launches == len(lowered.plan.phases[1].steps)
    assert 8e9 < one.bytes < 16e9
    assert one.seconds >= one.bytes / target.machine.bandwidth
    for (phase, rows), bound in bounds.items():
        assert bound.seconds >= bounds[phase, min(r for p, r in bounds if p == phase)].seconds, rows
