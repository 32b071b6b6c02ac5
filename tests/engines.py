"""Engines that tests share: each is compiled once per machine and kept in build/test-engines.

The folder's name holds a hash of everything that can change an engine: the compiler's sources, the
templates, the examples. So a stale engine is never used.
"""

import fcntl
import functools
import hashlib
from collections.abc import Callable
from pathlib import Path

from deepinfer_compile.driver import compile_engine, find_target
from deepinfer_compile.spec.hf import from_hf
from deepinfer_compile.spec.load import load_spec
from deepinfer_compile.target import Target
from tests.golden_data import golden_root

REPO = Path(__file__).parents[1]
CACHE = REPO / "build" / "test-engines"


@functools.cache
def _fingerprint() -> str:
    digest = hashlib.sha256()
    for folder in ("deepinfer_compile", "targets", "templates", "examples"):
        for file in sorted((REPO / folder).rglob("*")):
            if file.suffix in (".py", ".jinja", ".yaml") and "runtime" not in file.parts:
                digest.update(str(file.relative_to(REPO)).encode() + file.read_bytes())
    return digest.hexdigest()[:16]


def _cached(name: str, make) -> Path:
    folder = CACHE / _fingerprint()
    folder.mkdir(parents=True, exist_ok=True)
    engine = folder / f"{name}.engine"
    with (folder / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not engine.exists():
            make(engine)
    return engine


def example_engine(name: str, *overrides: str) -> Path:
    """`examples/<name>.yaml` compiled for the CPU with `--set` strings; weights packed."""
    spec = load_spec(REPO / "examples" / f"{name}.yaml", overrides=overrides, environment={})
    label = "-".join([name, *(o.replace("=", "_").replace(".", "_") for o in overrides)])
    return _cached(label, lambda out: compile_engine(spec, find_target("cpu"), out))


def nano_engine(change: Callable[[Target], Target] | None = None) -> Path:
    """The nano example; `change` makes the target it is compiled for."""
    if change is None:
        return example_engine("v41_nano")
    spec = load_spec(REPO / "examples" / "v41_nano.yaml", environment={})
    target = change(find_target("cpu"))
    return _cached(f"v41_nano-{change.__name__}", lambda out: compile_engine(spec, target, out))


def golden_engine(policy: str) -> Path:
    """The golden checkpoint with probes, under `f32` or `vendor`; weights are not packed."""
    overrides = [f"engine.numerics={policy}", "engine.probes=true"]
    spec = from_hf(golden_root() / "v41_tiny", overrides=overrides, environment={})
    return _cached(f"golden-{policy}", lambda out: compile_engine(spec, find_target("cpu"), out))
