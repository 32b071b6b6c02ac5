"""Where the golden vectors are: beside the repository, in `shared/golden`."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[1]


def golden_root() -> Path:
    """The folder of golden vectors. Without it a test is skipped; in CI that is a failure."""
    root = REPO.parent / "shared" / "golden"
    if not root.is_dir():
        if os.environ.get("CI"):
            raise FileNotFoundError(f"golden vectors are expected in {root}")
        pytest.skip("waits for the golden vectors in ../shared/golden")
    return root
