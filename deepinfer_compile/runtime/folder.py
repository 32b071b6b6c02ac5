"""Open an engine and refuse what is not exactly as it was written. Executes none of it.

    path -> EngineFolder(files, manifest, plan)         the folder itself, or one file that holds it

Every file the manifest names is hashed. All differences are reported together: missing, changed,
linked, and whatever lies in the engine that the manifest does not know.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from deepinfer_compile.format import jsons
from deepinfer_compile.format.manifest import ABI, MANIFEST, PLAN, SCHEMA, Manifest, plain_name
from deepinfer_compile.format.oracle import ORACLE, Oracle
from deepinfer_compile.format.plan import EnginePlan
from deepinfer_compile.runtime.consistency import (
    AGAIN,
    check_numbers,
    check_oracle,
    check_plan,
)
from deepinfer_compile.runtime.errors import EngineError, NotCompiled
from deepinfer_compile.runtime.files import EngineFiles, open_files

T = TypeVar("T")
_CHECKPOINT_FILES = ("config.json", "model.safetensors.index.json", "model.safetensors")


@dataclass(frozen=True)
class EngineFolder:
    """An engine on disk, read and checked: `hashed` bytes took `seconds`."""

    files: EngineFiles
    manifest: Manifest
    plan: EnginePlan
    oracle: Oracle
    hashed: int
    seconds: float

    @property
    def path(self) -> Path:
        return self.files.path


def open_folder(path: Path | str, *, skip_weights: bool = False) -> EngineFolder:
    """Read and check an engine; `skip_weights` leaves `weights/` unhashed, for who reads none."""
    files = open_files(Path(path))
    manifest = _manifest(files)
    begin = time.perf_counter()
    hashed = _check_files(files, manifest, skip_weights)
    seconds = time.perf_counter() - begin
    check_numbers(files.path, manifest)
    plan = _load(EnginePlan, files, PLAN)
    check_plan(files.path, manifest, plan)
    oracle = _load(Oracle, files, ORACLE)
    check_oracle(files.path, plan, oracle)
    return EngineFolder(files, manifest, plan, oracle, hashed, seconds)


def _manifest(files: EngineFiles) -> Manifest:
    path, file = files.path, files.path / MANIFEST
    if files.fault(MANIFEST):
        if any((path / name).is_file() for name in _CHECKPOINT_FILES):
            raise NotCompiled(path)
        message = f"not an engine: it has no {MANIFEST}"
        if not path.exists():
            message = "the engine does not exist"
        elif not path.is_dir() and not path.is_file():
            message = "not an engine: neither a folder nor an engine in one file"
        help = "compile one: deepinfer-compile SPEC --target cpu -o model.engine"
        raise EngineError("E450", message, where=str(path), help=help)
    schema = _schema(files)
    if schema > SCHEMA:
        raise EngineError(
            "E451",
            f"the engine has schema {schema}, this runtime reads up to {SCHEMA}",
            where=str(file),
            help="update deepinfer-compile, or recompile the engine with this version",
        )
    if schema < SCHEMA:
        message = f"the engine has schema {schema}, this runtime reads {SCHEMA}"
        raise EngineError("E451", message, where=str(file), help="recompile the engine")
    manifest = _load(Manifest, files, MANIFEST)
    if manifest.abi != ABI:
        message = f"the engine's library has ABI {manifest.abi}, this runtime calls {ABI}"
        raise EngineError("E454", message, where=str(file), help="recompile the engine")
    return manifest


def _schema(files: EngineFiles) -> int:
    """Read before anything else: a newer manifest may have fields this runtime does not know."""
    try:
        parsed = json.loads(_text(files, MANIFEST))
    except (ValueError, RecursionError):
        parsed = None
    schema = parsed.get("schema") if isinstance(parsed, dict) else None
    if not isinstance(schema, int) or isinstance(schema, bool):
        message = "the manifest is damaged: it has no schema number"
        raise EngineError("E457", message, where=str(files.path / MANIFEST), help=AGAIN)
    return schema


def _load(kind: type[T], files: EngineFiles, name: str) -> T:
    try:
        return jsons.load(kind, _text(files, name))
    except jsons.FormatError as bad:
        message = f"the file does not fit schema {SCHEMA}: {bad}"
        raise EngineError("E457", message, where=str(files.path / name), help=AGAIN) from None


def _text(files: EngineFiles, name: str) -> str:
    try:
        return files.map(name).tobytes().decode()
    except UnicodeDecodeError:
        message = "the file is damaged: it is not UTF-8"
        raise EngineError("E457", message, where=str(files.path / name), help=AGAIN) from None


def _check_files(files: EngineFiles, manifest: Manifest, skip_weights: bool) -> int:
    unsafe = [name for name in manifest.files if not plain_name(name)]
    if unsafe:
        message = "the manifest names files outside the engine"
        raise EngineError("E453", message, where=str(files.path / MANIFEST), notes=unsafe)
    needed = (PLAN, ORACLE, *(library.path for library in manifest.libraries))
    problems = [f"{name}: not in the manifest" for name in needed if name not in manifest.files]
    hashed = 0
    for name, wanted in manifest.files.items():
        if skip_weights and name.startswith("weights/"):
            continue
        fault, size = _fault(files, name, wanted)
        hashed += size
        if fault:
            problems.append(f"{name}: {fault}")
    known = {MANIFEST, *needed, *manifest.files}
    problems += [f"{name}: not in the manifest" for name in files.names() if name not in known]
    if problems:
        message = "the engine's files are not those its manifest names"
        raise EngineError("E452", message, where=str(files.path), notes=problems, help=AGAIN)
    return hashed


def _fault(files: EngineFiles, name: str, wanted: str) -> tuple[str, int]:
    """What is wrong with one file ("" for nothing), and the bytes hashed."""
    if fault := files.fault(name):
        return fault, 0
    try:
        found, size = files.sha256(name)
    except OSError as failure:
        return f"cannot be read: {failure.strerror or failure}", 0
    return ("" if found == wanted else "sha256 differs"), size
