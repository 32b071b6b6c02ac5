"""`manifest.json`: what an engine is, what made it, and the hash of every file in its folder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath

from deepinfer_compile.format.entries import PerEntry
from deepinfer_compile.format.roofline import Machine

SCHEMA = 4
ABI = 1
PLAN = "plan.json"
MANIFEST = "manifest.json"
CONSTANTS = "weights/constants.safetensors"
PACKED_WEIGHTS = "weights/model.safetensors"
TOKENIZER = "tokenizer/tokenizer.json"


@dataclass(frozen=True)
class KernelRecord:
    """One kernel's provenance: spec lines, layers, passes, rule, refusals, shapes, roofline.

    R rows move bytes_fixed + R * bytes_per_row + min(R * picked_per_row, pool_bytes) bytes and take
    R * flops_per_row operations at most: those of `per_entry` count as at the longest context, and
    depend on a row's position. `computes` is its formula; `rows` its row class and `reduction` the
    order of its sums, in words; `uses` counts the steps that may launch it, over all phases.
    """

    name: str
    source: str
    template: str
    rule: str
    refusals: tuple[str, ...]
    computes: str
    spec: tuple[str, ...]
    layers: tuple[int, ...]
    passes: tuple[str, ...]
    shapes: tuple[str, ...]
    rows: str
    reduction: str
    policy: str
    bytes_fixed: int
    bytes_per_row: int
    flops_per_row: int
    picked_per_row: int
    pool_bytes: int
    per_entry: tuple[PerEntry, ...]
    uses: int


@dataclass(frozen=True)
class CheckpointOrigin:
    """Where the weights come from. `headers`: sha256 of the tensor table (name, dtype, shape)."""

    repo: str
    revision: str
    headers: str
    packed: bool


@dataclass(frozen=True)
class Library:
    """The engine's code for an instruction set; `features` are what the device must have."""

    path: str
    isa: str
    features: tuple[str, ...]


@dataclass(frozen=True)
class Manifest:
    """`files`: path -> sha256, of every file but this one. `machine`: what rooflines are about.

    `libraries` give the same bits; the last that the device can run is used. `oracle`: what is
    checked before the engine is ready, in words.
    """

    schema: int
    abi: int
    compiler: str
    tools: Mapping[str, str]
    name: str
    spec_sha256: str
    target: str
    driver: str
    machine: Machine
    libraries: tuple[Library, ...]
    numerics: str
    probes: bool
    checkpoint: CheckpointOrigin
    oracle: str
    kernels: tuple[KernelRecord, ...]
    files: Mapping[str, str]


def plain_name(name: str) -> bool:
    """Whether a relative name stays inside the engine."""
    parts = PurePosixPath(name).parts
    plain = bool(parts) and ".." not in parts and not name.startswith("/")
    return plain and "\\" not in name and "\0" not in name
