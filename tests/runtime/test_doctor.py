"""`deepinfer-engine doctor`: found and needed, and the exit status that fits."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from deepinfer_compile.format import jsons
from deepinfer_compile.format.manifest import PACKED_WEIGHTS, Library, Manifest
from deepinfer_compile.package.single_file import write_single_file
from deepinfer_compile.runtime import cli, settings
from deepinfer_compile.runtime.settings import VARIABLES
from deepinfer_compile.spec.settings import _VARIABLES
from tests.runtime.pretend import pretend_engine


def doctor(capsys, *arguments):
    status = cli.main(["doctor", *map(str, arguments), "--json"])
    answer = json.loads(capsys.readouterr().out)
    assert answer["schema"] == 1
    return status, answer["ok"], {check["name"]: check for check in answer["checks"]}


def with_libraries(engine, *libraries):
    file = engine / "manifest.json"
    facts = json.loads(file.read_text())
    facts["libraries"] = [json.loads(jsons.dump(library)) for library in libraries]
    jsons.load(Manifest, json.dumps(facts))
    file.write_text(json.dumps(facts))
    return engine


def test_this_machine_can_run_engines(capsys):
    status, ok, checks = doctor(capsys)
    assert (status, ok) == (0, True)
    assert checks["Python"]["needed"] == "<3.14,>=3.11"
    assert checks["torch"]["found"].startswith("2.")
    assert checks["machine"]["found"].startswith("x86_64 Linux")
    assert checks["g++"]["found"] == shutil.which("g++")


def test_the_table_says_what_json_says(capsys):
    assert cli.main(["doctor"]) == 0
    table, _, environment = capsys.readouterr().out.partition("\n\nenvironment\n")
    lines = table.splitlines()
    assert lines[0].split() == ["found", "needed"]
    _, _, checks = doctor(capsys)
    assert [line.split()[1] for line in lines[1:]] == list(checks)
    assert all(line.startswith("  ok  ") for line in lines[1:])
    names = [line.split()[0] for line in environment.splitlines()[1:]]
    assert names == [variable.name for variable in VARIABLES]


class Recording(dict):
    """An environment that notes what is asked of it."""

    def __init__(self):
        super().__init__()
        self.asked = set()

    def get(self, name, default=None):
        self.asked.add(name)
        return default


def test_all_that_is_read_of_the_environment_is_listed():
    """`test_layering.py` keeps reads in settings.py: each name spelled there is listed and read."""
    empty = Recording()
    settings.read_settings(empty)
    listed = {variable.name for variable in VARIABLES}
    assert empty.asked == listed
    source = Path(settings.__file__).read_text(encoding="utf-8")
    spelled = set(re.findall(r'"([A-Z]{2}[A-Z0-9_]*[A-Z0-9])"', source))
    assert spelled == listed | set(settings.COMPILE_TIME)
    assert all(variable.kind and variable.default and variable.help for variable in VARIABLES)
    compilers = {variable.name for variable in _VARIABLES}
    assert set(settings.COMPILE_TIME) == compilers - listed


def test_a_variable_is_shown_with_its_value_and_source(capsys, monkeypatch):
    monkeypatch.setenv("DEEPINFER_LOGGING_INTERVAL_STEP", "7")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert cli.main(["doctor", "--json"]) == 0
    shown = {one["name"]: one for one in json.loads(capsys.readouterr().out)["environment"]}
    assert shown["DEEPINFER_LOGGING_INTERVAL_STEP"] == {
        "name": "DEEPINFER_LOGGING_INTERVAL_STEP",
        "kind": "steps",
        "default": "100",
        "help": "between lines of statistics; 0: none",
        "value": "7",
        "source": "environment",
    }
    assert (shown["NO_COLOR"]["value"], shown["NO_COLOR"]["source"]) == ("none", "default")


def test_a_variable_that_nothing_reads_is_warned_about(capsys, monkeypatch):
    monkeypatch.setenv("DEEPINFER_LOGING_INTERVAL", "7")
    monkeypatch.setenv("DEEPINFER_USE_NEXTN_DECODE", "0")  # the compiler's
    assert cli.main(["doctor"]) == 0
    assert capsys.readouterr().err == (
        "warning: nothing reads `DEEPINFER_LOGING_INTERVAL`; "
        "did you mean `DEEPINFER_LOGGING_INTERVAL_STEP`?\n"
    )
    assert cli.main(["doctor", "--json", "-q"]) == 0
    out, err = capsys.readouterr()
    (unknown,) = json.loads(out)["unknown_environment"]
    assert (unknown["name"], err) == ("DEEPINFER_LOGING_INTERVAL", "")


def test_all_values_that_do_not_read_are_2(capsys, monkeypatch):
    monkeypatch.setenv("DEEPINFER_LOGGING_INTERVAL_STEP", "often")
    monkeypatch.setenv("OMP_NUM_THREADS", "0")
    status, ok, checks = doctor(capsys)
    assert (status, ok) == (2, False)
    assert checks["environment"]["found"] == (
        "`OMP_NUM_THREADS` must be a count of threads, found `0`; "
        "`DEEPINFER_LOGGING_INTERVAL_STEP` must be a whole number, found `often`"
    )


@pytest.mark.parametrize("form", ["folder", "file"])
def test_an_engine_that_runs_here(capsys, tmp_path, form):
    engine = pretend_engine(tmp_path / "e")
    if form == "file":
        write_single_file(engine, tmp_path / "one.engine")
        engine = tmp_path / "one.engine"
    status, ok, checks = doctor(capsys, engine)
    assert (status, ok) == (0, True)
    assert checks["code"]["found"] == "any runs here"
    assert checks["weights"]["found"] == "packed in the engine"


def test_packed_weights_that_are_gone_are_4(capsys, tmp_path):
    engine = pretend_engine(tmp_path / "e")
    (engine / PACKED_WEIGHTS).unlink()
    status, _, checks = doctor(capsys, engine)
    assert status == 4
    assert checks["weights"]["found"].endswith("weights/model.safetensors is not there")


def test_another_cpu_is_3_and_named(capsys, tmp_path):
    library = Library("kernels/engine.so", "z15", ("avx2", "vxe2"))
    status, ok, checks = doctor(capsys, with_libraries(pretend_engine(tmp_path / "e"), library))
    assert (status, ok) == (3, False)
    assert checks["code"]["found"] == "z15 needs: avx2, vxe2; this CPU lacks: vxe2"
    assert not checks["code"]["ok"]


def test_too_little_memory_is_3(capsys, tmp_path, monkeypatch):
    info = tmp_path / "meminfo"
    info.write_text("MemTotal: 9 kB\nMemAvailable: 0 kB\n")
    monkeypatch.setattr("deepinfer_compile.runtime.machine._MEMORY", info)
    status, _, checks = doctor(capsys, pretend_engine(tmp_path / "e"))
    assert status == 3
    assert [name for name, check in checks.items() if not check["ok"]] == ["engine memory"]
    assert checks["engine memory"]["found"] == "0 B available"


def test_a_containers_limit_counts(capsys, tmp_path, monkeypatch):
    limit = (tmp_path / "max", tmp_path / "current")
    for file, text in zip(limit, ("5000\n", "4000\n"), strict=True):
        file.write_text(text)
    monkeypatch.setattr("deepinfer_compile.runtime.machine._MEMORY_LIMIT", limit)
    assert doctor(capsys)[2]["memory"]["found"] == "1,000 B available"


def test_missing_weights_are_4(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    engine = pretend_engine(tmp_path / "e")
    file = engine / "manifest.json"
    facts = json.loads(file.read_text())
    facts["checkpoint"]["packed"] = False
    file.write_text(json.dumps(facts))
    status, _, checks = doctor(capsys, engine)
    assert status == 4
    assert checks["weights"]["found"] == "no weights found"


@pytest.mark.parametrize("damage", ["kernels/engine.so", "plan.json"])
def test_a_damaged_engine_is_refused(capsys, tmp_path, damage):
    engine = pretend_engine(tmp_path / "e")
    (engine / damage).write_bytes(b"x")
    assert cli.main(["doctor", str(engine)]) == 4
    out, err = capsys.readouterr()
    assert out == ""
    assert f"{damage}: sha256 differs" in err
