"""`deepinfer-engine diff`: 0 for the same bytes, else 1 and every fact that differs."""

from __future__ import annotations

import json
import random

import pytest

from deepinfer_compile.package.single_file import write_single_file
from deepinfer_compile.runtime import cli
from tests.fuzz.mutations import mutate_json
from tests.runtime.test_fusions import without_fused_rules
from tests.runtime.vouched import copied, rewrite, vouch

LINEAR = "linear__bf16__n32_k64__cpu"


def diff(capsys, *arguments):
    status = cli.main(["diff", *map(str, arguments)])
    out, err = capsys.readouterr()
    assert err == ""
    return status, out


def changes(capsys, *engines):
    """{(section, name, fact): (before, after)} of engines that differ."""
    status, out = diff(capsys, *engines, "--json")
    answer = json.loads(out)
    assert (status, answer["schema"], answer["identical"]) == (1, 1, False)
    found = {
        (c["section"], c["name"], c["fact"]): (c["before"], c["after"]) for c in answer["changes"]
    }
    assert len(found) == len(answer["changes"])
    return found


def lines(capsys, *engines):
    """The words of every line but those that name the engines."""
    status, out = diff(capsys, *engines)
    assert status == 1
    assert out.splitlines()[:2] == [f"- {engines[0]}", f"+ {engines[1]}"]
    return [line.split() for line in out.splitlines()[3:]]


def test_the_same_bytes_are_identical_in_either_form(capsys, tmp_path, nano_engine):
    files = len(json.loads((nano_engine / "manifest.json").read_text())["files"])
    write_single_file(nano_engine, tmp_path / "packed")
    for other in (nano_engine, copied(nano_engine, tmp_path / "copy"), tmp_path / "packed"):
        assert diff(capsys, nano_engine, other) == (0, f"identical: {files + 1} files\n")
        status, out = diff(capsys, nano_engine, other, "--json")
        assert (status, json.loads(out)) == (0, {"schema": 1, "identical": True, "changes": []})


def test_limits_and_memory_are_told_apart(capsys, tmp_path, nano_engine):
    def larger(plan):
        plan["limits"]["max_context"] = 2048
        plan["memory"]["arena"] += 64

    other = copied(nano_engine, tmp_path / "other")
    arena = json.loads((nano_engine / "plan.json").read_text())["memory"]["arena"]
    rewrite(other, "plan.json", larger)
    found = changes(capsys, nano_engine, other)
    assert found[("limits", "", "max_context")] == (1024, 2048)
    assert found[("memory", "", "arena")] == (arena, arena + 64)
    files = {fact for section, _, fact in found if section == "files"}
    assert files == {"plan.json", "manifest.json"}
    assert len(found) == 4
    told = lines(capsys, nano_engine, other)
    assert told[:3] == [["limits"], ["-", "max_context", "1,024"], ["+", "max_context", "2,048"]]
    assert ["+", "arena", f"{arena + 64:,}"] in told


def test_a_kernel_that_changed_says_in_what(capsys, tmp_path, nano_engine):
    def older(manifest):
        kernel = next(k for k in manifest["kernels"] if k["name"] == LINEAR)
        kernel["passes"] = ["build", "fuse-nothing"]

    other = copied(nano_engine, tmp_path / "other")
    rewrite(other, "manifest.json", older)
    source = f"kernels/{LINEAR}.cpp"
    (other / source).write_text((other / source).read_text() + "\n")
    vouch(other, source)
    found = changes(capsys, nano_engine, other)
    kernels = {fact: both for (section, name, fact), both in found.items() if section == "kernels"}
    assert set(kernels) == {"passes", "source sha256"}
    assert kernels["passes"] == (["build"], ["build", "fuse-nothing"])
    told = lines(capsys, nano_engine, other)
    assert ["+", LINEAR, "passes", "build;", "fuse-nothing"] in told
    assert ["generated", "sources", "1", "changed"] in told


def test_what_only_one_engine_has_is_named_once(capsys, tmp_path, nano_engine):
    def fewer(manifest):
        manifest["kernels"] = [k for k in manifest["kernels"] if k["name"] != LINEAR]
        manifest["tools"]["g++"] = "99"
        manifest["tools"]["ld"] = "2"

    def stateless(plan):
        plan["states"] = plan["states"][1:]
        plan["weights"] = plan["weights"][:-1]

    other = copied(nano_engine, tmp_path / "other")
    first = json.loads((nano_engine / "plan.json").read_text())["states"][0]["name"]
    rewrite(other, "manifest.json", fewer)
    rewrite(other, "plan.json", stateless)
    told = lines(capsys, nano_engine, other)
    assert ["-", LINEAR] in told
    assert ["-", first] in told
    assert ["+", "tool", "g++", "99"] in told
    assert ["+", "tool", "ld", "2"] in told
    assert not [line for line in told if line[:2] == ["-", "tool"] and line[2] == "ld"]
    weights = told[told.index(["weights"]) + 1]
    assert weights[0] == "-"
    back = lines(capsys, other, nano_engine)
    assert ["+", LINEAR] in back


def test_engines_compiled_with_and_without_fusions(capsys, nano_engine):
    """Same limits, states and weights; other kernels, other steps, more arena."""
    from tests import engines

    parts = engines.nano_engine(without_fused_rules)
    found = changes(capsys, nano_engine, parts)
    assert {section for section, _, _ in found} == {"memory", "phases", "kernels", "files"}
    names = [
        {k["name"] for k in json.loads((e / "manifest.json").read_text())["kernels"]}
        for e in (nano_engine, parts)
    ]
    whole = {
        name: both
        for (section, name, fact), both in found.items()
        if section == "kernels" and not fact
    }
    assert {name for name, (_, after) in whole.items() if after is None} == names[0] - names[1]
    assert {name for name, (before, _) in whole.items() if before is None} == names[1] - names[0]
    programs = [json.loads((e / "plan.json").read_text())["phases"] for e in (nano_engine, parts)]
    for one, two in zip(*programs, strict=True):
        if ("phases", one["name"], "steps") in found:
            before, after = found[("phases", one["name"], "steps")]
            assert len(after) - len(before) == len(two["steps"]) - len(one["steps"]) > 0
    assert ("phases", "decode", "steps") in found
    reverse = changes(capsys, parts, nano_engine)
    assert {key: (b, a) for key, (a, b) in reverse.items() if key[2] != "steps"} == {
        key: both for key, both in found.items() if key[2] != "steps"
    }


@pytest.mark.parametrize("number", range(20))
def test_no_difference_goes_unnoticed(capsys, tmp_path, nano_engine, number):
    """A manifest with anything in it changed is another engine, as far as it can be read at all."""
    rng = random.Random(f"diff {number}")
    other = copied(nano_engine, tmp_path / "other")
    facts = json.loads((other / "manifest.json").read_text())
    changed = mutate_json(rng, facts)
    (other / "manifest.json").write_text(json.dumps(changed))
    assert cli.main(["diff", str(nano_engine), str(other), "--json"]) in (1, 4)
    answer = json.loads(capsys.readouterr().out)
    assert answer.get("changes") or answer["error"]["code"]
