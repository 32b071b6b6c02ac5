"""Coverage of a model by a checkpoint: what is missing, left over or of another type."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import pytest

from deepinfer_compile.checkpoint.coverage import check_coverage, describe
from deepinfer_compile.checkpoint.headers import CheckpointIndex, TensorEntry, read_checkpoint
from deepinfer_compile.checkpoint.tensors import StorageDType, expected_tensors
from deepinfer_compile.diagnostics import CompileError
from deepinfer_compile.spec.hf import from_hf
from deepinfer_compile.spec.load import load_spec
from deepinfer_compile.spec.schema import Model
from tests.checkpoint.models import REPO, edited, nano
from tests.golden_data import golden_root

Entries = dict[str, TensorEntry]
NEW = TensorEntry("f.safetensors", StorageDType.BF16, (1,), 0, 2)


def complete(model: Model) -> Entries:
    return {
        t.name: TensorEntry("f.safetensors", t.dtype, t.shape, 0, t.nbytes)
        for t in expected_tensors(model)
    }


def check(entries: Entries, model: Model) -> None:
    check_coverage(CheckpointIndex(Path("ckpt"), MappingProxyType(entries)), model)


def problems(entries: Entries, model: Model) -> list[tuple[str, str]]:
    with pytest.raises(CompileError) as caught:
        check(entries, model)
    assert caught.value.exit_code == 4
    assert {d.where for d in caught.value.diagnostics} == {"ckpt"}
    assert all(d.help for d in caught.value.diagnostics)
    return [(d.code, d.message) for d in caught.value.diagnostics]


def test_golden_checkpoint_covers_its_config() -> None:
    folder = golden_root() / "v41_tiny"
    check_coverage(read_checkpoint(folder), from_hf(folder, environment={}).model)


@pytest.mark.parametrize("name", ["flash", "nano", "micro", "kshape"])
def test_a_complete_checkpoint_passes(name: str) -> None:
    model = load_spec(REPO / f"examples/v41_{name}.yaml", environment={}).model
    check(complete(model), model)
    check(complete(model) | {"image_pad": NEW}, model)


def test_missing_experts_are_one_line() -> None:
    model = load_spec(REPO / "examples/v41_flash.yaml", environment={}).model
    entries = complete(model)
    for expert in range(384):
        del entries[f"layers.3.ffn.experts.{expert}.w1.weight"]
    del entries["layers.7.attn.wq_a.scale"]
    assert problems(entries, model) == [
        ("E404", "layers.7.attn.wq_a.scale: missing (1 tensor)"),
        ("E404", "layers.3.ffn.experts.{0..383}.w1.weight: missing (384 tensors)"),
    ]


def test_wrong_types_tell_both_sides() -> None:
    model, entries = nano(), complete(nano())
    for layer in range(8):
        name = f"layers.{layer}.attn.wq_a.weight"
        entries[name] = replace(entries[name], shape=(64, 32))
    for name in ("layers.0.hc_attn_fn", "layers.0.hc_ffn_fn"):
        entries[name] = replace(entries[name], dtype=StorageDType.BF16)
    packed = "layers.0.ffn.experts.1.w1.weight"
    entries[packed] = replace(entries[packed], dtype=StorageDType.U8)
    shapes = "shape [64, 32], the spec asks for [64, 64]"
    assert problems(entries, model) == [
        ("E405", f"layers.{{0..7}}.attn.wq_a.weight: {shapes} (8 tensors)"),
        ("E406", f"{packed}: dtype U8, the spec asks for I8 (1 tensor)"),
        ("E406", "layers.0.hc_attn_fn: dtype BF16, the spec asks for F32 (1 tensor)"),
        ("E406", "layers.0.hc_ffn_fn: dtype BF16, the spec asks for F32 (1 tensor)"),
    ]


def test_unknown_names_get_the_nearest_known_one() -> None:
    model = nano()
    entries = complete(model) | {
        "layers.0.attn.wq_aa.weight": NEW,
        "layers.8.attn_norm.weight": NEW,
        "layers.1.ffn.experts.8.w1.scale": NEW,
    }
    with pytest.raises(CompileError) as caught:
        check(entries, model)
    assert {d.message: d.help for d in caught.value.diagnostics} == {
        "layers.0.attn.wq_aa.weight: unexpected (1 tensor)": "remove it, or rename it; "
        "the nearest known name is layers.{0..7}.attn.wq_a.weight",
        "layers.8.attn_norm.weight: unexpected (1 tensor)": "the spec has this tensor only as "
        "layers.{0..7}.attn_norm.weight",
        "layers.1.ffn.experts.8.w1.scale: unexpected (1 tensor)": "the spec has this tensor only "
        "as layers.{0..7}.ffn.experts.{0..7}.w1.scale",
    }


def test_separate_hyper_connection_norms_are_refused_with_the_reason() -> None:
    model = nano()
    norms = {f"layers.{layer}.hc_attn_norm": NEW for layer in range(8)}
    with pytest.raises(CompileError) as caught:
        check(complete(model) | norms | {"mtp.0.hc_ffn_norm.weight": NEW}, model)
    assert [d.code for d in caught.value.diagnostics] == ["E408", "E408"]
    text = str(caught.value)
    assert "layers.{0..7}.hc_attn_norm: a separate hyper-connection norm (8 tensors)" in text
    assert "multiply the norm weight into the columns of `hc_*_fn`" in text


def test_image_tensors_come_and_go_together() -> None:
    flash = load_spec(REPO / "examples/v41_flash.yaml", environment={}).model
    model = edited(nano(), vision=flash.vision)
    text_model = edited(nano(), image_routing_bias=False)
    [(code, message)] = problems(complete(text_model), model)
    assert (code, "text-only" in message) == ("E404", True)
    [(code, message)] = problems(complete(model), text_model)
    assert (code, "the model declares none" in message) == ("E407", True)
    partly = complete(model)
    del partly["aligner.w1.bias"]
    assert problems(partly, model) == [("E404", "aligner.w1.bias: missing (1 tensor)")]


def test_every_name_is_in_exactly_one_line() -> None:
    """Folding loses nothing: expand what `describe` printed and compare."""
    names = {f"a.{i}.b.{j}" for i in range(5) for j in range(7) if (i * j) % 3} | {"a.c", "x.4"}
    lines = describe(names)
    assert sum(count for _, count in lines) == len(names)
    assert {name for text, _ in lines for name in expand(text)} == names


def expand(text: str) -> list[str]:
    head, brace, rest = text.partition("{")
    if not brace:
        return [text]
    inside, _, tail = rest.partition("}")
    numbers: list[int] = []
    for part in inside.split(","):
        first, _, last = part.partition("..")
        numbers += range(int(first), int(last or first) + 1)
    return [f"{head}{n}{end}" for n in numbers for end in expand(tail)]
