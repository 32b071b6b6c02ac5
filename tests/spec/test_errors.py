"""Every mistake a spec can hold reads exactly as tests/errors/spec_*.test says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.spec.error_cases import FOLDER, ROOT, Case, parse_cases

CASES = [
    case for path in sorted(FOLDER.glob("spec_*.test")) for case in parse_cases(path.read_text())
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_error_reads_as_recorded(case: Case, tmp_path: Path) -> None:
    assert case.expected, "a case without a mistake proves nothing"
    assert case.run(tmp_path) == case.expected


def test_every_code_of_the_source_has_a_case() -> None:
    sources = (ROOT / "deepinfer_compile" / "spec").glob("*.py")
    codes = {code for path in sources for code in re.findall(r'"(E\d{3})"', path.read_text())}
    shown = {code for case in CASES for code in re.findall(r"error\[(E\d{3})\]", case.expected)}
    assert codes == shown
    assert len(codes) > 40


def test_the_table_of_rules_lists_every_rule() -> None:
    folder = ROOT / "deepinfer_compile" / "spec"
    table = set(re.findall(r"E1[2-6]\d", (folder / "rules.py").read_text().split('"""')[1]))
    code = {
        c for path in folder.glob("rules*.py") for c in re.findall(r'"(E\d{3})"', path.read_text())
    }
    assert table == code
