"""`deepinfer-engine explain`: what it says of a kernel is what the compiler wrote into its source,
and the steps it names are those of engine.py."""

from __future__ import annotations

import json
import re

import pytest

from deepinfer_compile.package.single_file import write_single_file
from deepinfer_compile.runtime import cli, explanation
from deepinfer_compile.runtime.folder import open_folder
from tests.runtime.made import make_engine
from tests.runtime.program import buckets, launched
from tests.runtime.vouched import copied, rewrite


def explain(capsys, *arguments):
    status = cli.main(["explain", *map(str, arguments)])
    out, err = capsys.readouterr()
    return status, out, err


def facts(capsys, *arguments):
    status, out, err = explain(capsys, *arguments, "--json")
    assert (status, err) == (0, "")
    return json.loads(out)


@pytest.fixture(scope="module")
def told(nano_engine):
    """The explanation of every kernel by name, as --json prints it."""
    folder = open_folder(nano_engine, skip_weights=True)
    kernels = folder.manifest.kernels
    return {
        k.name: json.loads(json.dumps(explanation.explain(folder, k.name).facts)) for k in kernels
    }


def header(source):
    """The opening comment with its line breaks undone."""
    top = source.read_text().split("#include")[0].splitlines()
    return re.sub(r"\s+", " ", " ".join(line.removeprefix("//") for line in top))


def test_every_kernel_has_a_line_with_its_rule_and_spec_lines(capsys, nano_engine):
    status, out, err = explain(capsys, nano_engine)
    lines = {line.split()[1]: line for line in out.splitlines()[1:]}
    kernels = json.loads((nano_engine / "manifest.json").read_text())["kernels"]
    assert (status, err, set(lines)) == (0, "", {k["name"] for k in kernels})
    for kernel in kernels:
        assert kernel["rule"] in lines[kernel["name"]]
        assert ", ".join(kernel["spec"]) in lines[kernel["name"]]
    assert [k["name"] for k in facts(capsys, nano_engine)["kernels"]] == list(lines)


def test_a_kernel_is_explained_as_its_source_says(told, nano_engine):
    sources = sorted((nano_engine / "kernels").glob("*__cpu.cpp"))
    assert len(sources) > 50
    refused = 0
    for source in sources:
        text = header(source)
        kernel, one = told[source.stem]["kernel"], told[source.stem]["roofline"][0]
        assert nano_engine / kernel["source"] == source
        assert f"templates/{kernel['template']}." in text
        assert f"passes {' > '.join(kernel['passes'])} rule {kernel['rule']} " in text
        assert f"computes {kernel['computes']} from {', '.join(kernel['spec'])} " in text
        assert kernel["refusals"] == re.findall(r"refused: (.*?)(?= refused:| shapes )", text)
        time, bound = f"{one['seconds'] * 1e6:.3g}", one["bound"]
        assert (
            f"R={one['rows']}: {time} us, {bound} bound on {told[source.stem]['machine']['name']} "
            in text
        )
        refused += len(kernel["refusals"])
    assert refused > 5


def test_the_text_holds_what_json_holds(capsys, told, nano_engine):
    for name in ("linear__bf16__n32_k64__cpu", "sample__f32__v256_l256__cpu"):
        explained = facts(capsys, nano_engine, name)
        assert explained == {"schema": 1, **told[name]}
        status, out, _ = explain(capsys, nano_engine, name)
        assert status == 0
        words = " ".join(out.split())
        for value in (*explained["kernel"]["refusals"], *explained["kernel"]["shapes"]):
            assert value in words
        for roof in explained["roofline"]:
            assert f"{roof['rows']} {roof['bytes']:,} {roof['flops']:,} " in words
        for step in explained["steps"]:
            rows = f"{step['least_rows']}-{step['most_rows']}"
            assert f"{step['phase']} {step['step']} {rows} {', '.join(step['buffers'])}" in words


def test_rooflines_are_those_of_the_shortest_and_of_the_fullest_launch(told, nano_engine):
    """Of a product of bf16[R,64] and bf16[32,64], which has a kernel for few rows and another."""
    most = {phase: of[-1] for phase, of in buckets(nano_engine).items()}
    few, many = (told[name] for name in told if name.startswith("linear__bf16__n32_k64"))
    if few["roofline"][0]["rows"] > 1:
        few, many = many, few
    last = few["steps"][0]["most_rows"]
    assert [roof["rows"] for roof in few["roofline"]] == [1, last]
    assert [roof["rows"] for roof in many["roofline"]] == [
        last + 1,
        most["decode"],
        most["prefill"],
    ]
    assert many["kernel"]["rows"] == f"{last + 1} rows and more"
    weights, row, flops = 32 * 64 * 2, 64 * 2 + 32 * 2, 2 * 32 * 64
    machine = few["machine"]
    for roof in (*few["roofline"], *many["roofline"]):
        moved, operations = weights + roof["rows"] * row, roof["rows"] * flops
        assert (roof["bytes"], roof["flops"]) == (moved, operations)
        times = (moved / machine["bandwidth"], operations / machine["flops"])
        assert roof["seconds"] == max(times)
        assert roof["bound"] == ("memory" if times[0] >= times[1] else "compute")


