"""What manifest, plan and oracle must agree about, and the numbers in them. Else E455."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from deepinfer_compile.format.manifest import MANIFEST, PLAN, KernelRecord, Manifest
from deepinfer_compile.format.oracle import ORACLE, Oracle
from deepinfer_compile.format.plan import EnginePlan, MemoryClass, Step
from deepinfer_compile.runtime.errors import EngineError

AGAIN = "copy the engine again, or recompile it"
_COUNT = 2**63  # no count of bytes or operations is as large


def check_numbers(path: Path, manifest: Manifest) -> None:
    """What rooflines are computed from."""
    machine = manifest.machine
    problems = [
        f"machine.{name}: {value}"
        for name, value in (("bandwidth", machine.bandwidth), ("flops", machine.flops))
        if not 0 < value < math.inf
    ]
    for kernel in manifest.kernels:
        counts = {
            "bytes_fixed": kernel.bytes_fixed,
            "bytes_per_row": kernel.bytes_per_row,
            "flops_per_row": kernel.flops_per_row,
            "picked_per_row": kernel.picked_per_row,
            "pool_bytes": kernel.pool_bytes,
            "uses": kernel.uses,
        }
        for name, count in counts.items():
            if not 0 <= count < _COUNT:
                problems.append(f"{kernel.name}: {name} {count}")
        problems += _entry_problems(kernel)
    if problems:
        message, file = "the manifest holds impossible numbers", str(path / MANIFEST)
        raise EngineError("E455", message, where=file, notes=problems, help=AGAIN)


def _entry_problems(kernel: KernelRecord) -> list[str]:
    """Parts that count no entries, and more operations in them than in all."""
    problems = [
        f"{kernel.name}: {part.flops} flops on {part.most} entries in blocks of {part.block}, "
        f"1 per {part.ratio} tokens"
        for part in kernel.per_entry
        if min(part.flops, part.ratio, part.most, part.block) < 1 or part.most % part.block
    ]
    all_entries = sum(part.most_flops for part in kernel.per_entry)
    if not problems and kernel.flops_per_row < all_entries:
        said = f"flops_per_row {kernel.flops_per_row:,}, less than its entries' {all_entries:,}"
        problems.append(f"{kernel.name}: {said}")
    return problems


def check_plan(path: Path, manifest: Manifest, plan: EnginePlan) -> None:
    """The plan agrees with the manifest and with its own memory."""
    problems: list[str] = []
    for name, said, meant in (
        ("target", plan.target, manifest.target),
        ("numerics", plan.numerics, manifest.numerics),
    ):
        if said != meant:
            problems.append(f"{name}: plan.json says {said}, manifest.json {meant}")
    room = {
        MemoryClass.STATE: plan.memory.state,
        MemoryClass.IO: plan.memory.io,
        MemoryClass.ARENA: plan.memory.arena,
    }
    for buffer in plan.buffers:
        end = buffer.offset + buffer.bytes
        if buffer.memory in room and not 0 <= buffer.offset <= end <= room[buffer.memory]:
            problems.append(f"`{buffer.name}` ends at {end}, past its {buffer.memory} memory")
    for phase in plan.phases:
        used = {number for step in phase.steps for number in step.buffers}
        if absent := sorted(used - set(range(len(plan.buffers)))):
            problems.append(f"{phase.name} uses buffers that do not exist: {absent}")
        if not phase.buckets or list(phase.buckets) != sorted({*phase.buckets}):
            problems.append(f"{phase.name}: its buckets do not ascend")
        elif not 1 <= phase.buckets[0] <= phase.max_rows < _COUNT:
            problems.append(f"{phase.name}: buckets of {phase.buckets[0]} to {phase.max_rows} rows")
        elif strays := sum(_strays(step, phase.buckets) for step in phase.steps):
            problems.append(f"{phase.name}: {strays} steps without a kernel for every bucket")
    for state in plan.states:
        if min(state.length, state.ratio) < 1:
            problems.append(
                f"`{state.name}` has {state.length} entries, 1 per {state.ratio} tokens"
            )
    weights = sum(b.bytes for b in plan.buffers if b.memory is MemoryClass.WEIGHTS)
    if weights != plan.memory.weights:
        problems.append(f"weights take {weights} bytes, the plan says {plan.memory.weights}")
    if problems:
        message = "the plan contradicts itself"
        raise EngineError("E455", message, where=str(path / PLAN), notes=problems, help=AGAIN)


def _strays(step: Step, buckets: Sequence[int]) -> bool:
    """Whether variants end elsewhere than at ascending buckets, the last at the last."""
    ends = [variant.most_rows for variant in step.variants]
    return ends != sorted({*ends} & {*buckets}) or ends[-1:] != [buckets[-1]]


def check_oracle(path: Path, plan: EnginePlan, oracle: Oracle) -> None:
    """The oracle asks only what the plan can run."""
    limits, problems = plan.limits, []
    if len(oracle.tokens) > limits.max_context or oracle.prefilled > len(oracle.tokens):
        problems.append(f"{len(oracle.tokens)} tokens, {oracle.prefilled} of them prefilled")
    if not all(0 <= token < limits.vocab_size for token in oracle.tokens):
        problems.append("tokens outside the vocabulary")
    if not len(oracle.tokens) == len(oracle.next_tokens) == len(oracle.logprobs):
        problems.append("not one answer for each token")
    phases = {phase.name: phase for phase in plan.phases}
    for name, _, tokens in oracle.runs:
        if not 1 <= len(tokens) <= phases[name].max_rows:
            problems.append(f"{name} of {len(tokens)} rows")
        steps = [0, *(point.step for point in oracle.points.get(name, ()))]
        if steps != sorted(set(steps)) or steps[-1] != len(phases[name].steps):
            problems.append(f"{name} is looked at in other steps than it has")
    numbers = {n for points in oracle.points.values() for point in points for n in point.buffers}
    fixed = (MemoryClass.WEIGHTS, MemoryClass.STATE)
    if any(not 0 <= n < len(plan.buffers) or plan.buffers[n].memory in fixed for n in numbers):
        problems.append("values that are none of a step")
    if problems:
        message = "the oracle does not fit the plan"
        raise EngineError("E455", message, where=str(path / ORACLE), notes=problems, help=AGAIN)
