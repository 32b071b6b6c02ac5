"""Synthetic checkpoints: complete, deterministic, statistically sound, and all or nothing."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from math import sqrt
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from safetensors import safe_open
from tokenizers import Tokenizer

from deepinfer_compile.checkpoint import recipes, synthetic
from deepinfer_compile.checkpoint.config import hf_config
from deepinfer_compile.checkpoint.coverage import check_coverage
from deepinfer_compile.checkpoint.headers import CheckpointIndex, read_checkpoint
from deepinfer_compile.checkpoint.synthetic import write_checkpoint
from deepinfer_compile.checkpoint.tensors import totals
from deepinfer_compile.checkpoint.vocabulary import compress, token_map
from deepinfer_compile.diagnostics import CompileError
from deepinfer_compile.spec.hf import from_hf
from deepinfer_compile.spec.load import load_spec
from deepinfer_compile.spec.schema import Model
from tests.checkpoint.models import REPO, edited, nano


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> CheckpointIndex:
    folder = tmp_path_factory.mktemp("synthetic") / "nano"
    write_checkpoint(nano(), folder, seed=7)
    return read_checkpoint(folder)


def data(index: CheckpointIndex, name: str) -> bytes:
    entry = index.tensors[name]
    with (index.folder / entry.file).open("rb") as file:
        file.seek(entry.offset)
        return file.read(entry.nbytes)


def digests(index: CheckpointIndex) -> dict[str, str]:
    return {name: hashlib.sha256(data(index, name)).hexdigest() for name in index.tensors}


def test_a_written_checkpoint_is_complete(written: CheckpointIndex) -> None:
    check_coverage(written, nano())
    assert written.nbytes == sum(row.bytes for row in totals(nano()))
    [file] = written.files
    with safe_open(written.folder / file, "np") as library:
        assert set(library.keys()) == set(written.tensors)
    index = json.loads((written.folder / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": written.nbytes}
    # What a loader maps into memory must be aligned to its element size.
    assert all(e.offset % e.dtype.itemsize == 0 for e in written.tensors.values())


def test_config_reads_back_as_the_model(written: CheckpointIndex, tmp_path: Path) -> None:
    assert from_hf(written.folder, environment={}).model == nano()
    flash = load_spec(REPO / "examples/v41_flash.yaml", environment={}).model
    text_only = edited(flash, vision=None, image_routing_bias=False)
    for number, model in enumerate((flash, text_only, edited(flash, vision=None))):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(hf_config(model)))
        assert from_hf(folder, environment={}).model == model
    published = json.loads((tmp_path / "1/config.json").read_text())["text_config"]
    assert not {"image_routing_bias", "compressed_vocabulary"} & published.keys()


def test_a_tokenizer_spec_gets_a_tokenizer_of_its_size(tmp_path: Path) -> None:
    engram = {
        "engram.compressed_vocabulary": "tokenizer",
        "engram.engram_compressed_vocab_size": 222,
    }
    model = edited(nano(), **engram)
    write_checkpoint(model, tmp_path / "m", seed=0)
    assert token_map(model, tmp_path / "m").max() + 1 == 222


def test_bytes_depend_on_seed_and_name_only(written: CheckpointIndex, tmp_path: Path) -> None:
    """Another process, hash seed, time zone, working folder, shard size and piece size."""
    script = (
        "import sys; from pathlib import Path;"
        "from deepinfer_compile.checkpoint import recipes, synthetic;"
        "recipes._CHUNK_BYTES = 4096;"
        "from tests.checkpoint.models import nano;"
        "synthetic.write_checkpoint(nano(), Path('there'), seed=7, shard_bytes=200_000)"
    )
    environment = {"PYTHONPATH": str(REPO), "PYTHONHASHSEED": "3", "TZ": "Asia/Tokyo"}
    subprocess.run(
        [sys.executable, "-W", "error", "-c", script], env=environment, cwd=tmp_path, check=True
    )
    again = read_checkpoint(tmp_path / "there")
    assert len(again.files) > 5
    assert digests(again) == digests(written)
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        assert (again.folder / name).read_bytes() == (written.folder / name).read_bytes()
    for name, entry in again.tensors.items():  # a scale is never far from its weight
        if name.endswith(".scale"):
            assert again.tensors[name.removesuffix("scale") + "weight"].file == entry.file


def test_known_bytes_of_a_seed(written: CheckpointIndex) -> None:
    """A change here makes everyone's synthetic checkpoints change: say so in the commit."""
    every = "".join(f"{k}{v}" for k, v in sorted(digests(written).items()))
    assert hashlib.sha256(every.encode()).hexdigest() == (
        "fcb87cfbc6bb00eb6c34f8e40d811c8e2c05c981a2bd8106a950aaa2bdc6bdf3"
    )


