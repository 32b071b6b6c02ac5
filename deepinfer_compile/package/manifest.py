"""The manifest: provenance of every kernel, what made the engine, hashes of its files."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from deepinfer_compile import __version__
from deepinfer_compile.format.manifest import (
    ABI,
    SCHEMA,
    CheckpointOrigin,
    KernelRecord,
    Library,
    Manifest,
)
from deepinfer_compile.format.plan import EnginePlan
from deepinfer_compile.format.recipes import tensor_table_sha256
from deepinfer_compile.package.folder import hash_files
from deepinfer_compile.plan.kernels import Kernel
from deepinfer_compile.spec.load import ModelSpec
from deepinfer_compile.target import Target


def make_manifest(
    folder: Path,
    name: str,
    spec: ModelSpec,
    plan: EnginePlan,
    kernels: Mapping[str, Kernel],
    target: Target,
    libraries: Sequence[Library],
    tools: Mapping[str, str],
    packed: bool,
    oracle: str,
) -> Manifest:
    """`folder` holds every other file of the engine; `name` is the spec's, without suffix."""
    checkpoint = CheckpointOrigin(
        repo=spec.checkpoint.repo or "",
        revision=spec.checkpoint.revision or "",
        headers=tensor_table_sha256(plan.weights),
        packed=packed,
    )
    return Manifest(
        schema=SCHEMA,
        abi=ABI,
        compiler=__version__,
        tools=dict(sorted(tools.items())),
        name=name,
        spec_sha256=spec_sha256(spec),
        target=target.name,
        driver=target.driver,
        machine=target.machine,
        libraries=tuple(libraries),
        numerics=plan.numerics,
        probes=spec.engine.probes,
        checkpoint=checkpoint,
        oracle=oracle,
        kernels=tuple(_record(kernel, plan) for kernel in kernels.values()),
        files=hash_files(folder),
    )


def spec_sha256(spec: ModelSpec) -> str:
    """Of what the spec says, not of how or where it is written."""
    said = {
        "model": spec.model.model_dump(mode="json"),
        "engine": spec.engine.model_dump(mode="json"),
        "checkpoint": spec.checkpoint.model_dump(mode="json", exclude={"path"}),
    }
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()


def _record(kernel: Kernel, plan: EnginePlan) -> KernelRecord:
    return KernelRecord(
        name=kernel.symbol,
        source=f"kernels/{kernel.symbol}.cpp",
        template=kernel.plan.template,
        rule=kernel.rule,
        refusals=kernel.refusals,
        computes=kernel.plan.computes,
        spec=kernel.spec,
        layers=kernel.layers,
        passes=kernel.passes,
        shapes=kernel.shapes,
        rows=str(kernel.rows),
        reduction=str(kernel.plan.reduction),
        policy=plan.numerics,
        bytes_fixed=kernel.cost.bytes_fixed,
        bytes_per_row=kernel.cost.bytes_per_row,
        flops_per_row=kernel.cost.flops_per_row,
        picked_per_row=kernel.cost.picked_per_row,
        pool_bytes=kernel.cost.pool_bytes,
        per_entry=kernel.cost.per_entry,
        uses=kernel.uses,
    )
