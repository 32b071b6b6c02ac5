"""Folders that are refused: which code, and what the message names."""

from __future__ import annotations

import dataclasses
import os

import pytest

from deepinfer_compile.format import jsons
from deepinfer_compile.format.plan import Extent, Step, Variant
from deepinfer_compile.runtime.errors import EngineError, NotCompiled
from deepinfer_compile.runtime.folder import open_folder
from deepinfer_compile.runtime.loader import load_engine
from tests.runtime.made import MANIFEST, PLAN, edit_manifest, make_engine


def refusal(path, **options):
    with pytest.raises(EngineError) as caught:
        open_folder(path, **options)
    return caught.value


def test_an_intact_folder_opens_and_is_read_exactly(tmp_path):
    folder = open_folder(make_engine(tmp_path / "e"))
    assert folder.plan == PLAN
    stored = sum(f.stat().st_size for f in (tmp_path / "e").rglob("*") if f.is_file())
    assert folder.hashed == stored - (tmp_path / "e/manifest.json").stat().st_size


def test_all_file_problems_are_reported_together(tmp_path):
    engine = make_engine(tmp_path / "e")
    library = engine / "kernels/engine.so"
    content = bytearray(library.read_bytes())
    content[3] ^= 1
    library.write_bytes(content)
    (engine / "weights/constants.safetensors").unlink()
    (engine / "kernels/extra.so").write_bytes(b"x")
    error = refusal(engine)
    assert error.exit_code == 4
    assert error.render() == "\n".join(
        [
            "error[E452]: the engine's files are not those its manifest names",
            f"  --> {engine}",
            "   = kernels/engine.so: sha256 differs",
            "   = weights/constants.safetensors: missing",
            "   = kernels/extra.so: not in the manifest",
            "   = help: copy the engine again, or recompile it",
        ]
    )


@pytest.mark.parametrize("name", ["notes.txt", "weights/more.bin", "a/b/.hidden", "dangling"])
def test_any_file_the_manifest_does_not_name_is_reported(tmp_path, name):
    engine = make_engine(tmp_path / "e")
    (engine / name).parent.mkdir(parents=True, exist_ok=True)
    if name == "dangling":
        (engine / name).symlink_to("nowhere")
    else:
        (engine / name).write_text("")
    error = refusal(engine)
    assert (error.code, error.notes) == ("E452", (f"{name}: not in the manifest",))
    assert refusal(engine, skip_weights=True).notes == error.notes


def test_a_folder_of_files_behind_a_link_is_reported(tmp_path):
    engine = make_engine(tmp_path / "e")
    (engine / "kernels").rename(tmp_path / "elsewhere")
    (engine / "kernels").symlink_to(tmp_path / "elsewhere")
    assert refusal(engine).notes == ("kernels: not in the manifest",)


def test_what_is_no_plain_file_is_not_read(tmp_path):
    engine = make_engine(tmp_path / "e")
    (engine / "kernels/engine.so").unlink()
    os.mkfifo(engine / "kernels/engine.so")
    assert refusal(engine).notes == ("kernels/engine.so: not a plain file",)


def test_a_link_is_refused_even_to_the_right_bytes(tmp_path):
    engine = make_engine(tmp_path / "e")
    library = engine / "kernels/engine.so"
    library.rename(tmp_path / "elsewhere.so")
    library.symlink_to(tmp_path / "elsewhere.so")
    assert refusal(engine).notes == ("kernels/engine.so: a link; engines hold plain files",)


@pytest.mark.parametrize("name", ["../outside", "/etc/hostname", "a/../../b", "a\\b", ""])
def test_names_outside_the_folder_are_refused(tmp_path, name):
    engine = make_engine(tmp_path / "e")
    files = dict(open_folder(engine).manifest.files)
    edit_manifest(engine, files=files | {name: "0" * 64})
    error = refusal(engine)
    assert (error.code, error.notes) == ("E453", (name,))


@pytest.mark.parametrize("name", ["plan.json", "kernels/engine.so", "oracle/oracle.json"])
def test_a_manifest_must_vouch_for_plan_and_library(tmp_path, name):
    engine = make_engine(tmp_path / "e")
    files = {k: v for k, v in open_folder(engine).manifest.files.items() if k != name}
    edit_manifest(engine, files=files)
    assert f"{name}: not in the manifest" in refusal(engine).notes


def test_a_newer_schema_names_both_numbers_whatever_else_changed(tmp_path):
    engine = make_engine(tmp_path / "e")
    edit_manifest(engine, schema=7, a_field_of_the_future=1)
    error = refusal(engine)
    assert (error.code, error.exit_code) == ("E451", 4)
    assert error.message == "the engine has schema 7, this runtime reads up to 4"


