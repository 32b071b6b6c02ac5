"""`--update-golden`: rewrite the expected texts of tests/passes/*.test, then read the diff."""

from __future__ import annotations

import os

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="rewrite expected texts")


def pytest_configure(config: pytest.Config) -> None:
    if not config.getoption("--update-golden") or hasattr(config, "workerinput"):
        return
    if os.environ.get("CI"):
        raise pytest.UsageError("--update-golden: expected texts are not rewritten in CI")
    from tests.passes.pass_cases import FOLDER, rewrite  # here: runtime tests need no compiler

    for path in sorted(FOLDER.glob("*.test")):
        rewrite(path)
