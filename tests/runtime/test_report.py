"""`deepinfer-engine report`: one file that needs nothing else and shows what the plan says."""

from __future__ import annotations

import itertools
import json
import re
from xml.etree import ElementTree

import pytest

from deepinfer_compile.package.single_file import write_single_file
from deepinfer_compile.runtime import cli
from tests.runtime.made import make_engine
from tests.runtime.program import buckets, launched
from tests.runtime.vouched import copied, rewrite


def report(capsys, *arguments):
    status = cli.main(["report", *map(str, arguments)])
    out, err = capsys.readouterr()
    return status, out, err


@pytest.fixture(scope="module")
def text(nano_engine, tmp_path_factory):
    out = tmp_path_factory.mktemp("page") / "nano.html"
    assert cli.main(["report", str(nano_engine), "-o", str(out)]) == 0
    return out.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def page(text):
    return ElementTree.fromstring(text)


def section(page, heading):
    """What lies between a heading and the next."""
    body = list(page.find("body"))
    start = next(i for i, part in enumerate(body) if part.tag == "h2" and part.text == heading)
    return list(itertools.takewhile(lambda part: part.tag != "h2", body[start + 1 :]))


def cells(part):
    return [["".join(cell.itertext()) for cell in row] for row in part.iter("tr")]


def rectangles(picture, kind):
    return [
        [float(shape.get(side)) for side in ("x", "y", "width", "height")]
        for shape in picture.iter("rect")
        if shape.get("class") == kind
    ]


def test_the_page_needs_nothing_else(text, page):
    assert not re.search(r"https?:|src=|href=|url\(|@import|<script|<link", text)
    assert {part.tag for part in page.iter()} >= {"svg", "table", "details", "style"}


def test_the_page_is_the_same_wherever_the_engine_lies(capsys, tmp_path, nano_engine, text):
    assert report(capsys, nano_engine) == (0, text, "")
    assert report(capsys, copied(nano_engine, tmp_path / "moved")) == (0, text, "")
    write_single_file(nano_engine, tmp_path / "packed")
    assert report(capsys, tmp_path / "packed") == (0, text, "")


def test_identity_and_limits_are_those_of_inspect(capsys, page, nano_engine):
    assert cli.main(["inspect", str(nano_engine)]) == 0
    inspected = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    for heading, used in (
        ("What it is", 2),
        ("Limits", 2),
        ("Memory", 2),
        ("State of a request", 7),
    ):
        rows = [row[:used] for part in section(page, heading) for row in cells(part)]
        assert len(rows) > 4
        for row in rows:
            assert " ".join(row) in inspected or row == ["class", "bytes"]


def test_memory_is_drawn_to_scale(page, nano_engine):
    memory = json.loads((nano_engine / "plan.json").read_text())["memory"]
    picture = section(page, "Memory")[0]
    start = 0.0
    for name, size in memory.items():
        ((x, _, width, _),) = rectangles(picture, name)
        assert x == pytest.approx(start, abs=0.01)
        assert width == pytest.approx(1000 * size / sum(memory.values()), abs=0.01)
        start += width
    rows = list(section(page, "Memory")[1].iter("tr"))[1:]
    for name, row in zip(memory, rows, strict=False):
        assert row[0].text == name
        share = rectangles(row, name)[0][2] / 160
        assert share == pytest.approx(memory[name] / sum(memory.values()), abs=0.001)


def test_bytes_of_a_request_are_those_of_the_contract(page, nano_engine):
    plan = json.loads((nano_engine / "plan.json").read_text())
    page_bytes = sum(s["bytes"] for s in plan["states"] if s["lifetime"] == "paged")
    once = sum(s["bytes"] for s in plan["states"] if s["lifetime"] == "slot")
    growth = page_bytes / plan["limits"]["page_size"]
    words = section(page, "State of a request")[0].text
    assert words == f"A request takes {once:,} bytes, and {growth:,.1f} for each token."
    assert once > 0
    assert growth > 0


def test_every_value_of_the_arena_is_drawn_and_none_overlaps(page, nano_engine):
    """In time and bytes: what the plan promises, read off the picture."""
    plan = json.loads((nano_engine / "plan.json").read_text())
    pictures = [part for part in section(page, "The arena") if part.tag == "svg"]
    drawn = [rectangles(picture, "arena") for picture in pictures]
    assert sum(map(len, drawn)) == sum(b["memory"] == "arena" for b in plan["buffers"]) > 500
    for shapes in drawn:
        for x, y, width, height in shapes:
            assert x >= 0
            assert y >= 0
            assert x + width <= 1000.02
            assert y + height <= 300.02
            assert min(width, height) >= 0
        for one, two in itertools.combinations(shapes, 2):
            apart = (
                one[i] + one[i + 2] <= two[i] + 0.02 or two[i] + two[i + 2] <= one[i] + 0.02
                for i in (0, 1)
            )
            assert any(apart), (one, two)


