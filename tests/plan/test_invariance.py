"""`engine.batch_invariant`: what a kernel declares of its sums is checked, and all is reported."""

from dataclasses import replace

import pytest

from deepinfer_compile.diagnostics import CompileError
from deepinfer_compile.driver import find_target, lower
from deepinfer_compile.ir import ops
from deepinfer_compile.spec.load import load_spec
from deepinfer_compile.target import KernelRule, Reduction, Varies


def lowered(target, *overrides):
    spec = load_spec("examples/v41_nano.yaml", overrides=overrides, environment={})
    return lower(spec, target)


def with_rule(made):
    """The cpu target whose rule for the class of `made` is `made`."""
    target = find_target("cpu")
    kind = type(made).__mro__[1]
    return replace(target, rules=tuple(made if type(r) is kind else r for r in target.rules))


def rule_of(op) -> type[KernelRule]:
    (found,) = {type(rule) for rule in find_target("cpu").rules if rule.op is op}
    return found


def test_every_cpu_kernel_is_batch_invariant_so_the_promise_costs_nothing():
    target = find_target("cpu")
    plain, asked = (lowered(target, *more) for more in ((), ["engine.batch_invariant=true"]))
    assert asked.plan.batch_invariant
    assert asked.kernels == plain.kernels
    assert asked.plan == replace(plain.plan, batch_invariant=True)


def test_a_kernel_that_splits_by_rows_or_context_is_refused_by_name():
    class Split(rule_of(ops.TopKGate)):
        def plan(self, node, machine, rows):
            varies = (Varies.ROWS, Varies.CONTEXT)
            order = Reduction("atomics in any order", "add", parts=8, varies=varies)
            return replace(super().plan(node, machine, rows), reduction=order)

    target = with_rule(Split())
    assert lowered(target).kernels  # nobody asked
    with pytest.raises(CompileError) as refused:
        lowered(target, "engine.batch_invariant=true")
    (problem,) = refused.value.diagnostics
    assert problem.code == "E205"
    assert problem.message.endswith(
        "is not batch-invariant: its sums vary with the number of rows and a split of the context"
    )
    assert problem.notes == ("it adds atomics in any order (add, 8 parts)",)
    assert "v41_nano.yaml:" in problem.where
    assert refused.value.exit_code == 3


def test_row_classes_that_add_in_different_orders_are_refused_once_for_each_pair():
    from deepinfer_targets.cpu.rules.linear import LinearE4m3Rule

    class Wider(LinearE4m3Rule):
        def plan(self, node, machine, rows):
            plan = super().plan(node, machine, rows)
            order = Reduction("sixteen lanes", "fma") if rows.most is None else plan.reduction
            return replace(plan, reduction=order)

    target = with_rule(Wider())
    with pytest.raises(CompileError) as refused:
        lowered(target, "engine.batch_invariant=true")
    plan = lowered(target).plan
    pairs = {
        tuple(variant.kernel for variant in step.variants)
        for phase in plan.phases
        for step in phase.steps
        if len(step.variants) > 1 and step.variants[0].kernel.startswith("linear__")
    }
    pairs = {pair for pair in pairs if "_e4m3_" in pair[0]}
    assert len(refused.value.diagnostics) == len(pairs) > 2
    for problem in refused.value.diagnostics:
        assert "row classes of one operator add in different orders" in problem.message
        assert problem.notes[1].endswith("adds sixteen lanes (fma)")
