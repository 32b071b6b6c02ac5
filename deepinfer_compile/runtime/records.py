"""What the manifest says about every kernel that the plan launches."""

from __future__ import annotations

from collections.abc import Mapping

from deepinfer_compile.format.manifest import KernelRecord, Manifest
from deepinfer_compile.format.plan import EnginePlan
from deepinfer_compile.runtime.errors import EngineError


def kernel_records(manifest: Manifest, plan: EnginePlan) -> Mapping[str, KernelRecord]:
    """By name. E455: the manifest lacks some."""
    records = {record.name: record for record in manifest.kernels}
    used = {v.kernel for phase in plan.phases for step in phase.steps for v in step.variants}
    missing = sorted(used - records.keys())
    if missing:
        message = "the manifest says nothing about kernels of the plan"
        raise EngineError("E455", message, notes=missing, help="recompile the engine")
    return records
