"""What may change a spec from outside its file: `--set` and DeepInfer's environment variables.

    file  <  environment  <  --set

    variable                                spec setting
    DEEPINFER_BATCH_INVARIANT               engine.batch_invariant
    DEEPINFER_USE_NEXTN_DECODE              engine.draft_len
    DEEPINFER_ENABLE_MTP_VARLEN             engine.verify: 1 confidence, 0 fixed
    DEEPINFER_ENGRAM_FORCE_GPU_STORAGE      engine.engram: 1 device, 0 as the spec says
    DEEPINFER_YOCO_PREFILL_TRUNCATION_MODE  engine.bounded_replay: off, mask or compact
    DEEPINFER_OVERRIDE_NUM_EXTRA_EXPERTS    engine.parallel.redundant
    DEEPINFER_HF_MODEL_DIR                  checkpoint.path, unless the spec is synthetic

Only names are known here; the environment itself is read in `spec/load.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches

from deepinfer_compile.diagnostics import Diagnostic
from deepinfer_compile.spec.tree import Value, parse_value
from deepinfer_compile.spec.validate import schema_paths

# Choosing one kind of checkpoint drops the others, and what belongs to them.
_RIVALS = {
    "checkpoint.repo": ("path", "synthetic"),
    "checkpoint.path": ("repo", "revision", "synthetic"),
    "checkpoint.synthetic": ("repo", "revision", "path"),
}


@dataclass(frozen=True)
class Setting:
    """A value for a dotted path, and who asked for it."""

    key: str
    value: Value
    source: str


@dataclass(frozen=True)
class _Variable:
    """How one environment variable reads: `accepts` says in words what `read` takes."""

    name: str
    key: str
    accepts: str
    read: Callable[[str], Value]


def _switch(text: str) -> bool:
    words = {"0": False, "false": False, "off": False, "1": True, "true": True, "on": True}
    return words[text.lower()]


def _count(text: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise ValueError(text)
    return int(text)


def _verify(text: str) -> str:
    return "confidence" if _switch(text) else "fixed"


def _engram(text: str) -> str | None:
    return "device" if _switch(text) else None


def _replay(text: str) -> bool:
    return {"off": False, "mask": True, "compact": True}[text.lower()]


_VARIABLES = (
    _Variable("DEEPINFER_BATCH_INVARIANT", "engine.batch_invariant", "0 or 1", _switch),
    _Variable("DEEPINFER_USE_NEXTN_DECODE", "engine.draft_len", "a count of drafts", _count),
    _Variable("DEEPINFER_ENABLE_MTP_VARLEN", "engine.verify", "0 or 1", _verify),
    _Variable("DEEPINFER_ENGRAM_FORCE_GPU_STORAGE", "engine.engram", "0 or 1", _engram),
    _Variable(
        "DEEPINFER_YOCO_PREFILL_TRUNCATION_MODE",
        "engine.bounded_replay",
        "off, mask or compact",
        _replay,
    ),
    _Variable(
        "DEEPINFER_OVERRIDE_NUM_EXTRA_EXPERTS",
        "engine.parallel.redundant",
        "a count of experts",
        _count,
    ),
    _Variable("DEEPINFER_HF_MODEL_DIR", "checkpoint.path", "a folder", str),
)


def from_environment(
    environment: Mapping[str, str],
) -> tuple[list[Setting], list[Diagnostic]]:
    """Settings of the variables that are set and not empty; E110 for those that do not read."""
    settings: list[Setting] = []
    problems: list[Diagnostic] = []
    for variable in _VARIABLES:
        text = environment.get(variable.name, "").strip()
        if not text:
            continue
        source = f"environment {variable.name}"
        try:
            value = variable.read(text)
        except (KeyError, ValueError):
            message = f"`{variable.name}` must be {variable.accepts}, found `{text}`"
            note = f"it sets `{variable.key}`"
            problems.append(Diagnostic("E110", message, where=source, notes=(note,)))
            continue
        if value is not None:
            settings.append(Setting(variable.key, value, source))
    return settings, problems


def from_command_line(overrides: Sequence[str]) -> tuple[list[Setting], list[Diagnostic]]:
    """Settings of `path=value` strings; E109 for those that are none, or name no path."""
    known = list(schema_paths())
    settings: list[Setting] = []
    problems: list[Diagnostic] = []
    for text in overrides:
        source = f"--set {text}"
        key, equals, written = text.partition("=")
        key = key.strip()
        try:
            value = parse_value(written)
        except ValueError:
            message = f"the value of `{key}` is not readable as YAML: `{written}`"
            problems.append(Diagnostic("E109", message, where=source))
            continue
        if not equals:
            message, help = f"`{text}` sets nothing", "write --set engine.max_rows=64"
            problems.append(Diagnostic("E109", message, where=source, help=help))
        elif key not in known:
            message = f"a spec has no `{key}`"
            help = f"did you mean `{_nearest(key, known)}`?"
            problems.append(Diagnostic("E109", message, where=source, help=help))
        else:
            settings.append(Setting(key, value, source))
    return settings, problems


def _nearest(key: str, known: Sequence[str]) -> str:
    """The path most like `key`; a bare field name finds its section."""
    leaves = [path for path in known if path.rpartition(".")[2] == key.rpartition(".")[2]]
    return (leaves or get_close_matches(key, known, n=1, cutoff=0.0))[0]


def apply(
    values: dict[str, Value], settings: Sequence[Setting]
) -> tuple[dict[str, Value], dict[str, str], list[Diagnostic]]:
    """`values` with the settings put in, later ones winning, and the source of each path."""
    changed = dict(values)
    sources: dict[str, str] = {}
    problems: list[Diagnostic] = []
    for setting in settings:
        if _is_moot(setting, changed):
            continue
        placed = _placed(changed, setting.key.split("."), setting.value)
        if placed is None:
            message = f"`{setting.key}` cannot be set: what holds it is not a mapping"
            problems.append(Diagnostic("E109", message, where=setting.source))
            continue
        changed = placed
        sources = {key: s for key, s in sources.items() if not key.startswith(f"{setting.key}.")}
        sources[setting.key] = setting.source
        if setting.value is not None:
            _drop_rivals(changed, sources, setting.key)
    return changed, sources, problems


def _is_moot(setting: Setting, values: Mapping[str, Value]) -> bool:
    """A model folder in the environment names released weights; a seed asks for none."""
    checkpoint = values.get("checkpoint")
    synthetic = isinstance(checkpoint, dict) and checkpoint.get("synthetic") is not None
    return (
        synthetic and setting.key == "checkpoint.path" and setting.source.startswith("environment")
    )


def _placed(
    values: dict[str, Value], parts: Sequence[str], value: Value
) -> dict[str, Value] | None:
    """A copy with `value` at `parts`, making sections on the way; None if one is no mapping."""
    name, *rest = parts
    if not rest:
        return {**values, name: value}
    inner = values.get(name)
    inner = {} if inner is None else inner
    if not isinstance(inner, dict):
        return None
    placed = _placed(inner, rest, value)
    return None if placed is None else {**values, name: placed}


def _drop_rivals(values: dict[str, Value], sources: dict[str, str], key: str) -> None:
    checkpoint = values.get("checkpoint")
    rivals = _RIVALS.get(key, ())
    if not rivals or not isinstance(checkpoint, dict):
        return
    kept = {name: value for name, value in checkpoint.items() if name not in rivals}
    values["checkpoint"] = kept
    for rival in rivals:
        sources.pop(f"checkpoint.{rival}", None)
