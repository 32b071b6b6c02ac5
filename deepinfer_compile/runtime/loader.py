"""Load an engine: check the folder and this machine, find the weights, start the library.

    load_engine("flash.engine") -> Engine

Nothing is compiled, downloaded or written, and no environment is needed: a read-only folder, or
file, under any name will do.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from deepinfer_compile.format.manifest import Manifest
from deepinfer_compile.format.plan import EnginePlan
from deepinfer_compile.runtime.errors import EngineError
from deepinfer_compile.runtime.executor import Executor
from deepinfer_compile.runtime.files import EngineFiles
from deepinfer_compile.runtime.folder import EngineFolder, open_folder
from deepinfer_compile.runtime.machine import choose_library, cpu_features, memory_available
from deepinfer_compile.runtime.oracle import check_numbers, check_weights
from deepinfer_compile.runtime.room import check_room
from deepinfer_compile.runtime.settings import read_settings
from deepinfer_compile.runtime.weights import Weights, WeightSource, find_weights, load_weights

_MOST_THREADS = 2**31 - 1  # what the library's argument holds


@dataclass(frozen=True)
class Engine:
    """A loaded engine. `isa`: whose library runs. `seconds`: how long each part of loading took."""

    files: EngineFiles
    manifest: Manifest
    plan: EnginePlan
    executor: Executor
    isa: str
    source: WeightSource
    threads: int
    seconds: Mapping[str, float]

    @property
    def path(self) -> Path:
        return self.files.path

    def close(self) -> None:
        self.executor.close()


def load_engine(
    path: Path | str, *, checkpoint: Path | str | None = None, threads: int | None = None
) -> Engine:
    """Check everything, then load. Raises `EngineError`; `NotReady` when the oracle says no."""
    return start(open_folder(path), checkpoint=checkpoint, threads=threads)


def start(
    folder: EngineFolder, *, checkpoint: Path | str | None = None, threads: int | None = None
) -> Engine:
    """The second half of loading, for a folder that is already open and checked."""
    settings = read_settings()
    count = settings.threads if threads is None else threads
    if not 1 <= count <= _MOST_THREADS:
        raise EngineError("E020", f"threads must be 1 to {_MOST_THREADS}, found {count}")
    begin = time.perf_counter()
    library = choose_library(folder.path, folder.manifest, cpu_features())
    origin = Path(checkpoint) if checkpoint is not None else None
    source = find_weights(folder.path, folder.manifest, origin, settings)
    check_room(folder.plan, source.packed, memory_available())
    headers = folder.manifest.checkpoint.headers
    weights = load_weights(folder.files, folder.plan, source, headers)
    mapped = time.perf_counter()
    code = folder.files.library(library.path, folder.manifest.files[library.path])
    asked = time.perf_counter()
    if not source.packed:  # packed weights were hashed
        check_weights(folder.oracle, folder.plan, source, weights.by_buffer)
    _ask_oracle(folder, code, weights, count)
    answered = time.perf_counter()
    executor = Executor(folder.plan, code, weights.by_buffer, count)
    seconds = {
        "hashes": folder.seconds,
        "weights": mapped - begin,
        "oracle": answered - asked,
        "library": time.perf_counter() - answered,
    }
    return Engine(
        folder.files,
        folder.manifest,
        folder.plan,
        executor,
        library.isa,
        source,
        count,
        seconds,
    )


def _ask_oracle(folder: EngineFolder, code: Path, weights: Weights, threads: int) -> None:
    """On memory of its own, free again on return: what it leaves in the caches must not reach a
    request."""
    with closing(Executor(folder.plan, code, weights.by_buffer, threads)) as trial:
        check_numbers(folder.oracle, trial, folder.files)
