"""A compiled engine of a made-up model (`pretend.cpp`) and what it must answer, in plain Python."""

from __future__ import annotations

import functools
import hashlib
import subprocess
import tempfile
from dataclasses import replace
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from deepinfer_compile.format import jsons
from deepinfer_compile.format.manifest import CheckpointOrigin, KernelRecord, Library
from deepinfer_compile.format.plan import (
    Buffer,
    EnginePlan,
    Extent,
    Lifetime,
    Memory,
    MemoryClass,
    Phase,
    Probe,
    RowArray,
    StateField,
    Step,
    Variant,
    WeightRecipe,
)
from deepinfer_compile.runtime.tokenizer import _byte_of_letter
from tests.runtime.made import (
    LIMITS,
    MANIFEST,
    write_manifest,
    write_no_oracle,
    write_safetensors,
)

IO, STATE = MemoryClass.IO, MemoryClass.STATE
WEIGHT = 2654435761
EOS = LIMITS.eos_token_id
MASK = 2**32 - 1

BUFFERS = (
    Buffer("token_id", "i32", (-1,), IO, 0, 32),
    Buffer("position", "i32", (-1,), IO, 64, 32),
    Buffer("slot", "i32", (-1,), IO, 128, 32),
    Buffer("row_start", "i32", (-1,), IO, 192, 32),
    Buffer("page_table", "i32", (3, 4), IO, 256, 48),
    Buffer("sample_row", "i32", (-1,), IO, 320, 16),
    Buffer("temperature", "f32", (-1,), IO, 384, 16),
    Buffer("seed", "i64", (-1,), IO, 448, 32),
    Buffer("sample_position", "i64", (-1,), IO, 512, 32),
    Buffer("hidden", "i32", (8, 1), IO, 576, 32),
    Buffer("token", "i32", (-1, 1), IO, 640, 16),
    Buffer("logprob", "f32", (-1, 1), IO, 704, 16),
    Buffer("ring", "i32", (5, 4, 1), STATE, 0, 80),
    Buffer("pages", "i32", (9, 16, 1), STATE, 128, 576),
    Buffer("weight", "i32", (1,), MemoryClass.WEIGHTS, 0, 4),
    Buffer("mixed", "i32", (-1, 1), IO, 768, 32),
    Buffer("top_p", "f32", (-1,), IO, 832, 16),
    Buffer("top_k", "i32", (-1,), IO, 896, 16),
    Buffer("min_p", "f32", (-1,), IO, 960, 16),
    Buffer("top_count", "i32", (-1,), IO, 1024, 16),
    Buffer("top_token", "i32", (-1, 8), IO, 1088, 128),
    Buffer("top_logprob", "f32", (-1, 8), IO, 1216, 128),
    Buffer("masked", "i32", (-1,), IO, 1344, 16),
    Buffer("allowed", "i32", (-1, 8), IO, 1408, 128),
    Buffer("biased", "i32", (-1,), IO, 1536, 16),
    Buffer("bias_token", "i32", (-1, 300), IO, 1600, 4800),
    Buffer("bias", "f32", (-1, 300), IO, 6400, 4800),
    Buffer("counted", "i32", (-1,), IO, 11200, 16),
    Buffer("token_counts", "i32", (3, 256), IO, 11264, 3072),
    Buffer("repetition", "f32", (-1,), IO, 14336, 16),
    Buffer("frequency", "f32", (-1,), IO, 14400, 16),
    Buffer("presence", "f32", (-1,), IO, 14464, 16),
    Buffer("shortlist", "i32", (-1,), IO, 14528, 16),
    Buffer("forced", "i32", (-1,), IO, 14592, 16),
    Buffer("summed", "i32", (-1,), IO, 14656, 16),
    Buffer("smaller", "f32", (-1, 1), IO, 14720, 16),
)


def _step(kernel: str, rows: int) -> Step:
    return Step((Variant(kernel, Extent(1), rows),), ())


def _forward(rows: int) -> tuple[Step, ...]:
    return _step("remember", rows), _step("scale", rows)


_PROBES = (Probe("layers.0.pre", 15, 1),)
_ARRAYS = ("token_id", "position", "slot", "row_start", "page_table")
_SAMPLE_ARRAYS = (
    *("sample_row", "biased", "bias_token", "bias", "counted", "token_counts"),
    *("repetition", "frequency", "presence", "masked", "allowed", "shortlist"),
    *("temperature", "top_p", "top_k", "min_p", "top_count", "seed", "sample_position"),
    *("forced", "summed"),
)
_INDEX = {buffer.name: i for i, buffer in enumerate(BUFFERS)}
PLAN = EnginePlan(
    target="cpu",
    numerics="vendor",
    batch_invariant=False,
    limits=LIMITS,
    memory=Memory(weights=4, state=704, io=14784, arena=0),
    buffers=BUFFERS,
    phases=(
        Phase("prefill", (8,), _forward(8), _PROBES),
        Phase("decode", (1, 2, 4), _forward(4), _PROBES),
        Phase("sample", (1, 2, 4), (_step("sample", 4),), ()),
    ),
    row_arrays=tuple(
        RowArray(name, _INDEX[name], phases, BUFFERS[_INDEX[name]].shape[0] == -1, "")
        for names, phases in ((_ARRAYS, ("prefill", "decode")), (_SAMPLE_ARRAYS, ("sample",)))
        for name in names
    ),
    states=(
        StateField("ring", 12, Lifetime.SLOT, "model", 16, 4, 1, True, "", True),
        StateField("pages", 13, Lifetime.PAGED, "model", 64, 16, 1, True, "", True),
    ),
    weights=(WeightRecipe("weight", (), 0, "I32", (1,), (14,)),),
)