def test_another_seed_changes_every_tensor(written: CheckpointIndex, tmp_path: Path) -> None:
    write_checkpoint(nano(), tmp_path / "other", seed=8)
    other, ours = digests(read_checkpoint(tmp_path / "other")), digests(written)
    # Tiny scale tables have few different values, so they may meet.
    large = [name for name in ours if written.tensors[name].nbytes >= 64]
    assert len(large) > 300
    assert not [name for name in large if ours[name] == other[name]]
    assert len({ours[name] for name in large}) == len(large)


def e4m3(codes: NDArray[np.uint8]) -> NDArray[np.float64]:
    exponent, mantissa = (codes >> 3).astype(int) & 15, (codes & 7) / 8
    value = np.where(exponent == 0, mantissa * 2.0**-6, (1 + mantissa) * 2.0 ** (exponent - 7))
    assert not np.any((codes & 127) == 127)
    return np.where(codes & 128, -value, value)


def e2m1(packed: NDArray[np.uint8]) -> NDArray[np.float64]:
    values = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    codes = np.stack([packed & 15, packed >> 4], axis=-1).reshape(packed.shape[0], -1)
    return np.where(codes & 8, -1.0, 1.0) * values[codes & 7]


def array(index: CheckpointIndex, name: str) -> NDArray[np.float64]:
    entry, raw = index.tensors[name], data(index, name)
    match entry.dtype:
        case "BF16":
            bits = np.frombuffer(raw, "<u2").astype(np.uint32) << 16
            return bits.view(np.float32).astype(np.float64).reshape(entry.shape)
        case "F32":
            return np.frombuffer(raw, "<f4").astype(np.float64).reshape(entry.shape)
    codes = np.frombuffer(raw, np.uint8).reshape(entry.shape)
    values = e4m3(codes) if entry.dtype == "F8_E4M3" else e2m1(codes)
    stem = name.removesuffix("weight")
    scale = index.tensors[stem + "scale"]
    factor = np.frombuffer(data(index, stem + "scale"), np.uint8).reshape(scale.shape)
    powers = 2.0 ** (factor.astype(int) - 127)
    powers = powers.repeat(32, axis=1)
    if scale.shape[0] != entry.shape[0]:
        powers = powers.repeat(32, axis=0)
    return values * powers


@dataclass(frozen=True)
class Kind:
    pattern: str
    gain: float  # standard deviation times sqrt(fan_in)


@pytest.mark.parametrize(
    "kind",
    [
        Kind("attn.wq_a.weight", 1.0),
        Kind("attn.wq_b.weight", 2.0),
        Kind("attn.wo_b.weight", 0.25),
        Kind("experts.*.w2.weight", 0.25),
        Kind("indexer.weights_proj.weight", 1.0),
        Kind("ffn.gate.weight", 1.5),
        Kind("engram.wkv.weight", 1.0),
        Kind("head.weight", 2.0),
    ],
)
def test_linears_keep_unit_variance_up_to_their_gain(written: CheckpointIndex, kind: Kind) -> None:
    first, _, last = kind.pattern.partition("*")
    names = [n for n in written.tensors if first in n and n.endswith(last or first)]
    names = [n for n in names if "markov" not in n and "shared" not in n]
    squares = [np.square(array(written, n)).mean() * written_fan_in(written, n) for n in names]
    assert names
    # Block scales vary by design, so a single 64 x 64 matrix may be far off; together they are not.
    assert sqrt(float(np.mean(squares))) == pytest.approx(kind.gain, rel=0.3)


def written_fan_in(index: CheckpointIndex, name: str) -> int:
    entry = index.tensors[name]
    return entry.shape[-1] * (2 if entry.dtype == "I8" else 1)


