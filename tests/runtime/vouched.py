"""Copies of an engine with one thing changed, and manifests that vouch for the change."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any


def copied(engine: Path, place: Path) -> Path:
    """Without its weights: what only reads an engine needs none."""
    return Path(shutil.copytree(engine, place, ignore=shutil.ignore_patterns("model.safetensors")))


def rewrite(engine: Path, name: str, change: Callable[[Any], object]) -> None:
    """`change` gets the parsed JSON of the engine's file `name` and edits it in place."""
    facts = json.loads((engine / name).read_text(encoding="utf-8"))
    change(facts)
    (engine / name).write_text(json.dumps(facts), encoding="utf-8")
    if name != "manifest.json":
        vouch(engine, name)


def vouch(engine: Path, name: str) -> None:
    """The manifest's hash of `name` becomes that of the file as it is."""
    digest = hashlib.sha256((engine / name).read_bytes()).hexdigest()
    rewrite(engine, "manifest.json", lambda manifest: manifest["files"].update({name: digest}))
