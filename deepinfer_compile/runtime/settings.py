"""The only reads of the environment in the runtime, and what there is to set.

`VARIABLES` lists all that is read; `deepinfer-engine doctor` prints it with values and sources.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from deepinfer_compile.runtime.errors import EngineError

_OFF = ("", "0", "false", "off")
_PREFIX = "DEEPINFER_"
_MOST = 2**31 - 1
_CPU_QUOTA = Path("/sys/fs/cgroup/cpu.max")


@dataclass(frozen=True)
class Variable:
    """What may be set: the kind of its value, what holds without it, and what it is for."""

    name: str
    kind: str
    default: str
    help: str


VARIABLES = (
    Variable("DEEPINFER_HF_MODEL_DIR", "folder", "none", "a checkpoint, for its weights"),
    Variable(
        "DEEPINFER_BATCH_INVARIANT", "0 or 1", "0", "refuse an engine that was not checked for it"
    ),
    Variable(
        "DEEPINFER_ZERO_OVERHEAD_SCHEDULING", "0 or 1", "1", "plan a step while another one runs"
    ),
    Variable(
        "DEEPINFER_LOGGING_INTERVAL_STEP", "steps", "100", "between lines of statistics; 0: none"
    ),
    Variable(
        "DEEPINFER_DECODE_TOKEN_BLACKLIST", "token ids", "none", "that never come, with commas"
    ),
    Variable("DEEPINFER_SAMPLER_FORCE_TOPK", "tokens", "0", "the best that take part; 0: all"),
    Variable("DEEPINFER_COMPUTE_SUM_SMALLER_PROBS", "0 or 1", "0", "fill sum_smaller_probs"),
    Variable("DEEPINFER_PROFILE_HTTP_ENABLE", "0 or 1", "0", "answer POST /profile, on localhost"),
    Variable("DEEPINFER_PROFILE_HTTP_PORT_BASE", "port", "6070", "where"),
    Variable("DEEPINFER_TORCH_PROFILER_DIR", "folder", "/tmp", "where traces are written"),
    Variable("HF_HUB_CACHE", "folder", "HF_HOME/hub", "where Hugging Face keeps downloads"),
    Variable("HF_HOME", "folder", "XDG_CACHE_HOME/huggingface", "the folder above it"),
    Variable("XDG_CACHE_HOME", "folder", "HOME/.cache", "the folder above that"),
    Variable("HOME", "folder", "none", "the user's folder"),
    Variable("OMP_NUM_THREADS", "threads", "usable CPUs", "of the engine, unless the caller says"),
    Variable("NO_COLOR", "any text", "none", "no colours"),
)
# `deepinfer-compile` reads these; an engine has their values in it.
COMPILE_TIME = (
    "DEEPINFER_ENABLE_MTP_VARLEN",
    "DEEPINFER_ENGRAM_FORCE_GPU_STORAGE",
    "DEEPINFER_OVERRIDE_NUM_EXTRA_EXPERTS",
    "DEEPINFER_USE_NEXTN_DECODE",
    "DEEPINFER_YOCO_PREFILL_TRUNCATION_MODE",
)
_DEFAULTS = {variable.name: variable.default for variable in VARIABLES}


@dataclass(frozen=True)
class Found:
    """A variable as it is here: `source` is `environment` or `default`."""

    variable: Variable
    value: str
    source: str


@dataclass(frozen=True)
class Drawing:
    """What holds for every token that is drawn. `blacklist`: ids that never come. `shortlist`: how
    many of the best logits take part, 0 for all."""

    blacklist: tuple[int, ...] = ()
    shortlist: int = 0
    sum_smaller: bool = False


ALL_TOKENS = Drawing()


@dataclass(frozen=True)
class Settings:
    """What the environment says; None where it says nothing, or that there is to be none."""

    model_dir: Path | None
    hub_cache: Path | None
    threads: int
    color: bool
    batch_invariant: bool
    async_scheduling: bool
    log_interval: int
    profile_port: int | None
    profile_dir: Path
    drawing: Drawing


def read_settings(environment: Mapping[str, str] | None = None) -> Settings:
    """Settings of this process, or of a given environment. E020: some do not read."""
    env = os.environ if environment is None else environment
    folder = env.get("DEEPINFER_HF_MODEL_DIR", "").strip()
    problems: list[str] = []
    port = _count(env, "DEEPINFER_PROFILE_HTTP_PORT_BASE", problems)
    settings = Settings(
        model_dir=Path(folder) if folder else None,
        hub_cache=_hub_cache(env),
        threads=_threads(env, problems),
        color=not env.get("NO_COLOR"),
        batch_invariant=_switch(env, "DEEPINFER_BATCH_INVARIANT"),
        async_scheduling=_switch(env, "DEEPINFER_ZERO_OVERHEAD_SCHEDULING"),
        log_interval=max(0, _count(env, "DEEPINFER_LOGGING_INTERVAL_STEP", problems, -_MOST)),
        profile_port=port if _switch(env, "DEEPINFER_PROFILE_HTTP_ENABLE") else None,
        profile_dir=Path(_text(env, "DEEPINFER_TORCH_PROFILER_DIR")),
        drawing=Drawing(
            blacklist=_tokens(env, "DEEPINFER_DECODE_TOKEN_BLACKLIST", problems),
            shortlist=_count(env, "DEEPINFER_SAMPLER_FORCE_TOPK", problems),
            sum_smaller=_switch(env, "DEEPINFER_COMPUTE_SUM_SMALLER_PROBS"),
        ),
    )
    if problems:
        message = "; ".join(problems)
        raise EngineError("E020", message, where="environment", help="see deepinfer-engine doctor")
    return settings


def found_settings(environment: Mapping[str, str] | None = None) -> tuple[Found, ...]:
    """Every variable as it is set here."""
    env = os.environ if environment is None else environment
    return tuple(
        Found(one, env[one.name], "environment")
        if one.name in env
        else Found(one, one.default, "default")
        for one in VARIABLES
    )


def unknown_settings(environment: Mapping[str, str] | None = None) -> tuple[tuple[str, str], ...]:
    """Variables named like ours that nothing reads, each with the nearest one that is read."""
    env = os.environ if environment is None else environment
    known = [*(name for name in _DEFAULTS if name.startswith(_PREFIX)), *COMPILE_TIME]
    return tuple(
        (name, get_close_matches(name, known, n=1, cutoff=0.0)[0])
        for name in sorted(env)
        if name.startswith(_PREFIX) and name not in known
    )


def _tokens(env: Mapping[str, str], name: str, problems: list[str]) -> tuple[int, ...]:
    parts = [part.strip() for part in env.get(name, "").split(",")]
    wrong = [part for part in parts if part and not (part.isascii() and part.isdigit())]
    if wrong:
        found = ", ".join(f"`{part}`" for part in wrong)
        problems.append(f"`{name}` must be token ids with commas between, found {found}")
        return ()
    return tuple(int(part) for part in parts if part)


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


def _text(env: Mapping[str, str], name: str) -> str:
    return env.get(name, "").strip() or _DEFAULTS[name]


def _switch(env: Mapping[str, str], name: str) -> bool:
    """Off when set to nothing, as in DeepInfer."""
    return env.get(name, _DEFAULTS[name]).strip().lower() not in _OFF


def _threads(env: Mapping[str, str], problems: list[str]) -> int:
    text = env.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    if not text:
        return usable_cpus()
    if text.isascii() and text.isdigit() and int(text) > 0:
        return int(text)
    problems.append(f"`OMP_NUM_THREADS` must be a count of threads, found `{text}`")
    return 0


def _count(env: Mapping[str, str], name: str, problems: list[str], least: int = 0) -> int:
    text = _text(env, name)
    try:
        count = int(text)
    except ValueError:
        problems.append(f"`{name}` must be a whole number, found `{text}`")
        return 0
    if not least <= count <= _MOST:
        problems.append(f"`{name}` must be {least} to {_MOST}, found `{text}`")
    return count


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
