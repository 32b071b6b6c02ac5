"""Open an engine folder and refuse what is not exactly as it was written. Executes none of it.

    path -> EngineFolder(path, manifest, plan)

Every file the manifest names is hashed. All differences are reported together: missing, changed,
linked, and files under `kernels/` that the manifest does not know.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TypeVar

from deepinfer_compile.format import jsons
from deepinfer_compile.format.manifest import ABI, MANIFEST, PLAN, SCHEMA, Manifest
from deepinfer_compile.format.plan import EnginePlan, MemoryClass
from deepinfer_compile.runtime.errors import EngineError, NotCompiled

T = TypeVar("T")
_AGAIN = "copy the engine again, or recompile it"
_CHECKPOINT_FILES = ("config.json", "model.safetensors.index.json", "model.safetensors")


@dataclass(frozen=True)
class EngineFolder:
    """An engine on disk, read and checked: `hashed` bytes took `seconds`."""

    path: Path
    manifest: Manifest
    plan: EnginePlan
    hashed: int
    seconds: float


def open_folder(path: Path | str, *, skip_weights: bool = False) -> EngineFolder:
    """Read and check an engine; `skip_weights` leaves `weights/` unhashed, for who reads none."""
    path = Path(path)
    manifest = _manifest(path)
    begin = time.perf_counter()
    hashed = _check_files(path, manifest, skip_weights)
    seconds = time.perf_counter() - begin
    plan = _load(EnginePlan, path / PLAN)
    _check_plan(path, manifest, plan)
    return EngineFolder(path, manifest, plan, hashed, seconds)


def _manifest(path: Path) -> Manifest:
    file = path / MANIFEST
    if not file.is_file():
        if any((path / name).is_file() for name in _CHECKPOINT_FILES):
            raise NotCompiled(path)
        message = f"not an engine: the folder has no {MANIFEST}"
        if not path.exists():
            message = "the engine does not exist"
        elif not path.is_dir():
            message = "not an engine: a folder is expected"
        help = "compile one: deepinfer-compile SPEC --target cpu -o model.engine"
        raise EngineError("E450", message, where=str(path), help=help)
    schema = _schema(file)
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
    manifest = _load(Manifest, file)
    if manifest.abi != ABI:
        message = f"the engine's library has ABI {manifest.abi}, this runtime calls {ABI}"
        raise EngineError("E454", message, where=str(file), help="recompile the engine")
    return manifest


def _schema(file: Path) -> int:
    """Read before anything else: a newer manifest may have fields this runtime does not know."""
    try:
        parsed = json.loads(_read(file))
    except (ValueError, RecursionError):
        parsed = None
    schema = parsed.get("schema") if isinstance(parsed, dict) else None
    if not isinstance(schema, int) or isinstance(schema, bool):
        message = "the manifest is damaged: it has no schema number"
        raise EngineError("E457", message, where=str(file), help=_AGAIN)
    return schema


def _load(kind: type[T], file: Path) -> T:
    try:
        return jsons.load(kind, _read(file))
    except jsons.FormatError as bad:
        message = f"the file does not fit schema {SCHEMA}: {bad}"
        raise EngineError("E457", message, where=str(file), help=_AGAIN) from None


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        message = "the file is damaged: it is not UTF-8"
        raise EngineError("E457", message, where=str(file), help=_AGAIN) from None
    except OSError as failure:
        message = f"cannot read the file: {failure.strerror or failure}"
        raise EngineError("E550", message, where=str(file)) from None


def _check_files(path: Path, manifest: Manifest, skip_weights: bool) -> int:
    unsafe = [name for name in manifest.files if not _safe(name)]
    if unsafe:
        message = "the manifest names files outside the engine"
        raise EngineError("E453", message, where=str(path / MANIFEST), notes=unsafe)
    needed = (PLAN, *(library.path for library in manifest.libraries))
    problems = [f"{name}: not in the manifest" for name in needed if name not in manifest.files]
    hashed = 0
    for name, wanted in manifest.files.items():
        if skip_weights and name.startswith("weights/"):
            continue
        fault, size = _fault(path / name, wanted)
        hashed += size
        if fault:
            problems.append(f"{name}: {fault}")
    problems += [f"{name}: not in the manifest" for name in _strangers(path, manifest)]
    if problems:
        message = "the engine's files are not those its manifest names"
        raise EngineError("E452", message, where=str(path), notes=problems, help=_AGAIN)
    return hashed


def _safe(name: str) -> bool:
    parts = PurePosixPath(name).parts
    plain = bool(parts) and ".." not in parts and not name.startswith("/")
    return plain and "\\" not in name and "\0" not in name


def _fault(file: Path, wanted: str) -> tuple[str, int]:
    """What is wrong with one file ("" for nothing), and the bytes hashed."""
    if file.is_symlink():
        return "a link; engines hold plain files", 0
    try:
        with file.open("rb") as stream:
            found = hashlib.file_digest(stream, "sha256").hexdigest()
            size = stream.tell()
    except FileNotFoundError:
        return "missing", 0
    except OSError as failure:
        return f"cannot be read: {failure.strerror or failure}", 0
    return ("" if found == wanted else "sha256 differs"), size


def _strangers(path: Path, manifest: Manifest) -> Iterator[str]:
    """Files beside the binaries that nobody vouches for."""
    for file in sorted((path / "kernels").rglob("*")):
        name = file.relative_to(path).as_posix()
        if (file.is_symlink() or not file.is_dir()) and name not in manifest.files:
            yield name


def _check_plan(path: Path, manifest: Manifest, plan: EnginePlan) -> None:
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
    weights = sum(b.bytes for b in plan.buffers if b.memory is MemoryClass.WEIGHTS)
    if weights != plan.memory.weights:
        problems.append(f"weights take {weights} bytes, the plan says {plan.memory.weights}")
    if problems:
        message = "the plan contradicts itself"
        raise EngineError("E455", message, where=str(path / PLAN), notes=problems, help=_AGAIN)
