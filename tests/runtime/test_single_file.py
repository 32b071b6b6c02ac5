"""An engine in one file: read where it lies, and refused unless it is exactly what we write."""

from __future__ import annotations

import ctypes
import json
import random
import stat
import zipfile
from pathlib import Path

import pytest

from deepinfer_compile.package.single_file import write_single_file
from deepinfer_compile.runtime import cli
from deepinfer_compile.runtime.errors import EngineError
from deepinfer_compile.runtime.folder import open_folder
from deepinfer_compile.runtime.llm import LLM
from deepinfer_compile.runtime.loader import load_engine
from deepinfer_compile.runtime.memory import address
from deepinfer_compile.runtime.sampling import SamplingParams
from deepinfer_compile.runtime.single_file import open_single
from tests.runtime.made import PLAN, edit_manifest, make_engine
from tests.runtime.pretend import answer, pretend_engine


@pytest.fixture
def packed(tmp_path):
    """A small engine in one file."""
    write_single_file(make_engine(tmp_path / "folder"), tmp_path / "made.engine")
    return tmp_path / "made.engine"


def refusal(path) -> EngineError:
    with pytest.raises(EngineError) as caught:
        open_folder(path)
    return caught.value


def members(path: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def test_it_reads_as_the_folder_does(tmp_path, packed):
    one, many = open_folder(packed), open_folder(tmp_path / "folder")
    assert (one.manifest, one.plan, one.hashed) == (many.manifest, many.plan, many.hashed)
    assert one.plan == PLAN
    assert one.files.names() == many.files.names()
    for name in one.files.names():
        content = one.files.map(name)
        assert content.tobytes() == (tmp_path / "folder" / name).read_bytes()
        assert address(content) % 64 == 0
        assert not content.flags.writeable


def test_weights_are_mapped_from_the_file(tmp_path):
    """No copy: the address the kernels get lies in a mapping of the engine's file."""
    write_single_file(pretend_engine(tmp_path / "folder"), tmp_path / "one.engine")
    engine = load_engine(tmp_path / "one.engine", threads=1)
    place = address(engine.executor._weights[14])
    found = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        begin, _, end = line.split()[0].partition("-")
        if int(begin, 16) <= place < int(end, 16):
            found.append(line.split()[-1])
    assert found == [str(tmp_path / "one.engine")]
    engine.close()


def test_engines_one_after_another_have_libraries_of_their_own(tmp_path):
    """The dynamic loader knows a library by its path: a reused one would give the first engine."""
    write_single_file(pretend_engine(tmp_path / "folder"), tmp_path / "one.engine")
    write_single_file(make_engine(tmp_path / "other"), tmp_path / "two.engine")
    llm = LLM(tmp_path / "one.engine", decode_sequence=False)
    greedy = SamplingParams(temperature=0, max_tokens=5)
    (tokens,) = llm.generate(None, greedy, [[3, 4, 5]], use_tqdm=False)
    assert [token.token_id for token in tokens] == answer([3, 4, 5], 5)
    llm.close()
    del llm, tokens
    two = open_folder(tmp_path / "two.engine")
    library = two.files.library("kernels/engine.so", two.manifest.files["kernels/engine.so"])
    assert library.read_bytes() == b"not a library"
    with pytest.raises(OSError, match=r"short|ELF"):
        ctypes.CDLL(str(library))


def test_the_library_is_hashed_again(packed):
    with pytest.raises(EngineError) as caught:
        open_folder(packed).files.library("kernels/engine.so", "0" * 64)
    assert caught.value.code == "E452"


def test_the_same_problems_are_reported_as_for_a_folder(tmp_path):
    folder = make_engine(tmp_path / "folder")
    (folder / "plan.json").write_text("{}")
    (folder / "weights/constants.safetensors").unlink()
    (folder / "stray").write_text("")
    write_single_file(folder, tmp_path / "made.engine")
    error = refusal(tmp_path / "made.engine")
    assert (error.code, error.notes) == ("E452", refusal(folder).notes)
    assert len(error.notes) == 3
    edit_manifest(folder, schema=7)
    write_single_file(folder, tmp_path / "new.engine")
    assert refusal(tmp_path / "new.engine").code == "E451"


def hostile(path: Path, *extra: tuple[zipfile.ZipInfo, bytes]) -> EngineError:
    """Of a well-formed archive of plain members and `extra` ones, written by Python's zipfile."""
    plain = [(zipfile.ZipInfo(name), b"{}") for name in ("manifest.json", "plan.json")]
    with zipfile.ZipFile(path, "w") as archive, pytest.MonkeyPatch.context() as patch:
        patch.setattr("warnings.warn", lambda *_, **__: None)  # of names there twice
        for info, content in (*plain, *extra):
            info.extra = padding(archive, info.filename)
            archive.writestr(info, content)
    return refusal(path)


def padding(archive: zipfile.ZipFile, name: str) -> bytes:
    assert archive.fp is not None
    count = -(archive.fp.tell() + 30 + len(name.encode()) + 4) % 64
    return b"\x35\xd9" + count.to_bytes(2, "little") + bytes(count)


@pytest.mark.parametrize("name", ["../x", "/etc/x", "a/../../b", "a\\b", "folder/"])
def test_names_outside_the_engine_are_refused(tmp_path, name):
    error = hostile(tmp_path / "x", (zipfile.ZipInfo(name), b""))
    assert (error.code, error.exit_code) == ("E458", 4)
    assert error.notes == (f"{name}: not the name of a file inside an engine",)


def test_links_and_other_kinds_are_refused(tmp_path):
    link, pipe = zipfile.ZipInfo("kernels/engine.so"), zipfile.ZipInfo("pipe")
    link.external_attr = (stat.S_IFLNK | 0o777) << 16
    pipe.external_attr = (stat.S_IFIFO | 0o644) << 16
    error = hostile(tmp_path / "x", (link, b"/etc/passwd"), (pipe, b""))
    assert error.notes == (
        "kernels/engine.so: a link; engines hold plain files",
        "pipe: not a plain file",
    )


def test_a_name_there_twice_is_refused(tmp_path):
    error = hostile(tmp_path / "x", (zipfile.ZipInfo("plan.json"), b"other"))
    assert error.notes == ("plan.json: there twice",)


def test_compressed_members_are_refused(tmp_path):
    small = zipfile.ZipInfo("weights/model.safetensors")
    small.compress_type = zipfile.ZIP_DEFLATED
    error = hostile(tmp_path / "x", (small, bytes(10_000)))
    assert error.notes == ("weights/model.safetensors: compressed; an engine is mapped as it is",)


def test_a_repacked_engine_is_refused_for_where_its_files_lie(tmp_path, packed):
    """By a tool that knows nothing of alignment."""
    with zipfile.ZipFile(tmp_path / "again", "w") as archive:
        for name, content in members(packed).items():
            archive.writestr(name, content)
    error = refusal(tmp_path / "again")
    assert error.code == "E458"
    assert "not a multiple of 64" in error.notes[0]


@pytest.mark.parametrize("where", ["before", "between", "after", "comment"])
def test_bytes_that_are_no_member_are_refused(packed, where):
    content = packed.read_bytes()
    with zipfile.ZipFile(packed) as archive:
        table = archive.start_dir
    if where == "comment":
        with zipfile.ZipFile(packed, "a") as archive:
            archive.comment = b"hello"
    else:
        at = {"before": 0, "between": table, "after": len(content)}[where]
        packed.write_bytes(content[:at] + b"PK" * 32 + content[at:])
    assert refusal(packed).code in ("E450", "E458")
    packed.write_bytes(content)
    open_folder(packed)


def test_overlapping_members_are_refused(packed):
    """Two names of the table for one place in the file."""
    content = bytearray(packed.read_bytes())
    with zipfile.ZipFile(packed) as archive:
        table, infos = archive.start_dir, archive.infolist()
    first, second = (infos[i].header_offset.to_bytes(4, "little") for i in (1, 2))
    at = content.index(second, table)
    content[at : at + 4] = first
    packed.write_bytes(content)
    assert refusal(packed).code == "E458"


def test_every_cut_is_refused(packed):
    content = packed.read_bytes()
    for length in [0, 1, 3, 4, 30, *range(64, len(content), 97), len(content) - 1]:
        packed.write_bytes(content[:length])
        assert refusal(packed).code in ("E450", "E458"), length


def test_no_changed_byte_of_the_structure_gets_through(packed):
    """Any bit outside the members' bytes: refused, or without any meaning for what is read."""
    content, intact = packed.read_bytes(), members(packed)
    draw = random.Random(0)
    with zipfile.ZipFile(packed) as archive:
        infos, table = archive.infolist(), archive.start_dir
    places = [*range(table, len(content))]
    places += [at for info in infos for at in range(info.header_offset, info.header_offset + 64)]
    refused = []
    for at in draw.sample(places, 400):
        changed = bytearray(content)
        changed[at] ^= 1 << draw.randrange(8)
        packed.write_bytes(changed)
        try:
            opened = open_single(packed)
        except EngineError as error:
            refused.append(error.code)
            continue
        found = {name: opened.map(name).tobytes() for name in opened.names()}
        # A whole name is the manifest's to judge.
        assert found == intact or found.keys() != intact.keys(), at
    assert set(refused) <= {"E450", "E458"}
    assert len(refused) > 100


def test_what_is_no_archive_is_no_engine(tmp_path):
    for content in (b"", b"PK", b"\x7fELF" + bytes(100)):
        (tmp_path / "x").write_bytes(content)
        assert refusal(tmp_path / "x").code == "E450"
    with zipfile.ZipFile(tmp_path / "x", "w") as archive:
        info = zipfile.ZipInfo("readme")
        info.extra = padding(archive, "readme")
        archive.writestr(info, "hello")
    assert refusal(tmp_path / "x").message == "not an engine: it has no manifest.json"


def test_every_verb_answers_the_same_for_both_forms(nano_engine, tmp_path, capsys):
    write_single_file(nano_engine, tmp_path / "nano.engine")
    answers = []
    for engine in (nano_engine, tmp_path / "nano.engine"):
        for verb in (["run", "--prompt", "Hello", "--max-tokens", "12"], ["inspect"], ["verify"]):
            assert cli.main([verb[0], str(engine), *verb[1:], "--json"]) == 0
            facts = json.loads(capsys.readouterr().out)
            answers.append({k: v for k, v in facts.items() if "second" not in k})
    assert answers[:3] == answers[3:]
    assert len(answers[0]["outputs"][0]["token_ids"]) == 12
