"""The reducer keeps the failure and nothing that the failure does not need."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from deepinfer_compile import reduce
from deepinfer_compile.diagnostics import CompileError
from deepinfer_compile.spec.load import load_spec
from deepinfer_compile.spec.tree import parse_tree

NANO = Path(__file__).parents[1] / "examples" / "v41_nano.yaml"


def nano() -> reduce.Tree:
    return parse_tree(NANO.read_text(), NANO.name).values


def loads(tree: reduce.Tree, folder: Path) -> bool:
    file = folder / "candidate.yaml"
    file.write_text(json.dumps(tree))
    try:
        load_spec(file, environment={})
    except CompileError:
        return False
    return True


def test_what_a_failure_needs_is_all_that_stays() -> None:
    def fails(tree: reduce.Tree) -> bool:
        model = tree.get("model")
        moe = model.get("moe") if isinstance(model, dict) else None
        return isinstance(moe, dict) and moe.get("num_experts_per_tok", 0) >= 2

    assert reduce.reduce(nano(), fails) == {"model": {"moe": {"num_experts_per_tok": 2}}}


def test_layers_go_as_long_as_the_spec_stays_one(tmp_path: Path) -> None:
    """A failure of every spec that loads: what is left loads, and no layer of it can go."""

    def fails(tree: reduce.Tree) -> bool:
        return loads(tree, tmp_path)

    small = reduce.shrunk(nano(), reduce.without_layer, fails)
    model = small["model"]
    assert isinstance(model, dict)
    assert model["num_hidden_layers"] == 1
    assert loads(small, tmp_path)


SMALL = """\
wrong: [1, 2]
section:
  head_dim: 65
  other: 3
"""
CHECK = """\
import sys
from pathlib import Path
_, found, text = Path(sys.argv[1]).read_text().partition("head_dim: ")
if found and int(text.split("}")[0].split(",")[0].split()[0]) % 32:
    print("error[E134]: `head_dim` must be a multiple of 32", file=sys.stderr)
    raise SystemExit(2)
raise KeyError("another failure")
"""


def test_the_command_line_writes_a_spec_that_fails_the_same_way(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec, check, out = tmp_path / "spec.yaml", tmp_path / "check.py", tmp_path / "small.yaml"
    spec.write_text(SMALL)
    check.write_text(CHECK)
    command = [sys.executable, str(check), "{}"]
    assert reduce.main([str(spec), "-o", str(out), "--", *command]) == 0
    assert out.read_text() == "section: {head_dim: 1}\n"
    printed = capsys.readouterr().out
    assert printed == f"wrote {out}: 1 of 3 values, fails with exit status 2, E134\n"


def test_a_command_that_succeeds_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "small.yaml"
    assert reduce.main([str(NANO), "-o", str(out), "--", sys.executable, "-c", "0", "{}"]) == 2
    assert "no failure to keep" in capsys.readouterr().err
    assert not out.exists()


@pytest.mark.parametrize("out", ["absent/small.yaml", "folder"])
def test_an_output_that_cannot_be_written_is_5(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], out: str
) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "spec.yaml").write_text("a: 1\n")
    command = [sys.executable, "-c", "raise SystemExit(2)", "{}"]
    assert (
        reduce.main([str(tmp_path / "spec.yaml"), "-o", str(tmp_path / out), "--", *command]) == 5
    )
    assert "error[E502]: " in capsys.readouterr().err
