"""The engine that tests of the whole runtime share: nano, compiled once per machine."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def nano_engine() -> Path:
    from tests import engines  # here: only these tests need the compiler

    return engines.nano_engine()
