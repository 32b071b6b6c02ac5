"""`deepinfer-engine bench`: structure, sums, refusals, forms. A duration is never asserted."""

from __future__ import annotations

import csv
import json
from collections import Counter
from contextlib import closing
from dataclasses import replace

import pytest

from deepinfer_compile.format import jsons
from deepinfer_compile.format.manifest import Manifest
from deepinfer_compile.format.plan import EnginePlan
from deepinfer_compile.runtime import cli
from deepinfer_compile.runtime.bench.ask import Ask, settle
from deepinfer_compile.runtime.bench.measure import measure, repetitions
from deepinfer_compile.runtime.bench.work import make_requests
from deepinfer_compile.runtime.errors import RequestError
from deepinfer_compile.runtime.loader import load_engine
from deepinfer_compile.runtime.progress import Meter
from tests.runtime.drive import Solo
from tests.runtime.made import edit_manifest
from tests.runtime.pretend import PLAN, pretend_engine


def run(capsys, *arguments):
    status = cli.main(["bench", *map(str, arguments)])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


@pytest.fixture(scope="module")
def nano(nano_engine, tmp_path_factory):
    """One bench of nano: JSON facts and the CSV's rows."""
    file = tmp_path_factory.mktemp("bench") / "nano.csv"
    asked = ["--rows", "2,8,2", "--prompt", "300", "--context", "20", "--tokens", "3"]
    asked += ["--runs", "2", "--json", "--csv"]
    with pytest.MonkeyPatch.context() as patch:
        out = []
        patch.setattr("builtins.print", lambda text, **_: out.append(text))
        assert cli.main(["bench", str(nano_engine), *asked, str(file)]) == 0
    assert [path.name for path in file.parent.iterdir()] == ["nano.csv"]
    with file.open(newline="") as stream:
        return json.loads("".join(out)), list(csv.DictReader(stream))


def test_whole_steps_have_three_times_and_a_rate(nano):
    facts, _ = nano
    assert [(s["step"], s["rows"], s["context"]) for s in facts["steps"]] == [
        ("prefill", 300, 0),
        ("decode", 2, 20),
        ("decode", 8, 20),
    ]
    for step in facts["steps"]:
        assert 0 < step["min_ms"] <= step["median_ms"] <= step["max_ms"]
        assert step["tokens_per_s"] == pytest.approx(step["rows"] / step["median_ms"] * 1e3)
    assert facts["asked"] == {"rows": [2, 8], "prompt": 300, "context": 20, "tokens": 3, "runs": 2}
    assert min(facts["ceilings"].values()) > 0
    for fact in ("engine", "target", "isa", "machine", "threads", "versions", "seed"):
        assert fact in facts["bench"]


def test_the_parts_add_up_to_the_plan(nano, nano_engine):
    """Calls, bytes and operations of every kernel, counted again from the engine's own files."""
    facts, _ = nano
    plan = jsons.load(EnginePlan, (nano_engine / "plan.json").read_text())
    manifest = jsons.load(Manifest, (nano_engine / "manifest.json").read_text())
    phases = {phase.name: phase for phase in plan.phases}
    records = {kernel.name: kernel for kernel in manifest.kernels}
    runs = {
        ("prefill", 300): [("prefill", 256), ("prefill", 44), ("sample", 1)],
        ("decode", 2): [("decode", 2), ("sample", 2)],
        ("decode", 8): [("decode", 8), ("sample", 8)],
    }
    for (step, rows), launches in runs.items():
        found = [k for k in facts["kernels"] if (k["step"], k["rows"]) == (step, rows)]
        wanted = {}
        for phase, count in launches:
            fitting = [  # the first variant of each step that is for so many rows
                next(v.kernel for v in step.variants if v.most_rows >= count)
                for step in phases[phase].steps
            ]
            for kernel, calls in Counter(fitting).items():
                r = records[kernel]
                moved = r.bytes_fixed + count * r.bytes_per_row
                moved += min(count * r.picked_per_row, r.pool_bytes)
                one = (1, moved, count * r.flops_per_row)
                before = wanted.get((phase, kernel), (0, 0, 0))
                wanted[phase, kernel] = tuple(
                    b + calls * n for b, n in zip(before, one, strict=True)
                )
        got = {(k["phase"], k["kernel"]): (k["calls"], k["bytes"], k["flops"]) for k in found}
        assert got == wanted
        assert sum(k["share"] for k in found) == pytest.approx(1)
        medians = [k["median_ms"] for k in found]
        assert medians == sorted(medians, reverse=True)


def test_rates_and_bounds_follow_from_the_ceilings(nano):
    facts, _ = nano
    ceilings = facts["ceilings"]
    assert any(k["over"] for k in facts["kernels"])
    for k in facts["kernels"]:
        seconds = k["median_ms"] / 1e3
        bound = max(k["bytes"] / ceilings["bytes_per_s"], k["flops"] / ceilings["flops_per_s"])
        assert k["gb_per_s"] == pytest.approx(k["bytes"] / seconds / 1e9)
        assert k["gflop_per_s"] == pytest.approx(k["flops"] / seconds / 1e9)
        assert k["bound_ms"] == pytest.approx(bound * 1e3)
        told = bound > 0 and seconds >= 2 * k["calls"] * ceilings["call_s"]
        assert k["over"] == (pytest.approx(seconds / bound) if told else None)