def test_the_steps_are_those_of_the_program(told, nano_engine):
    """At every bucket of every phase, kernel by kernel."""
    for phase, of in buckets(nano_engine).items():
        for rows in of:
            found = {}
            for name, explained in told.items():
                for step in explained["steps"]:
                    here = step["phase"] == phase
                    if here and step["least_rows"] <= rows <= step["most_rows"]:
                        assert step["step"] not in found
                        found[step["step"]] = (name, step["buffers"])
            program = launched(nano_engine, phase, rows)
            assert [found[i] for i in range(len(found))] == program


def test_a_buffer_is_explained_by_the_steps_that_touch_it(capsys, nano_engine):
    told = facts(capsys, nano_engine, "layers.3.window")
    touching = [
        {"phase": phase, "step": i, "kernels": [kernel]}
        for phase in buckets(nano_engine)
        for i, (kernel, names) in enumerate(launched(nano_engine, phase, 1))
        if "layers.3.window" in names
    ]
    assert told["steps"] == touching
    assert len(touching) == 4
    status, out, _ = explain(capsys, nano_engine, "layers.3.window")
    words = " ".join(out.split())
    assert status == 0
    assert f"memory state offset {told['buffer']['offset']:,}" in words
    assert all(f"{s['phase']} {s['step']} {s['kernels'][0]}" in words for s in touching)


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("linear__bf16__n32_k65__cpu", "linear__bf16__n32_k64__cpu"),
        ("layers.3.windows", "layers.3.window"),
        ("ring_store", "ring_store__"),
    ],
)
def test_an_unknown_name_is_2_and_names_the_nearest(capsys, nano_engine, name, nearest):
    status, out, err = explain(capsys, nano_engine, name)
    assert (status, out) == (2, "")
    assert err.startswith(f"error[E025]: the engine has no kernel or buffer `{name}`\n")
    assert f"   = there is `{nearest}" in err


def test_nothing_but_the_description_is_needed(capsys, tmp_path, nano_engine):
    """A packed engine, and one for a target that this runtime cannot load, without weights."""
    name = "linear__bf16__n32_k64__cpu"
    expected = explain(capsys, nano_engine, name)
    write_single_file(nano_engine, tmp_path / "packed.engine")
    assert explain(capsys, tmp_path / "packed.engine", name) == expected
    other = copied(nano_engine, tmp_path / "other")
    rewrite(other, "manifest.json", lambda m: m.update(target="board", driver="cuda"))
    rewrite(other, "plan.json", lambda plan: plan.update(target="board"))
    assert explain(capsys, other, name) == expected


@pytest.mark.parametrize("verb", ["explain", "report", "finish", "diff"])
def test_a_damaged_engine_is_refused_as_inspect_refuses_it(capsys, tmp_path, verb):
    engine = make_engine(tmp_path / "e")
    more = [str(make_engine(tmp_path / "intact"))] if verb == "diff" else []
    (engine / "plan.json").write_text("{}")
    for options in ([], ["--json"]):
        refusals = []
        for arguments in (["inspect", str(engine)], [verb, str(engine), *more]):
            refusals.append((cli.main([*arguments, *options]), *capsys.readouterr()))
        assert refusals[0] == refusals[1]
        assert refusals[0][0] == 4


def _scores(manifest):
    """The kernel that scores the entries of candidate blocks."""
    return next(k for k in manifest["kernels"] if k["name"].startswith("candidate_scores"))


@pytest.mark.parametrize(
    ("name", "change", "note"),
    [
        ("manifest.json", lambda m: m["machine"].update(bandwidth=0.0), "machine.bandwidth: 0.0"),
        (
            "manifest.json",
            lambda m: m["kernels"][0].update(bytes_per_row=-1),
            "bytes_per_row -1",
        ),
        (
            "manifest.json",
            lambda m: _scores(m)["per_entry"][0].update(ratio=0),
            "entries in blocks of 8, 1 per 0 tokens",
        ),
        (
            "manifest.json",
            lambda m: _scores(m)["per_entry"][0].update(most=63),
            "on 63 entries in blocks of 8, 1 per 1 tokens",
        ),
        (
            "manifest.json",
            lambda m: _scores(m).update(flops_per_row=5),
            "flops_per_row 5, less than its entries' 16,384",
        ),
        (
            "plan.json",
            lambda p: p["phases"][1]["steps"][0]["buffers"].append(5000),
            "decode uses buffers that do not exist: [5000]",
        ),
        ("plan.json", lambda p: p["states"][0].update(length=0), "`history` has 0 entries"),
        (
            "plan.json",
            lambda p: p["phases"][2].update(buckets=[0, 4]),
            "sample: buckets of 0 to 4 rows",
        ),
    ],
)
def test_impossible_numbers_are_refused_by_whoever_reads_them(
    capsys, tmp_path, nano_engine, name, change, note
):
    engine = copied(nano_engine, tmp_path / "e")
    rewrite(engine, name, change)
    status, out, err = explain(capsys, engine)
    assert (status, out) == (4, "")
    assert err.startswith("error[E455]: ")
    assert note in err