def test_an_older_schema_and_another_abi_are_refused(tmp_path):
    engine = make_engine(tmp_path / "e")
    edit_manifest(engine, schema=1)
    assert refusal(engine).code == "E451"
    edit_manifest(engine, schema=4, abi=9)
    assert refusal(engine).message == "the engine's library has ABI 9, this runtime calls 1"


@pytest.mark.parametrize("text", ["", "[]", "{", '{"schema": true}', "[" * 100_000])
def test_a_damaged_manifest_is_refused(tmp_path, text):
    engine = make_engine(tmp_path / "e")
    (engine / "manifest.json").write_text(text)
    assert refusal(engine).code == "E457"


def test_a_manifest_that_is_not_text_is_refused(tmp_path):
    engine = make_engine(tmp_path / "e")
    (engine / "manifest.json").write_bytes(b"\xff\xfe\x00")
    assert refusal(engine).message == "the file is damaged: it is not UTF-8"


def test_an_unknown_field_is_refused_by_name(tmp_path):
    engine = make_engine(tmp_path / "e")
    edit_manifest(engine, surprise=1)
    assert "surprise" in refusal(engine).message


def test_a_checkpoint_is_refused_with_the_command_that_compiles_it(tmp_path):
    (tmp_path / "My Model").mkdir()
    (tmp_path / "My Model/config.json").write_text("{}")
    error = refusal(tmp_path / "My Model")
    assert isinstance(error, NotCompiled)
    assert error.exit_code == 4
    assert error.command == (
        f"deepinfer-compile --from-hf '{tmp_path}/My Model' --target cpu -o 'My Model-cpu.engine'"
    )


def test_what_is_no_engine_is_said_so(tmp_path):
    assert refusal(tmp_path / "absent").message == "the engine does not exist"
    assert refusal(tmp_path).message == "not an engine: it has no manifest.json"
    (tmp_path / "file").write_text("")
    message = "not an engine: neither a folder nor an engine in one file"
    assert refusal(tmp_path / "file").message == message


def test_a_plan_that_contradicts_itself_is_refused(tmp_path):
    buffers = list(PLAN.buffers)
    buffers[4] = dataclasses.replace(buffers[4], offset=64)
    plan = dataclasses.replace(PLAN, target="other", buffers=tuple(buffers))
    error = refusal(make_engine(tmp_path / "e", plan=plan))
    assert error.notes == (
        "target: plan.json says other, manifest.json cpu",
        "`x` ends at 192, past its arena memory",
    )


def test_buckets_and_row_classes_that_do_not_meet_are_refused(tmp_path):
    def step(*ends):
        return Step(tuple(Variant("k", Extent(1), end) for end in ends), ())

    prefill, decode, sample = PLAN.phases
    phases = (
        dataclasses.replace(prefill, buckets=(8, 8)),
        dataclasses.replace(decode, steps=(step(1, 4), step(1), step(2, 4), step(4, 1), step())),
        dataclasses.replace(sample, buckets=()),
    )
    error = refusal(make_engine(tmp_path / "e", plan=dataclasses.replace(PLAN, phases=phases)))
    assert error.notes == (
        "prefill: its buckets do not ascend",
        "decode: 4 steps without a kernel for every bucket",
        "sample: its buckets do not ascend",
    )


def test_wrong_weight_bytes_in_the_plan_are_refused(tmp_path):
    memory = dataclasses.replace(PLAN.memory, weights=1)
    error = refusal(make_engine(tmp_path / "e", plan=dataclasses.replace(PLAN, memory=memory)))
    assert error.notes == ("weights take 172 bytes, the plan says 1",)


def test_inspection_does_not_hash_weights(tmp_path):
    engine = make_engine(tmp_path / "e")
    (engine / "weights/constants.safetensors").unlink()
    assert open_folder(engine, skip_weights=True).plan == PLAN
    assert refusal(engine).code == "E452"


def test_another_target_is_refused_before_its_library_is_touched(tmp_path):
    manifest = dataclasses.replace(MANIFEST, target="board", driver="cuda")
    engine = make_engine(tmp_path / "e", manifest, dataclasses.replace(PLAN, target="board"))
    with pytest.raises(EngineError) as caught:
        load_engine(engine)
    assert (caught.value.code, caught.value.exit_code) == ("E240", 3)
    assert caught.value.message == (
        "the engine is for target board, driver cuda; this runtime has cpu"
    )


def test_a_file_that_is_no_library_is_refused(tmp_path):
    from tests.runtime.made import checkpoint_tensors, write_safetensors

    engine = make_engine(tmp_path / "e")
    write_safetensors(tmp_path / "ckpt/model.safetensors", checkpoint_tensors())
    with pytest.raises(EngineError) as caught:
        load_engine(engine, checkpoint=tmp_path / "ckpt")
    assert (caught.value.code, caught.value.exit_code) == ("E243", 3)


def test_plan_text_survives_a_round_trip():
    assert jsons.load(type(PLAN), jsons.dump(PLAN)) == PLAN
