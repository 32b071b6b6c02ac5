"""The README shows what is there: its kernel header, its commands, its links."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from deepinfer_compile.cli import parser as compiler_parser
from deepinfer_compile.runtime.cli import parser as engine_parser

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