def test_small_tensors_follow_the_advice(written: CheckpointIndex) -> None:
    def every(ending: str) -> NDArray[np.float64]:
        return np.concatenate(
            [array(written, n).ravel() for n in written.tensors if n.endswith(ending)]
        )

    norms = every("norm.weight")
    assert (norms.mean(), norms.std()) == pytest.approx((1, 0.1), abs=0.02)
    sinks = every("attn_sink")
    assert sinks.std() == pytest.approx(1, abs=0.3)
    assert sinks.min() < -0.5 < 0.5 < sinks.max()
    scales = every("hc_attn_scale")
    assert 0.3 <= scales.min() < 0.5
    assert 0.8 < scales.max() <= 1.0
    text, image = every("gate.bias"), every("gate.bias_vl")
    assert 0.25 < max(text.max(), -text.min()) <= 0.3
    assert abs(np.corrcoef(text, image)[0, 1]) < 0.3
    table = every("engram.embed.weight")
    assert table.std() == pytest.approx(1, rel=0.15)


def test_spare_engram_rows_are_not_zero(tmp_path: Path) -> None:
    """A hash that runs past its buckets must change the output."""
    write_checkpoint(
        edited(nano(), **{"engram.engram_num_embeddings": (467, 635)}), tmp_path / "m", seed=0
    )
    table = array(read_checkpoint(tmp_path / "m"), "layers.1.engram.embed.weight")
    assert np.all(np.abs(table[462:]).max(axis=1) > 0)


def test_scale_tables_tell_rows_columns_and_blocks_apart(written: CheckpointIndex) -> None:
    scales = np.frombuffer(data(written, "layers.2.engram.wkv.scale"), np.uint8)
    values, counts = np.unique(scales, return_counts=True)
    assert values.max() - values.min() >= 6  # some blocks differ strongly
    near = counts[np.abs(values.astype(int) - np.median(scales)) <= 1].sum()
    assert near / scales.size > 0.8


def test_some_gates_pass_the_clamp(written: CheckpointIndex) -> None:
    random = np.random.default_rng(0)
    x = random.standard_normal((256, 64))
    limit = nano().moe.swiglu_limit
    for stem in ("layers.3.ffn.shared_experts", "layers.3.ffn.experts.2"):
        for side in ("w1", "w3"):
            y = x @ array(written, f"{stem}.{side}.weight").T
            clamped = np.abs(y) > limit
            assert 0 < clamped.mean() < 0.05
            assert clamped.any(axis=0).sum() <= 4  # a few loud rows, the others stay quiet


@pytest.mark.parametrize("name", ["nano", "micro"])
def test_the_tokenizer_encodes_any_text_and_decodes_every_id(name: str, tmp_path: Path) -> None:
    model = load_spec(REPO / f"examples/v41_{name}.yaml", environment={}).model
    tokenizer = synthetic.make_tokenizer(model)
    tokenizer.save(str(tmp_path / "t.json"))
    tokenizer = Tokenizer.from_file(str(tmp_path / "t.json"))
    assert tokenizer.get_vocab_size(with_added_tokens=True) == model.vocab_size
    pieces = [tokenizer.decode([i], skip_special_tokens=False) for i in range(model.vocab_size)]
    assert all(pieces)
    assert pieces[:3] == ["<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>"]
    everything = "".join(map(chr, [*range(0x20, 0x7F), 0x7FF, 0x800, 0xFFFD, 0x10FFFF]))
    for text in (everything, "Hello, wörld!\n\t深度求索 😀", "the the THE"):
        ids = tokenizer.encode(text).ids
        assert tokenizer.decode(ids) == text
        assert max(ids) < model.vocab_size
    assert len(tokenizer.encode("eee").ids) < 3  # merges are in use


@pytest.mark.parametrize("size", [565, 383, 739])
def test_the_tokenizer_compresses_to_the_declared_size(size: int) -> None:
    changes = {
        "vocab_size": 768,
        "engram.compressed_vocabulary": "tokenizer",
        "engram.engram_compressed_vocab_size": size,
    }
    tokenizer = synthetic.make_tokenizer(edited(nano(), **changes))
    assert compress(tokenizer, 768).max() + 1 == size


@pytest.mark.parametrize("size", [382, 740])
def test_sizes_no_tokenizer_can_have_are_refused(size: int) -> None:
    changes = {
        "vocab_size": 768,
        "engram.compressed_vocabulary": "tokenizer",
        "engram.engram_compressed_vocab_size": size,
    }
    with pytest.raises(CompileError, match="383 to 739"):
        synthetic.make_tokenizer(edited(nano(), **changes))
    with pytest.raises(CompileError, match="too small for a tokenizer"):
        synthetic.make_tokenizer(edited(nano(), vocab_size=200))


