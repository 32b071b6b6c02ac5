"""Download a checkpoint into the Hugging Face cache: `--fetch`, the only user of the network.

    repo @ revision -> snapshot folder

huggingface_hub does the work: it reads HF_HOME, HF_TOKEN, HF_ENDPOINT and HF_HUB_OFFLINE, continues
a dropped connection where it broke, and keeps files that arrived. Here are the check that all of it
fits the disk, and the words for what can go wrong.
"""

from __future__ import annotations

import errno
import sys
from contextlib import nullcontext
from pathlib import Path

from httpx2 import HTTPError  # the hub client's own HTTP library: what a failed connection raises
from huggingface_hub import constants, snapshot_download
from huggingface_hub.errors import (
    DryRunError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils.tqdm import disable_progress_bars

from deepinfer_compile.checkpoint.disk import SPARE_BYTES, raise_if_full
from deepinfer_compile.diagnostics import CompileError, Diagnostic, error

# The top folder only: repositories keep other formats and code in folders of their own.
WANTED = ["*.safetensors", "*.json"]
UNWANTED = ["*/*"]


def fetch(repo: str, revision: str | None = None, *, progress: bool = True) -> Path:
    """The snapshot folder of `repo`, complete. Bars go to stderr, and only to a terminal."""
    try:
        shown = progress and sys.stderr.isatty()
        with nullcontext() if shown else disable_progress_bars():
            _check_disk(repo, revision)
            return Path(
                snapshot_download(
                    repo, revision=revision, allow_patterns=WANTED, ignore_patterns=UNWANTED
                )
            )
    except (HTTPError, OSError, ValueError) as failure:
        raise CompileError([_explain(repo, revision, failure)]) from failure


def _check_disk(repo: str, revision: str | None) -> None:
    """Refuse before the first byte when what is still to come does not fit."""
    try:
        with disable_progress_bars():
            files = snapshot_download(
                repo,
                revision=revision,
                allow_patterns=WANTED,
                ignore_patterns=UNWANTED,
                dry_run=True,
            )
    except DryRunError as failure:
        # The hub did not answer. A complete snapshot in the cache is still a success.
        if isinstance(failure.__cause__, (HTTPError, OSError)):
            if not isinstance(failure.__cause__, HfHubHTTPError):
                return
            raise failure.__cause__ from None
        raise
    if not any(file.filename.endswith(".safetensors") for file in files):
        raise error(
            "E505",
            "the repository holds no safetensors files at its top",
            where=_place(repo, revision),
            help="check checkpoint.repo and checkpoint.revision",
        )
    missing = sum(file.file_size or 0 for file in files if file.will_download)
    if missing:
        raise_if_full(Path(constants.HF_HUB_CACHE), missing + SPARE_BYTES)


def _explain(repo: str, revision: str | None, failure: Exception) -> Diagnostic:
    code, message, help = _verdict(failure)
    first_line = next(iter(str(failure).splitlines()), type(failure).__name__)
    return Diagnostic(code, message, where=_place(repo, revision), notes=(first_line,), help=help)


def _verdict(failure: Exception) -> tuple[str, str, str]:
    """Code, message and remedy. Order matters: the hub's errors derive from each other."""
    status = failure.response.status_code if isinstance(failure, HfHubHTTPError) else 0
    if isinstance(failure, HFValidationError):
        return "E505", "this is no repository name", "write checkpoint.repo as owner/name"
    if isinstance(failure, RevisionNotFoundError):
        return (
            "E505",
            "the repository has no such revision",
            "set checkpoint.revision to a commit, branch or tag that the repository has",
        )
    if isinstance(failure, GatedRepoError) or status == 403:
        return (
            "E504",
            "access to the repository was refused",
            "accept its terms on the hub with the account of your token, then set HF_TOKEN",
        )
    if isinstance(failure, RepositoryNotFoundError) or status in (401, 404):
        return (
            "E504" if status == 401 else "E505",
            "the repository does not exist, or is private and you are not signed in",
            "check checkpoint.repo; for a private one set HF_TOKEN or run `hf auth login`",
        )
    if isinstance(failure, LocalEntryNotFoundError | OfflineModeIsEnabled):
        return (
            "E506",
            "the hub cannot be reached and the cache does not hold the whole checkpoint",
            "connect, unset HF_HUB_OFFLINE, or pass a folder with --checkpoint",
        )
    if isinstance(failure, OSError) and failure.errno in (errno.ENOSPC, errno.EDQUOT):
        return "E501", "the disk ran full", "free some space, or set HF_HOME to another disk"
    if isinstance(failure, HTTPError) or status:
        return (
            "E507",
            "the download failed",
            "run the command again: files that arrived are kept",
        )
    return (
        "E507",
        "the download failed",
        "check that the cache can be written (HF_HOME moves it), then run the command again",
    )


def _place(repo: str, revision: str | None) -> str:
    return f"{repo}@{revision}" if revision else repo
