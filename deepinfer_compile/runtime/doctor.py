"""What this machine has, and what running an engine, or compiling one, needs. Executes nothing.

doctor(None)    what is found, and what each driver of this runtime needs
doctor(engine)  whether this machine can run it: its code, its memory, its weights
"""

from __future__ import annotations

import platform
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from deepinfer_compile.format.manifest import PACKED_WEIGHTS
from deepinfer_compile.runtime.errors import EngineError
from deepinfer_compile.runtime.folder import EngineFolder, open_folder
from deepinfer_compile.runtime.machine import (
    DRIVERS,
    choose_library,
    cpu_features,
    describe_cpu,
    memory_available,
)
from deepinfer_compile.runtime.room import need_of
from deepinfer_compile.runtime.settings import found_settings, read_settings, usable_cpus
from deepinfer_compile.runtime.weights import find_weights

_OURS = "deepinfer-compile"
_COMPILERS = ("g++", "nvcc")
_REQUIREMENT = re.compile(r"([\w.-]+)\s*(.*)")


@dataclass(frozen=True)
class Check:
    """One row. `status` is the exit status it asks for: 0 when found and needed agree."""

    name: str
    found: str
    needed: str
    status: int = 0


def doctor(path: Path | None) -> tuple[Check, ...]:
    """Every check; EngineError when `path` is no intact engine."""
    checks = [*_python(), *_machine(), _environment()]
    if path is None:
        return (*checks, *_compilers())
    folder = open_folder(path, skip_weights=True)
    return (*checks, _code(folder), _memory(folder), _weights(folder))


def _python() -> Iterator[Check]:
    """Python and the packages that our own metadata asks for."""
    needed = metadata.metadata(_OURS)["Requires-Python"] or "any"
    yield Check("Python", platform.python_version(), needed)
    for requirement in metadata.requires(_OURS) or ():
        if "extra ==" in requirement:
            continue
        name, wanted = _REQUIREMENT.findall(requirement)[0]
        try:
            yield Check(name, metadata.version(name), wanted or "any")
        except metadata.PackageNotFoundError:
            yield Check(name, "not installed", wanted or "any", status=3)


def _machine() -> Iterator[Check]:
    native = (platform.machine(), platform.system()) == ("x86_64", "Linux")
    drivers = ", ".join(DRIVERS)
    yield Check("machine", describe_cpu(), f"x86_64 Linux for {drivers}", 0 if native else 3)
    yield Check("threads", str(usable_cpus()), "1 or more")
    yield Check("memory", _available(memory_available()), "the plan's total")
    yield Check("disk", f"{shutil.disk_usage('.').free:,} B free here", "the engine's size")


def _environment() -> Check:
    """Whether what is set reads; what there is to set is `found_settings`."""
    needed = "values that read"
    try:
        read_settings()
    except EngineError as refused:
        return Check("environment", refused.message, needed, refused.exit_code)
    count = sum(one.source == "environment" for one in found_settings())
    return Check("environment", f"{count} variables set", needed)


def _available(free: int | None) -> str:
    return "unknown" if free is None else f"{free:,} B available"


def _compilers() -> Iterator[Check]:
    """Never a reason to say no: running an engine needs none."""
    for name in _COMPILERS:
        yield Check(name, shutil.which(name) or "not found", "to compile, not to run")


def _code(folder: EngineFolder) -> Check:
    isas = " or ".join(library.isa for library in folder.manifest.libraries)
    try:
        library = choose_library(folder.path, folder.manifest, cpu_features())
    except EngineError as refused:
        return Check("code", "; ".join(refused.notes) or refused.message, isas, refused.exit_code)
    return Check("code", f"{library.isa} runs here", isas)


def _memory(folder: EngineFolder) -> Check:
    """What is allocated and written; weights are mapped where that is possible."""
    own = need_of(folder.plan, folder.manifest.checkpoint.packed).total
    free = memory_available()
    needed = f"{own:,} B, and {folder.plan.memory.weights:,} B of weights"
    status = 3 if free is not None and free < own else 0
    return Check("engine memory", _available(free), needed, status)


def _weights(folder: EngineFolder) -> Check:
    needed = f"{folder.plan.memory.weights:,} B"
    try:
        source = find_weights(folder.path, folder.manifest, None, read_settings())
    except EngineError as refused:
        return Check("weights", refused.message, needed, refused.exit_code)
    there = not folder.files.fault(PACKED_WEIGHTS) if source.packed else source.place.exists()
    if not there:
        return Check("weights", f"{source.reason}: {source.place} is not there", needed, 4)
    return Check("weights", source.reason, needed)
