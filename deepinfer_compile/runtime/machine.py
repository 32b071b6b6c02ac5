"""This machine, and whether it can run an engine's code."""

from __future__ import annotations

import platform
from pathlib import Path

from deepinfer_compile.format.manifest import Library, Manifest
from deepinfer_compile.runtime.errors import EngineError

DRIVERS = ("cpu",)
_CPU_FLAGS = Path("/proc/cpuinfo")
_MEMORY = Path("/proc/meminfo")
_MEMORY_LIMIT = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current"))


def choose_library(path: Path, manifest: Manifest, features: frozenset[str]) -> Library:
    """The last library that a CPU with `features` can run. E240, E241: there is none."""
    if manifest.driver not in DRIVERS:
        raise EngineError(
            "E240",
            f"the engine is for target {manifest.target}, driver {manifest.driver}; "
            f"this runtime has {', '.join(DRIVERS)}",
            where=str(path),
            help="compile the model for a target of this machine: --target cpu",
        )
    runnable = [library for library in manifest.libraries if features.issuperset(library.features)]
    if not runnable:
        names = " or ".join(library.isa for library in manifest.libraries)
        raise EngineError(
            "E241",
            f"the engine's code needs a CPU with {names}; this is {describe_cpu()}",
            where=str(path),
            notes=[
                note
                for library in manifest.libraries
                for note in (
                    f"{library.isa} needs: {', '.join(library.features)}",
                    f"this CPU lacks: {', '.join(lacking(library, features))}",
                )
            ],
            help="compile with an --isa that this CPU has, or run on another one",
        )
    return runnable[-1]


def lacking(library: Library, features: frozenset[str]) -> tuple[str, ...]:
    """What the library needs and a CPU with `features` has not."""
    return tuple(name for name in library.features if name not in features)


def describe_cpu() -> str:
    """The architecture and the model's name, as far as the system tells."""
    field = _cpu_field("model name")
    return f"{platform.machine()} {platform.system()}" + (f", {field}" if field else "")


def cpu_features() -> frozenset[str]:
    """Flags of the CPU as Linux names them; empty on another system or architecture."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return frozenset()
    return frozenset(_cpu_field("flags").split())


def _cpu_field(name: str) -> str:
    """A field of the first CPU; empty where Linux does not say."""
    try:
        lines = _CPU_FLAGS.read_text().splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(name)), "")


def memory_available() -> int | None:
    """Bytes that can be used without swapping, within this container's limit; None: unknown."""
    try:
        lines = _MEMORY.read_text().splitlines()
    except OSError:
        return None
    kilobytes = next(line.split()[1] for line in lines if line.startswith("MemAvailable"))
    free = int(kilobytes) * 1024
    try:
        limit, used = (int(file.read_text()) for file in _MEMORY_LIMIT)
    except (OSError, ValueError):  # no such file, or no limit ("max")
        return free
    return max(0, min(free, limit - used))