def test_the_csv_says_what_json_says(nano):
    facts, rows = nano
    keys = list(facts["steps"][0])
    by_step = {(row["step"], row["rows"], row["kernel"], row["phase"]): row for row in rows}
    assert len(rows) == len(by_step) == len(facts["steps"]) + len(facts["kernels"])
    for fact in [*facts["steps"], *facts["kernels"]]:
        texts = {key: "" if fact[key] is None else str(fact[key]) for key in keys}
        assert by_step[texts["step"], texts["rows"], texts["kernel"], texts["phase"]] == texts


def test_decode_steps_are_real_and_repeat(nano_engine):
    """Every repetition decodes what the requests alone decode, after contexts that were read."""
    ask = Ask(rows=(1, 3), prompt=5, context=20, tokens=4, runs=2)
    with closing(load_engine(nano_engine, threads=1)) as engine:
        executor, records = engine.executor, {k.name: k for k in engine.manifest.kernels}
        alone = []
        for request in make_requests(engine.plan, 3, 24):
            solo = Solo(executor, list(request.tokens)).feed([20])
            picked = []
            for _ in range(4):
                solo.feed([1], "decode")
                picked.append(solo.sample(0))
                solo.known.pop()
            alone.append(picked)

        seen, sample = [], executor.sample
        executor.sample = lambda rows: seen.append(sample(rows).token.tolist())
        meter = Meter(repetitions(ask), False)
        measure(executor, records, ask, meter)
        assert meter._done == repetitions(ask)
        fills = 1 + ask.runs + 3  # the prompt's runs, then a context each
        one, three = seen[fills : fills + 12], seen[fills + 12 :]
        assert one == [[token] for token in alone[0]] * 3
        assert three == [list(step) for step in zip(*alone, strict=True)] * 3


def test_an_engine_stays_usable(nano_engine):
    known = [(i * 37) % 250 + 2 for i in range(40)]
    with closing(load_engine(nano_engine, threads=2)) as engine:
        before = Solo(engine.executor, list(known)).feed([40]).generate(8, 40)
        records = {k.name: k for k in engine.manifest.kernels}
        measure(engine.executor, records, Ask((8,), 30, 30, 2, 1), Meter(1, False))
        assert Solo(engine.executor, list(known)).feed([40]).generate(8, 40) == before


def test_the_table_names_engine_machine_and_every_kernel(capsys, tmp_path):
    engine = pretend_engine(tmp_path / "e")
    status, out, err = run(capsys, engine, "--runs", 1, "--tokens", 2)
    assert (status, err) == (0, "")
    for text in ("made", "x86_64 Linux", "ceilings", "without a kernel", "prefill, 8 tokens"):
        assert text in out
    assert "decode, 1 row at" in out
    assert "decode, 2 rows at" in out
    for kernel in ("remember", "scale", "sample (sample)"):
        assert sum(line.endswith(f"  {kernel}") for line in out.splitlines()) == 3
    assert out.count("3 calls one at a time: ") == 3


def test_defaults_fit_the_engine():
    ask = settle(PLAN, None, None, None, 16, 5, None)
    assert ask == Ask(rows=(1, 2), prompt=8, context=48, tokens=16, runs=5)


def test_what_does_not_fit_is_refused_together_before_anything_runs(capsys, tmp_path, monkeypatch):
    engine = pretend_engine(tmp_path / "e")
    monkeypatch.setattr("deepinfer_compile.runtime.bench.start", pytest.fail)
    asked = ["--rows", "0,1,3", "--prompt", 64, "--context", 60, "--tokens", 5, "--runs", 0]
    file = tmp_path / "absent/x.csv"
    status, out, err = run(capsys, engine, *asked, "--csv", file)
    assert (status, out) == (2, "")
    for text in (
        "error[E022]",
        "--rows 0: this engine decodes 1 to 2",
        "--rows 3: this engine decodes 1 to 2, each a request of its own (max_rows 4, max_requests",
        "--prompt 64: this engine takes 63 tokens",
        "--context 60 and --tokens 5 are 65 positions: this engine holds 64",
        "--runs 0: 1 or more",
        f"--csv {file}: its folder does not exist",
    ):
        assert text in err
    assert run(capsys, engine, "--rows", "1,x")[0] == 2


def test_more_pages_than_there_are_are_refused():
    few = replace(PLAN, limits=replace(PLAN.limits, pages=4))  # three to give, 16 tokens each
    with pytest.raises(RequestError, match="needs 4 pages, this engine has 3") as caught:
        settle(few, (1, 2), None, 20, 1, 1, None)
    assert len(caught.value.notes) == 1
    assert settle(few, (1, 2), None, None, 4, 1, None).context == 12
    assert settle(few, (1,), None, 20, 1, 1, None).rows == (1,)


def test_a_kernel_without_a_record_is_refused(capsys, tmp_path):
    engine = pretend_engine(tmp_path / "e")
    edit_manifest(engine, kernels=[])
    status, _, err = run(capsys, engine)
    assert status == 4
    assert "error[E455]: the manifest says nothing about kernels of the plan" in err
    assert "remember" in err


def test_a_csv_never_lands_in_an_engine(capsys, tmp_path):
    engine = pretend_engine(tmp_path / "e")
    status, out, err = run(capsys, engine, "--runs", 1, "--csv", engine / "x.csv")
    assert (status, out) == (2, "")
    assert err.startswith("error[E026]: the output would become part of the engine")
    assert not (engine / "x.csv").exists()


def test_a_csv_that_cannot_be_written_leaves_nothing(capsys, tmp_path):
    engine = pretend_engine(tmp_path / "e")
    (tmp_path / "taken.csv").mkdir()
    status, out, err = run(capsys, engine, "--runs", 1, "--csv", tmp_path / "taken.csv")
    assert (status, out) == (5, "")
    assert "error[E551]" in err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["e", "taken.csv"]
