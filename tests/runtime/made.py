"""Engine folders made by hand, for what is refused before anything runs."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from deepinfer_compile.format import jsons
from deepinfer_compile.format.manifest import ABI, SCHEMA, CheckpointOrigin, Library, Manifest
from deepinfer_compile.format.oracle import ORACLE, Oracle
from deepinfer_compile.format.plan import (
    Buffer,
    EnginePlan,
    Limits,
    Memory,
    MemoryClass,
    Phase,
    WeightRecipe,
)
from deepinfer_compile.format.roofline import Machine

LIMITS = Limits(
    max_requests=2,
    max_rows=4,
    max_context=64,
    page_size=16,
    prefill_chunk=8,
    slots=5,
    snapshots=2,
    pages=9,
    vocab_size=256,
    bos_token_id=0,
    eos_token_id=1,
)
PLAN = EnginePlan(
    target="cpu",
    numerics="vendor",
    batch_invariant=False,
    limits=LIMITS,
    memory=Memory(weights=64 + 96 + 12, state=0, io=64, arena=128),
    buffers=(
        Buffer("embed.weight", "bf16", (8, 4), MemoryClass.WEIGHTS, 0, 64),
        Buffer("layers.0.w1", "e2m1", (3, 4, 16), MemoryClass.WEIGHTS, 0, 96),
        Buffer("token_map", "i32", (3,), MemoryClass.WEIGHTS, 0, 12),
        Buffer("token_id", "i32", (-1,), MemoryClass.IO, 0, 32),
        Buffer("x", "f32", (-1, 4), MemoryClass.ARENA, 0, 128),
    ),
    phases=(
        Phase("prefill", (8,), (), ()),
        Phase("decode", (1, 4), (), ()),
        Phase("sample", (1, 4), (), ()),
    ),
    row_arrays=(),
    states=(),
    weights=(
        WeightRecipe("embed.weight", (), 0, "BF16", (8, 4), (0,)),
        WeightRecipe("layers.{l}.experts.{e}.w1", (0,), 3, "I8", (4, 8), (1,)),
        WeightRecipe("@token_map", (), 0, "I32", (3,), (2,)),
    ),
)
MANIFEST = Manifest(
    schema=SCHEMA,
    abi=ABI,
    compiler="0.1.0",
    tools={"g++": "12.2.0"},
    name="made",
    spec_sha256="0" * 64,
    target="cpu",
    driver="cpu",
    machine=Machine("a core", bandwidth=1e9, flops=2e9),
    libraries=(Library("kernels/engine.so", "x86-64-v3", ("avx2", "fma")),),
    numerics="vendor",
    probes=False,
    checkpoint=CheckpointOrigin("", "", "", packed=False),
    oracle="nothing",
    kernels=(),
    files={},
)


def write_no_oracle(folder: Path) -> None:
    """One that asks nothing."""
    (folder / ORACLE).parent.mkdir(parents=True)
    oracle = Oracle((), 0, {}, (), (), 0.0, 0.0, {})
    (folder / ORACLE).write_text(jsons.dump(oracle), encoding="utf-8")


def make_engine(folder: Path, manifest: Manifest = MANIFEST, plan: EnginePlan = PLAN) -> Path:
    """An engine whose library is not one: good for everything up to loading it."""
    (folder / "kernels").mkdir(parents=True)
    (folder / "weights").mkdir()
    (folder / "kernels/engine.so").write_bytes(b"not a library")
    (folder / "plan.json").write_text(jsons.dump(plan), encoding="utf-8")
    write_no_oracle(folder)
    save_file({"token_map": np.arange(3, dtype=np.int32)}, folder / "weights/constants.safetensors")
    files = {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
    write_manifest(folder, dataclasses.replace(manifest, files=files))
    return folder


def write_manifest(folder: Path, manifest: Manifest) -> None:
    (folder / "manifest.json").write_text(jsons.dump(manifest), encoding="utf-8")


def edit_manifest(folder: Path, **facts: object) -> None:
    """Change fields of the stored JSON, whatever the schema thinks of them."""
    path = folder / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | facts))


def write_safetensors(path: Path, tensors: Mapping[str, tuple[str, list[int], bytes]]) -> Path:
    """A safetensors file with any dtype names: (dtype, shape, bytes) by name."""
    header, data = {}, b""
    for name, (dtype, shape, content) in tensors.items():
        offsets = [len(data), len(data) + len(content)]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": offsets}
        data += content
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def checkpoint_tensors() -> dict[str, tuple[str, list[int], bytes]]:
    """What `PLAN` reads; experts stored backwards, between other tensors."""
    experts = {
        f"layers.0.experts.{e}.w1": ("I8", [4, 8], bytes([e]) * 32) for e in reversed(range(3))
    }
    return {"embed.weight": ("BF16", [8, 4], bytes(range(64))), **experts}
