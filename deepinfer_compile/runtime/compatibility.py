"""Settings that DeepInfer takes at run time and an engine fixes when it is compiled.

Passing one is fine when the engine agrees. All that disagree are reported together, none ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches

from deepinfer_compile.format.manifest import Manifest
from deepinfer_compile.format.plan import EnginePlan
from deepinfer_compile.runtime.errors import RequestError

# Values that ask for nothing in particular; DeepInfer's own defaults are among them.
_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "data_parallel_size": (0,),
    "engram_parallel_size": (0,),
    "gpu_memory_utilization": (0.9,),
    "load_format": ("auto",),
    "tokens_per_block": (-1,),
    "lookahead_tokens": (0,),
    "ignore_len": (128 << 20,),
    "engine_rank": (0,),
    "engine_group_rank": (0,),
    "engine_type": (0, "NORMAL"),
    "offline_inference": (False, True),
    "chunked_prefill": (False, True),  # prompts are always chunked; the result is the same
    "trust_remote_code": (False, True),  # no code of a checkpoint is ever run
    "served_model_name": ("deepinfer-model",),
}


def check_settings(manifest: Manifest, plan: EnginePlan, settings: Mapping[str, object]) -> None:
    """Raise one E023 with every setting that the engine does not agree with."""
    fixed = _fixed(manifest, plan)
    problems: list[str] = []
    for name, asked in settings.items():
        if asked is None or asked in _NEUTRAL.get(name, ()):
            continue
        if name in fixed:
            held, spec = fixed[name]
            if asked != held:
                problems.append(f"{name}={asked!r}: the engine was compiled with {held!r} ({spec})")
        elif name in _NEUTRAL:
            problems.append(f"{name}={asked!r}: this runtime has only {_only(name)}")
        else:
            near = get_close_matches(name, [*fixed, *_NEUTRAL], n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            problems.append(f"{name}={asked!r}: no such setting{hint}")
    if problems:
        raise RequestError(
            "E023",
            "settings do not fit the engine",
            where=manifest.name,
            notes=problems,
            help="leave them out, or recompile with `--set` and the value you need",
        )


def _fixed(manifest: Manifest, plan: EnginePlan) -> dict[str, tuple[object, str]]:
    """What the engine holds under DeepInfer's names, and the spec setting behind each."""
    limits = plan.limits
    rows = {phase.name: phase.max_rows for phase in plan.phases}
    revision = manifest.checkpoint.revision
    return {
        "max_model_len": (limits.max_context, "engine.max_context"),
        "max_num_seqs": (limits.max_requests, "engine.max_requests"),
        "max_num_batched_tokens": (rows["prefill"], "engine.prefill_chunk"),
        "tokens_per_block": (limits.page_size, "engine.page_size"),
        "expert_parallel_size": (1, "engine.parallel.ep"),
        "data_parallel_size": (1, "engine.parallel.dp"),
        "context_parallel_size": (1, "engine.parallel.cp"),
        "engram_parallel_size": (1, "engine.parallel"),
        "batch_invariant": (plan.batch_invariant, "engine.batch_invariant"),
        "tokenizer": ("its own", "copied from the checkpoint"),
        "revision": (revision, "checkpoint.revision"),
        "tokenizer_revision": (revision, "checkpoint.revision"),
    }


def _only(name: str) -> str:
    return " or ".join(repr(value) for value in _NEUTRAL[name])
