"""Load an engine: check the folder and this machine, find the weights, start the library.

    load_engine("flash.engine") -> Engine

Nothing is compiled, downloaded or written, and no environment is needed: a read-only folder under
any name will do.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from deepinfer_compile.format.manifest import LIBRARY, Manifest
from deepinfer_compile.format.plan import EnginePlan
from deepinfer_compile.runtime.errors import EngineError
from deepinfer_compile.runtime.executor import Executor
from deepinfer_compile.runtime.folder import EngineFolder, open_folder
from deepinfer_compile.runtime.settings import read_settings
from deepinfer_compile.runtime.weights import WeightSource, find_weights, load_weights

_DRIVERS = ("cpu",)
_CPU_FLAGS = Path("/proc/cpuinfo")


@dataclass(frozen=True)
class Engine:
    """A loaded engine. `seconds`: how long each part of loading took."""

    path: Path
    manifest: Manifest
    plan: EnginePlan
    executor: Executor
    source: WeightSource
    threads: int
    seconds: Mapping[str, float]

    def close(self) -> None:
        self.executor.close()


def load_engine(
    path: Path | str, *, checkpoint: Path | str | None = None, threads: int | None = None
) -> Engine:
    """Check everything, then load. Raises `EngineError`."""
    return start(open_folder(path), checkpoint=checkpoint, threads=threads)


def start(
    folder: EngineFolder, *, checkpoint: Path | str | None = None, threads: int | None = None
) -> Engine:
    """The second half of loading, for a folder that is already open and checked."""
    settings = read_settings()
    count = settings.threads if threads is None else threads
    if count < 1:
        raise EngineError("E020", f"threads must be 1 or more, found {count}")
    begin = time.perf_counter()
    check_machine(folder.path, folder.manifest, cpu_features())
    origin = Path(checkpoint) if checkpoint is not None else None
    source = find_weights(folder.path, folder.manifest, origin, settings)
    headers = folder.manifest.checkpoint.headers
    weights = load_weights(folder.path, folder.plan, source, headers)
    mapped = time.perf_counter()
    executor = Executor(folder.plan, folder.path / LIBRARY, weights.by_buffer, count)
    seconds = {
        "hashes": folder.seconds,
        "weights": mapped - begin,
        "library": time.perf_counter() - mapped,
    }
    return Engine(folder.path, folder.manifest, folder.plan, executor, source, count, seconds)


def check_machine(path: Path, manifest: Manifest, features: frozenset[str]) -> None:
    """E240, E241: what this runtime, or this CPU, cannot run."""
    if manifest.driver not in _DRIVERS:
        raise EngineError(
            "E240",
            f"the engine is for target {manifest.target}, driver {manifest.driver}; "
            f"this runtime has {', '.join(_DRIVERS)}",
            where=str(path),
            help="compile the model for a target of this machine: --target cpu",
        )
    lacking = [name for name in manifest.features if name not in features]
    if lacking:
        raise EngineError(
            "E241",
            f"the engine's code needs a CPU with {manifest.isa}",
            where=str(path),
            notes=[
                f"needed: {', '.join(manifest.features)}",
                f"this CPU lacks: {', '.join(lacking)}",
            ],
            help="compile with an --isa that this CPU has, or run on a newer one",
        )


def cpu_features() -> frozenset[str]:
    """Flags of the CPU as Linux names them; empty on another architecture."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return frozenset()
    try:
        lines = _CPU_FLAGS.read_text().splitlines()
    except OSError:
        return frozenset()
    flags = next((line.partition(":")[2] for line in lines if line.startswith("flags")), "")
    return frozenset(flags.split())