def test_kernels_come_by_time_with_bars_of_that_length(page, nano_engine):
    """The time of one row, or of the fewest rows that the program launches a kernel for."""
    manifest = json.loads((nano_engine / "manifest.json").read_text())
    machine = manifest["machine"]
    fewest = {}
    for phase, of in buckets(nano_engine).items():
        for rows in range(1, of[-1] + 1):
            for kernel, _ in launched(nano_engine, phase, rows):
                fewest[kernel] = min(rows, fewest.get(kernel, rows))
    times = {}
    for k in manifest["kernels"]:
        rows = fewest[k["name"]]
        picked = min(rows * k["picked_per_row"], k["pool_bytes"])
        moved = k["bytes_fixed"] + rows * k["bytes_per_row"] + picked
        operations = rows * k["flops_per_row"]
        times[k["name"]] = max(moved / machine["bandwidth"], operations / machine["flops"])
    _, table = section(page, "Kernels")
    rows = cells(table)[1:]
    names = [row[5] for row in rows]
    assert set(names) == set(times)
    assert [times[name] for name in names] == sorted(times.values(), reverse=True)
    widths = [rectangles(row, "weights")[0][2] for row in list(table.iter("tr"))[1:]]
    for name, width, row in zip(names, widths, rows, strict=True):
        assert width == pytest.approx(160 * times[name] / max(times.values()), abs=0.01)
        assert (row[0], row[3]) == (f"{times[name] * 1e6:.3g}", str(fewest[name]))


def test_every_refusal_and_every_step_is_there(page, nano_engine):
    manifest = json.loads((nano_engine / "manifest.json").read_text())
    plan = json.loads((nano_engine / "plan.json").read_text())
    refused = [[k["name"], k["rule"], why] for k in manifest["kernels"] for why in k["refusals"]]
    assert cells(section(page, "Refusals")[0])[1:] == refused
    phases = [part for part in section(page, "Program") if part.tag == "details"]
    for phase, part in zip(plan["phases"], phases, strict=True):
        shown = cells(part)[1:]
        for rows in phase["buckets"]:
            program = launched(nano_engine, phase["name"], rows)
            for i, (row, (kernel, names)) in enumerate(zip(shown, program, strict=True)):
                assert (row[0], row[2]) == (str(i), ", ".join(names))
                assert kernel_of(row[1], rows) == kernel


def kernel_of(cell, rows):
    """`few (1-4 rows) or many (5-64 rows)`: which it is for `rows`."""
    choices = re.findall(r"(\w+) \((\d+)-(\d+) rows\)", cell)
    fitting = [name for name, least, most in choices if int(least) <= rows <= int(most)]
    return fitting[0] if choices else cell


def test_names_are_text_whatever_they_hold(capsys, tmp_path):
    engine = make_engine(tmp_path / "e")
    rewrite(engine, "manifest.json", lambda m: m.update(name="<b>&\"'</b><script>"))
    status, out, _ = report(capsys, engine)
    assert status == 0
    assert ElementTree.fromstring(out).find("body/h1").text.startswith("<b>&\"'</b><script>,")
    assert "<script" not in out


def test_json_holds_what_the_page_draws(capsys, page, nano_engine, tmp_path):
    status, out, err = report(capsys, nano_engine, "--json", "-o", tmp_path / "x.html")
    facts = json.loads(out)
    assert (status, err, facts["schema"]) == (0, "", 1)
    assert (tmp_path / "x.html").exists()
    rows = cells(section(page, "Kernels")[1])[1:]
    assert [k["kernel"] for k in facts["roofline"]] == [row[5] for row in rows]
    drawn = [part for part in section(page, "The arena") if part.tag == "svg"]
    lives = [life for phase in facts["arena"].values() for life in phase]
    assert len(lives) == sum(len(rectangles(picture, "arena")) for picture in drawn)
    for phase, steps in facts["steps"].items():
        for life in facts["arena"][phase]:
            touching = [i for i, step in enumerate(steps) if life["name"] in step["buffers"]]
            assert (life["first"], life["last"]) == (touching[0], touching[-1])
    assert facts["limits"]["max_context"] == 1024


def test_a_page_is_replaced_whole_or_not_at_all(capsys, tmp_path, nano_engine, text):
    out = tmp_path / "x.html"
    out.write_text("older")
    assert report(capsys, nano_engine, "-o", out) == (0, "", "")
    assert out.read_text(encoding="utf-8") == text
    status, _, err = report(capsys, nano_engine, "-o", tmp_path / "absent" / "x.html")
    assert status == 5
    assert err.startswith("error[E551]: cannot write the file: No such file or directory\n")
    assert report(capsys, nano_engine, "-o", tmp_path)[0] == 5
    assert [path.name for path in tmp_path.iterdir()] == ["x.html"]


def test_a_page_never_lands_in_an_engine(capsys, tmp_path, nano_engine):
    engine = copied(nano_engine, tmp_path / "e")
    write_single_file(nano_engine, tmp_path / "packed")
    packed = (tmp_path / "packed").read_bytes()
    for where, out in ((engine, engine / "page.html"), (tmp_path / "packed", tmp_path / "packed")):
        status, _, err = report(capsys, where, "-o", out)
        assert status == 2
        assert err.startswith("error[E026]: the output would become part of the engine")
    assert not (engine / "page.html").exists()
    assert (tmp_path / "packed").read_bytes() == packed
