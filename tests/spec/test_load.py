"""YAML, environment and --set become one spec, and every value knows where it came from."""

from __future__ import annotations

import ast
import copy
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer_compile.diagnostics import CompileError, Diagnostic, Span
from deepinfer_compile.spec.load import assemble, default_target, host_compiler, load_spec
from deepinfer_compile.spec.schema import Placement
from deepinfer_compile.spec.tree import Tree, Value, parse_tree, parse_value
from deepinfer_compile.spec.validate import schema_paths, section_at
from tests.spec.error_cases import ROOT, changed

NANO = ROOT / "examples" / "v41_nano.yaml"
FLASH = ROOT / "examples" / "v41_flash.yaml"


def test_spans_point_at_the_text_of_each_key() -> None:
    spec = load_spec(NANO, environment={})
    lines = NANO.read_text().splitlines()
    for key, span in spec.spans.items():
        if not key:
            continue
        text = lines[span.line - 1][span.col - 1 :][: span.width]
        leaf = key.rpartition(".")[2]
        assert span.key == key
        assert text.startswith(leaf) if not leaf.endswith("]") else not text.startswith("[")
    assert {key for key in schema_paths() if key in spec.spans} >= {"model", "engine.max_rows"}
    ratio = spec.span("model.compression.ratios[3]")
    assert ratio.source[ratio.col - 1 :][: ratio.width] == "2"


def test_span_of_an_unwritten_key_is_the_nearest_enclosing_one() -> None:
    spec = load_spec(NANO, environment={})
    assert spec.span("engine.parallel.dp") == spec.spans["engine"]
    assert spec.span("model.compression.ratios[99]") == spec.spans["model.compression.ratios"]
    assert spec.span("nothing").line == 1


def test_file_is_named_as_written_and_never_absolute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    assert load_spec("examples/v41_nano.yaml", environment={}).file == "examples/v41_nano.yaml"
    assert load_spec(NANO, environment={}).file == "v41_nano.yaml"
    assert load_spec(NANO, environment={}).span("engine").file == "v41_nano.yaml"


@pytest.mark.parametrize(
    ("name", "shown"),
    [("a\nb.yaml", r"a\nb.yaml"), ("\udcff.yaml", r"\udcff.yaml"), ("é 新.yaml", "é 新.yaml")],
)
def test_a_name_is_one_line_of_text(tmp_path: Path, name: str, shown: str) -> None:
    """It goes into comments of generated code."""
    shutil.copyfile(NANO, tmp_path / name)
    assert load_spec(tmp_path / name, environment={}).file == shown


def test_environment_beats_the_file_and_set_beats_both(tmp_path: Path) -> None:
    path = tmp_path / "spec.yaml"
    path.write_text(changed(NANO.read_text(), [("[edit]", "engine.engram = host")]))
    environment = {"DEEPINFER_ENGRAM_FORCE_GPU_STORAGE": "1", "DEEPINFER_USE_NEXTN_DECODE": "5"}
    spec = load_spec(path, environment=environment, overrides=["engine.draft_len=0"])
    assert spec.engine.engram is Placement.DEVICE
    assert spec.engine.draft_len == 0
    assert spec.sources == {
        "engine.engram": "environment DEEPINFER_ENGRAM_FORCE_GPU_STORAGE",
        "engine.draft_len": "--set engine.draft_len=0",
    }


def test_variables_that_are_unset_empty_or_off_change_nothing() -> None:
    plain = load_spec(NANO, environment={})
    environment = {"DEEPINFER_ENGRAM_FORCE_GPU_STORAGE": "0", "DEEPINFER_BATCH_INVARIANT": " "}
    spec = load_spec(NANO, environment=environment)
    assert spec == plain
    assert spec.sources == {}


def test_the_process_environment_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEEPINFER_USE_NEXTN_DECODE", "5")
    with pytest.raises(CompileError) as caught:
        load_spec(NANO)
    assert [d.where for d in caught.value.diagnostics] == ["environment DEEPINFER_USE_NEXTN_DECODE"]
    assert caught.value.exit_code == 2


def test_model_folder_replaces_a_repository_but_not_a_seed() -> None:
    environment = {"DEEPINFER_HF_MODEL_DIR": "weights"}
    flash = load_spec(FLASH, environment=environment)
    assert flash.checkpoint.path == "weights"
    assert flash.checkpoint.repo is flash.checkpoint.revision is None
    assert flash.sources == {"checkpoint.path": "environment DEEPINFER_HF_MODEL_DIR"}
    assert load_spec(NANO, environment=environment).checkpoint.synthetic == 0


def test_set_of_one_checkpoint_kind_drops_the_others() -> None:
    spec = load_spec(FLASH, environment={}, overrides=["checkpoint.synthetic=7"])
    assert spec.checkpoint.model_dump(exclude_none=True) == {"synthetic": 7}


