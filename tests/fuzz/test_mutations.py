"""Damaged specs, checkpoints and engines: a typed error or a right answer, in bounded time and
memory, and no file left behind. A case is its number: the same damage every time."""

from __future__ import annotations

import hashlib
import json
import random
import shutil
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from deepinfer_compile.checkpoint.coverage import check_coverage
from deepinfer_compile.checkpoint.headers import read_checkpoint
from deepinfer_compile.checkpoint.synthetic import write_checkpoint
from deepinfer_compile.checkpoint.vocabulary import read_tokenizer
from deepinfer_compile.diagnostics import CompileError
from deepinfer_compile.driver import find_target, lower
from deepinfer_compile.package.single_file import write_single_file
from deepinfer_compile.report import plan_facts
from deepinfer_compile.runtime.changes import describe_changes
from deepinfer_compile.runtime.comparison import compare
from deepinfer_compile.runtime.errors import EngineError
from deepinfer_compile.runtime.explanation import explain
from deepinfer_compile.runtime.folder import open_folder
from deepinfer_compile.runtime.inspection import describe, facts_of
from deepinfer_compile.runtime.loader import start
from deepinfer_compile.runtime.report import page, report_facts
from deepinfer_compile.runtime.shards import read_folder
from deepinfer_compile.runtime.tokenizer import Tokenizer
from deepinfer_compile.spec.hf import from_hf
from deepinfer_compile.spec.load import load_spec
from tests import engines
from tests.fuzz.bounds import bounded, counts, listing
from tests.fuzz.mutations import json_text, mutate_bytes, mutate_file, mutate_json, mutate_lines

EXAMPLES = [engines.REPO / f"examples/v41_{name}.yaml" for name in ("nano", "micro", "flash")]


@pytest.mark.parametrize("cases", counts())
def test_damaged_specs(tmp_path: Path, cases: range) -> None:
    """Text and values of the examples, as far as the plan."""
    texts = [example.read_text() for example in EXAMPLES]
    values = [json.dumps(YAML(typ="safe").load(text)) for text in texts]
    cpu = find_target("cpu")
    file = tmp_path / "spec.yaml"
    for number in cases:
        rng = random.Random(f"spec {number}")
        which = rng.randrange(len(texts))
        if number % 3 == 0:
            file.write_bytes(mutate_bytes(rng, texts[which].encode()))
        elif number % 3 == 1:
            file.write_text(mutate_lines(rng, texts[which]))
        else:
            file.write_text(json_text(mutate_json(rng, json.loads(values[which]))))
        with bounded(f"spec {number}", CompileError):
            spec = load_spec(file, environment={})
            lowered = lower(spec, cpu)
            assert plan_facts(spec, lowered.graphs, lowered.plan)
        assert listing(tmp_path) == ["spec.yaml"]


@pytest.mark.parametrize("cases", counts())
def test_damaged_checkpoints(tmp_path: Path, cases: range) -> None:
    """Configs, indices, headers and tokenizers, read by the compiler and by the runtime."""
    folder = tmp_path / "checkpoint"
    write_checkpoint(load_spec(EXAMPLES[0], environment={}).model, folder, seed=0)
    files = [file for file in sorted(folder.iterdir()) if file.name != "tokenizer_config.json"]
    before = listing(tmp_path)
    for number in cases:
        rng = random.Random(f"checkpoint {number}")
        file = rng.choice(files)
        original = file.read_bytes()
        file.write_bytes(mutate_file(rng, file.name, original))
        with bounded(f"checkpoint {number} ({file.name}), compiler", CompileError):
            spec = from_hf(folder, environment={})
            check_coverage(read_checkpoint(folder), spec.model)
            read_tokenizer(folder / "tokenizer.json", spec.model.vocab_size)
        with bounded(f"checkpoint {number} ({file.name}), runtime", EngineError):
            read_folder(folder)
        file.write_bytes(original)
        assert listing(tmp_path) == before


@pytest.mark.parametrize("cases", counts())
def test_damaged_engine_folders(tmp_path: Path, cases: range) -> None:
    """Every file, as it is found and with a manifest that vouches for the damage.

    A library is code: once the manifest vouches for another one, nothing protects from it.
    """
    folder = tmp_path / "nano.engine"
    shutil.copytree(engines.nano_engine(), folder)
    manifest = folder / "manifest.json"
    facts = json.loads(manifest.read_text())
    names = ["manifest.json", "plan.json", *sorted(facts["files"])]
    before, intact = listing(tmp_path), open_folder(engines.nano_engine())
    for number in cases:
        rng = random.Random(f"engine {number}")
        file = folder / rng.choice(names[:2] if number % 2 else names)
        vouched = file.suffix in (".json", ".safetensors") and file != manifest and number % 4
        good, good_manifest = file.read_bytes(), manifest.read_bytes()
        bad = mutate_file(rng, file.name, good)
        _replace(file, bad)
        if vouched:
            name = file.relative_to(folder).as_posix()
            files = facts["files"] | {name: hashlib.sha256(bad).hexdigest()}
            manifest.write_text(json.dumps(facts | {"files": files}))
        with bounded(f"engine {number} ({file.name})", EngineError):
            opened = open_folder(folder)
            assert bad == good or vouched or file == manifest, f"{number}: damage went unnoticed"
            assert describe(opened)
            assert facts_of(opened)
            assert page(opened)
            assert report_facts(opened)
            assert describe_changes(compare(intact, opened)) or bad == good
            known = (*opened.manifest.kernels[:1], *opened.plan.buffers[-1:])
            for name in (None, *(one.name for one in known)):
                assert explain(opened, name).text
            limits = opened.plan.limits
            Tokenizer(opened.files, limits.bos_token_id, limits.eos_token_id)
            if not vouched or file.name != "plan.json":  # it says where kernels write: it is code
                start(opened, threads=1).close()
        _replace(file, good)
        manifest.write_bytes(good_manifest)
        assert listing(tmp_path) == before


def _replace(file: Path, content: bytes) -> None:
    """Never in place: an earlier case's library may still be mapped, and is code."""
    fresh = file.with_name("fresh")
    fresh.write_bytes(content)
    fresh.replace(file)


@pytest.mark.parametrize("cases", counts())
def test_damaged_engines_in_one_file(tmp_path: Path, cases: range) -> None:
    """Mostly the archive's table and headers. What still opens holds every file as it was; damage
    in what nobody reads, such as a member's second header, may pass."""
    file = tmp_path / "nano.engine"
    write_single_file(engines.nano_engine(), file)
    good, before = file.read_bytes(), listing(tmp_path)
    names = open_folder(file).files.names()
    table = good.rindex(b"PK\x05\x06") - 8192
    for number in cases:
        rng = random.Random(f"one file {number}")
        first = rng.choice((table, 0, rng.randrange(len(good))))
        last = first + rng.choice((64, 1024, 8192, len(good)))
        bad = good[:first] + mutate_bytes(rng, good[first:last]) + good[last:]
        file.write_bytes(bad)
        with bounded(f"one file {number}", EngineError):
            opened = open_folder(file)
            changed = {n for n in names if opened.files.map(n).tobytes() not in good}
            assert changed <= {"manifest.json"}, f"{number}: damage went unnoticed"
            assert describe(opened)
            start(opened, threads=1).close()
        assert listing(tmp_path) == before
