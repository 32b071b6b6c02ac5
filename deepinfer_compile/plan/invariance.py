"""Batch invariance, checked before anything is built (design.md section 8).

A row's bits depend on the row alone if every kernel adds up an output in an order that varies with
nothing else in the step, and if the kernels of a launch's row classes add in the same order: then
the bucket, the neighbours and the chunk do not matter. `engine.batch_invariant: true` asks for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from deepinfer_compile.diagnostics import CompileError, Diagnostic
from deepinfer_compile.format.plan import Variant
from deepinfer_compile.plan.kernels import Kernel


def check_invariance(
    kernels: Mapping[str, Kernel], launches: Iterable[tuple[Variant, ...]]
) -> None:
    """CompileError E205 with every kernel that lets a row's neighbours into its bits."""
    problems = [
        Diagnostic(
            "E205",
            f"kernel {symbol} is not batch-invariant: its sums vary with {_both(varies)}",
            where=", ".join(kernel.spec),
            notes=(f"it adds {kernel.plan.reduction}",),
            help="leave out engine.batch_invariant, or compile for a target that promises it",
        )
        for symbol, kernel in kernels.items()
        if (varies := kernel.plan.reduction.varies)
    ]
    for classes in dict.fromkeys(tuple(v.kernel for v in variants) for variants in launches):
        orders = {str(kernels[symbol].plan.reduction) for symbol in classes}
        if len(orders) > 1:
            problems.append(
                Diagnostic(
                    "E205",
                    f"row classes of one operator add in different orders: {', '.join(classes)}",
                    where=", ".join(kernels[classes[0]].spec),
                    notes=tuple(f"{s} adds {kernels[s].plan.reduction}" for s in classes),
                    help="leave out engine.batch_invariant, or compile for another target",
                )
            )
    if problems:
        raise CompileError(problems)


def _both(varies: Iterable[object]) -> str:
    return " and ".join(str(one) for one in varies)
