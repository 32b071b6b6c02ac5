"""Find the folder of a checkpoint on this machine, without the network.

--checkpoint DIR, else the spec's path, else the Hugging Face cache at the spec's revision
"""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

from deepinfer_compile.checkpoint.fetch import UNWANTED, WANTED
from deepinfer_compile.diagnostics import CompileError, error
from deepinfer_compile.spec.schema import Checkpoint


def locate(checkpoint: Checkpoint, override: Path | None = None, *, spec: str = "SPEC") -> Path:
    """The checkpoint's folder; `spec` is how the user names the spec in the command to run next."""
    if override is not None:
        return _folder(override, "--checkpoint")
    if checkpoint.path is not None:
        return _folder(Path(checkpoint.path), "checkpoint.path")
    if checkpoint.repo is not None:
        return _cached(checkpoint.repo, checkpoint.revision, spec)
    seed = checkpoint.synthetic or 0
    raise error(
        "E413",
        "the spec's weights are synthetic and have not been written",
        where=spec,
        help=f"run `deepinfer-compile {spec} --write-checkpoint DIR --seed {seed}`, "
        "then pass --checkpoint DIR",
    )


def _folder(folder: Path, setting: str) -> Path:
    if folder.is_dir():
        return folder
    found = "is a file" if folder.exists() else "does not exist"
    message = f"the folder of {setting} {found}"
    help = "give a folder in the Hugging Face layout: config.json, tokenizer.json, safetensors"
    raise error("E401", message, where=str(folder), help=help)


def _cached(repo: str, revision: str | None, spec: str) -> Path:
    try:
        return Path(
            snapshot_download(
                repo,
                revision=revision,
                local_files_only=True,
                allow_patterns=WANTED,
                ignore_patterns=UNWANTED,
            )
        )
    except (LocalEntryNotFoundError, HFValidationError) as failure:
        raise _not_here(repo, revision, spec) from failure


def _not_here(repo: str, revision: str | None, spec: str) -> CompileError:
    return error(
        "E413",
        "the checkpoint is not on this machine, or not all of it",
        where=f"{repo}@{revision}" if revision else repo,
        notes=("searched the Hugging Face cache (HF_HOME moves it)",),
        help=f"run `deepinfer-compile {spec} --fetch`, or pass a folder with --checkpoint DIR",
    )
