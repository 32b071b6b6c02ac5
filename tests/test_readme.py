"""The README and the migration page show what is there: header, commands, links, settings."""

from __future__ import annotations

import inspect
import re
import shlex
from pathlib import Path

from deepinfer_compile.cli import parser as compiler_parser
from deepinfer_compile.runtime import LLM, SamplingParams
from deepinfer_compile.runtime.cli import parser as engine_parser
from deepinfer_compile.runtime.compatibility import _fixed
from deepinfer_compile.spec.settings import _VARIABLES
from deepinfer_compile.spec.validate import schema_paths
from tests.runtime.made import MANIFEST, PLAN

REPO = Path(__file__).parents[1]
README = (REPO / "README.md").read_text(encoding="utf-8")
SHOWN = REPO / "generated/v41_nano/cpu/kernels/rmsnorm_quantize__bf16_mxfp8__n64_e1em20__cpu.cpp"


def test_the_header_shown_is_the_generated_one():
    lines = SHOWN.read_text(encoding="utf-8").splitlines()
    header = [line for line in lines if line.startswith("//")][
        : lines.index('#include "numerics.h"')
    ]
    assert "\n".join(f"    {line}" for line in header) in README


def test_the_commands_parse():
    found = {"deepinfer-compile": 0, "deepinfer-engine": 0}
    for line in re.findall(r"^    (deepinfer-\w+ .*)$", README, re.MULTILINE):
        program, *argv = shlex.split(line, comments=True)
        parser = compiler_parser() if program == "deepinfer-compile" else engine_parser()
        parser.parse_args(argv)
        found[program] += 1
    assert min(found.values()) >= 3


def test_the_links_lead_somewhere():
    for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", README):
        assert (REPO / target).exists(), target


def rows_of(title):
    """Cells of the table under a heading of the migration page, without marks."""
    page = (REPO / "docs/migration.md").read_text(encoding="utf-8")
    lines = page.partition(f"## {title}")[2].partition("## ")[0].splitlines()
    table = [line for line in lines if line.startswith("|")][2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table]


def test_the_migration_page_names_settings_that_exist():
    """Spec keys are the schema's, DeepInfer's variables and arguments those that we read."""
    variables = {variable.key: variable.name for variable in _VARIABLES}
    fixed = {key: name for name, (_, key) in _fixed(MANIFEST, PLAN).items()}
    rows = {row[0].strip("`"): row[1] for row in rows_of("What the engine holds")}
    assert rows.keys() <= {*schema_paths()}
    for key, name in variables.items():
        assert name in rows.get(key, name), key
    for key in rows.keys() & fixed.keys() - {"checkpoint.revision"}:
        assert fixed[key] in rows[key] or variables.get(key, "?") in rows[key], key


def test_the_migration_page_names_parameters_that_exist():
    for row in rows_of("What a request wants"):
        for name in re.findall(r"`(\w+)`", row[0].partition(" of ")[0]):
            places = (SamplingParams, LLM.generate, LLM.__init__)
            assert any(name in inspect.signature(place).parameters for place in places), name