def test_set_takes_lists_and_mappings_and_the_last_wins() -> None:
    overrides = [
        "engine.max_rows=16",
        "engine.max_rows=32",
        "engine.parallel={dp: 1, ep: 1}",
        "model.dspark.dspark_target_layer_ids=[6, 7]",
    ]
    spec = load_spec(NANO, environment={}, overrides=overrides)
    assert spec.engine.max_rows == 32
    assert spec.model.dspark.dspark_target_layer_ids == (6, 7)
    assert spec.sources["engine.max_rows"] == "--set engine.max_rows=32"


@pytest.mark.parametrize(
    ("text", "value"),
    [("1e-20", 1e-20), ("0x10", 16), ("1_000", 1000), ("yes", "yes"), ("2026-01-02", "2026-01-02")],
)
def test_values_read_as_yaml_1_2(text: str, value: object) -> None:
    assert parse_value(text) == value


def test_json_with_tabs_reads_and_keeps_its_columns() -> None:
    tree = parse_tree('{\n\t"a": {\n\t\t"b": [1, 2e-3]}\n}\n', "config.json")
    assert tree.values == {"a": {"b": [1, 0.002]}}
    assert (tree.places.span("a.b[1]").line, tree.places.span("a.b[1]").col) == (3, 12)


@pytest.mark.parametrize("text", ["a: &x [*x]", "a: " + "[" * 400, "a: \0", "a: 1" + "0" * 5000])
def test_hostile_text_is_refused(text: str) -> None:
    with pytest.raises(CompileError) as caught:
        parse_tree(text, "spec.yaml")
    assert {d.code for d in caught.value.diagnostics} == {"E102"}


def test_latin_1_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "spec.yaml").write_bytes(b"model: caf\xe9")
    with pytest.raises(CompileError, match=r"error\[E101\].*not UTF-8 text: byte 10"):
        load_spec(tmp_path / "spec.yaml", environment={})
    with pytest.raises(CompileError, match=r"error\[E101\].*is a directory"):
        load_spec(tmp_path, environment={})


def test_default_target_is_passed_through() -> None:
    assert default_target({"DEEPINFER_ACCELERATOR": " NVIDIA "}) == "nvidia"
    assert default_target({"DEEPINFER_ACCELERATOR": ""}) is None
    assert default_target({}) is None


def test_the_environment_is_read_in_load_only() -> None:
    readers = []
    for path in (ROOT / "deepinfer_compile" / "spec").glob("*.py"):
        for function in ast.walk(ast.parse(path.read_text())):
            if isinstance(function, ast.Module | ast.FunctionDef) and _reads(function):
                readers.append((path.name, getattr(function, "name", "import")))
    assert readers == [
        ("load.py", "assemble"),
        ("load.py", "default_target"),
        ("load.py", "host_compiler"),
    ]


def test_the_compiler_is_what_cxx_says() -> None:
    assert host_compiler({"CXX": " ccache g++-13 "}) == "ccache g++-13"
    assert host_compiler({"CXX": ""}) == host_compiler({}) == "g++"


def _reads(block: ast.Module | ast.FunctionDef) -> bool:
    """Names os.environ or os.getenv, outside of functions of its own."""
    inner = [s for s in block.body if not isinstance(s, ast.FunctionDef | ast.ClassDef)]
    found = {ast.unparse(node) for one in inner for node in ast.walk(one)}
    return bool(found & {"os.environ", "os.getenv"})


NANO_TREE = parse_tree(NANO.read_text(), "nano.yaml")
LEAVES = sorted(key for key in NANO_TREE.places.spans if key and section_at(key) is None)
WILD = st.one_of(
    st.integers(-3, 600),
    st.sampled_from([10**20, -1.5, 1e308, True, None, [], {}, "text", {"deep": [1]}]),
    st.lists(st.integers(-1, 12), max_size=12),
)


@settings(max_examples=200, deadline=None)
@given(st.dictionaries(st.sampled_from(LEAVES), WILD, min_size=1, max_size=4))
def test_any_edit_is_accepted_or_refused_with_a_place(edits: dict[str, Value]) -> None:
    values = copy.deepcopy(NANO_TREE.values)
    for key, value in edits.items():
        _put(values, re.findall(r"\w+", key), copy.deepcopy(value))
    lines = NANO.read_text().splitlines()
    for diagnostic in _problems(replace(NANO_TREE, values=values)):
        assert diagnostic.code.startswith("E1")
        assert isinstance(diagnostic.span, Span)
        assert diagnostic.span.source == lines[diagnostic.span.line - 1]
        assert "something else" not in diagnostic.message, "a pydantic error without our words"


def _put(values: Value, parts: list[str], value: Value) -> None:
    """Set a leaf, unless an earlier edit took away what held it."""
    for part in parts[:-1]:
        values = values.get(part) if isinstance(values, dict) else None
    if isinstance(values, dict):
        values[parts[-1]] = value
    elif isinstance(values, list) and int(parts[-1]) < len(values):
        values[int(parts[-1])] = value


def _problems(tree: Tree) -> tuple[Diagnostic, ...]:
    try:
        assemble(tree, environment={})
    except CompileError as problem:
        return problem.diagnostics
    return ()