def _record(name: str, fixed: int, per_row: int, flops: int) -> KernelRecord:
    empty = ("", "", "", (), "", (), (), (), (), "", "", "vendor")
    return KernelRecord(name, *empty, fixed, per_row, flops, 0, 0, (), uses=1)


KERNELS = (_record("remember", 100, 10, 7), _record("scale", 0, 8, 1), _record("sample", 5, 0, 3))
ANYWHERE = Library("kernels/engine.so", "any", ())


@functools.cache
def _library() -> bytes:
    source = Path(__file__).with_name("pretend.cpp")
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "engine.so"
        command = ["g++", "-O1", "-shared", "-fPIC", "-o", str(out), str(source)]
        subprocess.run(command, check=True)
        return out.read_bytes()


def pretend_engine(folder: Path, plan: EnginePlan = PLAN) -> Path:
    """The engine as a folder, weights packed, with a tokenizer of 256 bytes and specials."""
    (folder / "kernels").mkdir(parents=True)
    (folder / "kernels/engine.so").write_bytes(_library())
    (folder / "plan.json").write_text(jsons.dump(plan), encoding="utf-8")
    write_no_oracle(folder)
    weight = WEIGHT.to_bytes(4, "little")
    write_safetensors(folder / "weights/model.safetensors", {"weight": ("I32", [1], weight)})
    write_tokenizer(folder / "tokenizer/tokenizer.json")
    files = {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
    origin = CheckpointOrigin("", "", "", packed=True)
    facts = {"libraries": (ANYWHERE,), "checkpoint": origin, "kernels": KERNELS}
    write_manifest(folder, replace(MANIFEST, files=files, **facts))
    return folder


def write_tokenizer(path: Path) -> None:
    """One token a byte, and a few special ones in the places of bytes that text hardly has."""
    path.parent.mkdir(parents=True)
    letters = {byte: letter for letter, byte in _byte_of_letter().items()}
    # DeepSeek's names, the last five in the places of bytes that no text has.
    specials = {
        0: "<｜begin▁of▁sentence｜>",
        1: "<｜end▁of▁sentence｜>",
        0xF8: "<｜System｜>",
        0xF9: "<｜User｜>",
        0xFA: "<｜Assistant｜>",
        0xFB: "<think>",
        0xFC: "</think>",
    }
    vocab = {specials.get(i, letters[i]): i for i in range(256)}
    inner = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(list(specials.values()))
    inner.save(str(path))


def mix(h: int, x: int) -> int:
    h = ((h ^ (x & MASK)) * 0x9E3779B1) & MASK
    return h ^ (h >> 15)


def penalty_of(h: int, prompt, answer, penalties) -> int:
    """What repetition, frequency and presence do: they depend on every count."""
    for token in range(256):
        h = mix(h, (token in prompt) << 31 | list(answer).count(token))
    for penalty in penalties:
        h = mix(h, int(penalty * 1024))
    return h


def next_token(
    known, temperature=0.0, seed=0, filters=(1.0, -1, 0.0), change=lambda h: h
) -> tuple[int, float]:
    """Token and log probability after `known`; `filters` are top_p, top_k and min_p. `change` is
    made to what the model says."""
    h = 1
    for token in [*known, *known[-4:]]:
        h = mix(h, token)
    h = change(h * WEIGHT & MASK)
    if temperature > 0:
        h = mix(mix(h, seed), mix(seed >> 32, len(known)))
        top_p, top_k, min_p = filters
        h = mix(mix(mix(h, int(top_p * 1024)), top_k), int(min_p * 1024))
    return 1 + h % 255, -float(h % 7)


def most_likely(token, logprob, count):
    """The list beside a token: the ids that follow it, all but three filtered out."""
    ids = tuple((token + i) % 256 for i in range(min(count, 8)))
    return ids, tuple(logprob - i if i < 3 else -9999.0 for i in range(len(ids)))


def answer(prompt, count, temperature=0.0, seed=0, ignore_eos=False, filters=(1.0, -1, 0.0)):
    """What a request must produce."""
    known = list(prompt)
    while len(known) < len(prompt) + count and len(known) < LIMITS.max_context:
        known.append(next_token(known, temperature, seed, filters)[0])
        if known[-1] == EOS and not ignore_eos:
            break
    return known[len(prompt) :]
