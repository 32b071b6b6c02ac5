"""Fusions change no bit: an engine for a target without fused kernels computes the same."""

from __future__ import annotations

from dataclasses import replace

from deepinfer_compile.ir.fused import Fused
from deepinfer_compile.runtime.loader import load_engine
from deepinfer_compile.target import Target
from tests.engines import nano_engine
from tests.runtime.drive import Solo, poison
from tests.runtime.test_exactness import prompt_of

CHUNKS = [40, 1, 23]


def without_fused_rules(target: Target) -> Target:
    rules = tuple(rule for rule in target.rules if not issubclass(rule.op, Fused))
    assert len(rules) < len(target.rules)
    return replace(target, rules=rules)


def run(engine):
    loaded = load_engine(engine, threads=2)
    poison(loaded.executor)
    solo = Solo(loaded.executor, prompt_of(sum(CHUNKS))).feed(CHUNKS)
    tokens = solo.generate(24, CHUNKS[-1])
    steps = [len(phase.steps) for phase in loaded.executor.plan.phases]
    saved = solo.save()
    loaded.close()
    return steps, (tokens, solo.logprobs, saved)


def test_an_engine_computes_the_same_with_fused_kernels_and_without():
    steps, computed = run(nano_engine())
    more, parts = run(nano_engine(without_fused_rules))
    assert computed == parts
    assert more[0] > 1.8 * steps[0]
    assert more[1] > 1.8 * steps[1]
