"""The only reads of the environment in the runtime.

DEEPINFER_HF_MODEL_DIR    a checkpoint folder, as DeepInfer users already set it
HF_HUB_CACHE, HF_HOME     where Hugging Face keeps downloads
OMP_NUM_THREADS           threads, unless the caller says; else the CPUs this process may use
NO_COLOR                  plain output
DEEPINFER_BATCH_INVARIANT 1: the engine must have been checked for it, as DeepInfer users ask for it
DEEPINFER_ZERO_OVERHEAD_SCHEDULING   0: no step is planned while another runs
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from deepinfer_compile.runtime.errors import EngineError

_OFF = ("", "0", "false", "off")
_CPU_QUOTA = Path("/sys/fs/cgroup/cpu.max")


@dataclass(frozen=True)
class Settings:
    """What the environment says; None where it says nothing."""

    model_dir: Path | None
    hub_cache: Path | None
    threads: int
    color: bool
    batch_invariant: bool
    async_scheduling: bool


def read_settings(environment: Mapping[str, str] | None = None) -> Settings:
    """Settings of this process, or of a given environment."""
    env = os.environ if environment is None else environment
    folder = env.get("DEEPINFER_HF_MODEL_DIR", "").strip()
    return Settings(
        model_dir=Path(folder) if folder else None,
        hub_cache=_hub_cache(env),
        threads=_threads(env),
        color=not env.get("NO_COLOR"),
        batch_invariant=_on(env.get("DEEPINFER_BATCH_INVARIANT", "")),
        async_scheduling=_on(env.get("DEEPINFER_ZERO_OVERHEAD_SCHEDULING", "1")),
    )


def _on(text: str) -> bool:
    return text.strip().lower() not in _OFF


def _hub_cache(env: Mapping[str, str]) -> Path | None:
    """The rules of huggingface_hub, so that what it fetched is found without importing it."""
    if cache := env.get("HF_HUB_CACHE"):
        return Path(cache)
    if home := env.get("HF_HOME"):
        return Path(home) / "hub"
    if home := env.get("XDG_CACHE_HOME"):
        return Path(home) / "huggingface" / "hub"
    home = env.get("HOME")
    return Path(home) / ".cache" / "huggingface" / "hub" if home else None


def _threads(env: Mapping[str, str]) -> int:
    text = env.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    if not text:
        return usable_cpus()
    if text.isascii() and text.isdigit() and int(text) > 0:
        return int(text)
    raise EngineError(
        "E020",
        f"`OMP_NUM_THREADS` must be a count of threads, found `{text}`",
        where="environment OMP_NUM_THREADS",
    )


def usable_cpus() -> int:
    """CPUs of the affinity mask, or fewer when the container has a quota: more threads than that
    would wait for each other at every step."""
    known = hasattr(os, "sched_getaffinity")  # macOS has no affinity
    count = len(os.sched_getaffinity(0)) if known else os.cpu_count() or 1
    try:
        quota, period = _CPU_QUOTA.read_text().split()
        allowed = math.ceil(int(quota) / int(period))
    except (OSError, ValueError):  # no such file, or no limit ("max")
        return count
    return max(1, min(count, allowed))