def refused(write: Callable[[], None], code: str) -> str:
    with pytest.raises(CompileError) as caught:
        write()
    assert [d.code for d in caught.value.diagnostics] == [code]
    assert caught.value.exit_code == 5
    return str(caught.value)


def test_a_folder_in_use_is_left_alone(tmp_path: Path) -> None:
    target = tmp_path / "there"
    target.mkdir()
    (target / "keep").write_text("mine")
    refused(lambda: write_checkpoint(nano(), target, seed=0), "E503")
    assert [p.name for p in target.iterdir()] == ["keep"]
    assert [p.name for p in tmp_path.iterdir()] == ["there"]


def test_a_disk_that_is_too_small_is_refused_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1_000_000))
    text = refused(lambda: write_checkpoint(nano(), tmp_path / "m", seed=0), "E501")
    assert "are needed and 1000000 are free" in text
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("number", "code"), [(errno.ENOSPC, "E501"), (errno.EDQUOT, "E501"), (errno.EIO, "E502")]
)
def test_a_failing_disk_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, code: str
) -> None:
    def failing(_: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", failing)
    refused(lambda: write_checkpoint(nano(), tmp_path / "m", seed=0), code)
    assert not list(tmp_path.iterdir())


def test_an_interrupt_leaves_nothing_behind(tmp_path: Path) -> None:
    def interrupt(done: int, total: int) -> None:
        if done > total // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_checkpoint(nano(), tmp_path / "m", seed=0, progress=interrupt)
    assert not list(tmp_path.iterdir())


def test_progress_reaches_the_total(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    write_checkpoint(nano(), tmp_path / "m", seed=0, progress=lambda a, b: seen.append((a, b)))
    total = sum(row.bytes for row in totals(nano()))
    assert seen == sorted(seen)
    assert seen[-1] == (total, total)


def test_memory_is_bounded_by_pieces() -> None:
    """A table of a hundred gigabytes is never held: its pieces are a few megabytes each."""
    model = load_spec(REPO / "examples/v41_flash.yaml", environment={}).model
    table = next(
        t for t in synthetic.expected_tensors(model) if t.name == "layers.1.engram.embed.weight"
    )
    recipe = recipes.recipe_for(table, model, recipes.normal_quantiles())
    pieces = recipes.tensor_bytes(table, recipe, 0)
    assert table.nbytes > 98e9
    assert all(len(next(pieces)) <= 4 << 20 for _ in range(3))


def legal_edits() -> st.SearchStrategy[Model]:
    """Widths in steps of 32, counts and tables of any size: what spec rules allow of nano."""
    wide = st.integers(1, 3).map(lambda n: 32 * n)
    choices: dict[str, st.SearchStrategy[object]] = {
        "vocab_size": st.integers(256, 400),
        "hidden_size": wide,
        "image_routing_bias": st.booleans(),
        "attention.num_attention_heads": st.sampled_from([2, 4, 6]),
        "attention.q_lora_rank": wide,
        "attention.o_lora_rank": wide,
        "attention.head_dim": st.sampled_from([32, 64]),
        "indexer.index_n_heads": st.integers(1, 5),
        "hyper_connections.hc_mult": st.integers(1, 4),
        "moe.moe_intermediate_size": wide,
        "moe.n_routed_experts": st.sampled_from([4, 8]),
        "engram.engram_head_dim": wide,
        "engram.engram_num_embeddings": st.tuples(st.integers(462, 500), st.integers(630, 700)),
        "compression.index_source_layer_ids": st.sampled_from([(2, 5), (2, 5, 7), (2, 3, 5)]),
        "dspark.dspark_markov_rank": wide,
        "dspark.dspark_n_routed_experts": st.sampled_from([4, 8]),
    }
    some = st.fixed_dictionaries({}, optional=choices)
    return some.map(lambda changes: edited(nano(), **changes))


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(model=legal_edits())
def test_planned_bytes_are_the_bytes_in_the_headers(
    tmp_path_factory: pytest.TempPathFactory, model: Model
) -> None:
    folder = tmp_path_factory.mktemp("edited") / "m"
    write_checkpoint(model, folder, seed=0, shard_bytes=500_000)
    index = read_checkpoint(folder)
    check_coverage(index, model)
    by_component = {row.component: row.bytes for row in totals(model)}
    assert sum(by_component.values()) == index.nbytes
    sizes = [(folder / file).stat().st_size for file in index.files]
    assert 0 < sum(sizes) - index.nbytes < 400_000  # headers
    shutil.rmtree(folder)
