"""Compare what a checkpoint holds with what the model needs: nothing missing, nothing left over.

Names that differ in layer or expert only are reported as one line:

    layers.3.ffn.experts.{0..383}.w1.weight: missing (384 tensors)

The image tensors (`vision.*`, `aligner.*`, `image_*`, `gate.bias_vl`) come and go together: a model
that declares them needs all of them, and one that does not takes none.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from difflib import get_close_matches

from deepinfer_compile.checkpoint.headers import CheckpointIndex
from deepinfer_compile.checkpoint.tensors import (
    NUMBER,
    TensorSpec,
    expected_tensors,
    name_pattern,
)
from deepinfer_compile.diagnostics import CompileError, Diagnostic
from deepinfer_compile.spec.schema import Model

# Some releases carry an unused embedding row for padded image positions.
_IGNORED = frozenset({"image_pad"})
_SEPARATE_NORM = re.compile(r"(layers|mtp)\.\d+\.hc_(attn|ffn)_norm(\.weight)?")


def check_coverage(index: CheckpointIndex, model: Model) -> None:
    """Raise one `CompileError` with every tensor that is missing, unexpected or of another type."""
    expected = {spec.name: spec for spec in expected_tensors(model)}
    extra = index.tensors.keys() - expected.keys() - _IGNORED
    missing = expected.keys() - index.tensors.keys()
    problems = [
        *_missing(missing, expected),
        *_mistyped(index, expected),
        *_unexpected(extra, expected),
    ]
    if problems:
        where = str(index.folder)
        raise CompileError(
            Diagnostic(d.code, d.message, where=where, notes=d.notes, help=d.help) for d in problems
        )


def _missing(names: set[str], expected: dict[str, TensorSpec]) -> Iterator[Diagnostic]:
    image = {name for name in expected if _is_image(name)} if names else set()
    if image and image <= names:
        names = names - image
        yield Diagnostic(
            "E404",
            f"the model declares image tensors, but the checkpoint is text-only: "
            f"all {len(image)} are missing",
            help="remove `vision` and set `image_routing_bias: false`, or use the full checkpoint",
        )
    for text, count in describe(names):
        yield Diagnostic(
            "E404",
            f"{text}: missing ({_tensors(count)})",
            help="complete the checkpoint, or correct the layers and counts in the spec",
        )


def _mistyped(index: CheckpointIndex, expected: dict[str, TensorSpec]) -> Iterator[Diagnostic]:
    """Wrong shapes, then wrong dtypes; alike mistakes share a line."""
    shapes: dict[tuple[str, str], list[str]] = defaultdict(list)
    dtypes: dict[tuple[str, str], list[str]] = defaultdict(list)
    for name, spec in expected.items():
        entry = index.tensors.get(name)
        if entry is None:
            continue
        if entry.shape != spec.shape:
            shapes[str(list(entry.shape)), str(list(spec.shape))].append(name)
        if entry.dtype is not spec.dtype:
            dtypes[str(entry.dtype), str(spec.dtype)].append(name)
    for code, what, found_wanted in (("E405", "shape", shapes), ("E406", "dtype", dtypes)):
        for (found, wanted), names in found_wanted.items():
            for text, count in describe(names):
                message = f"{text}: {what} {found}, the spec asks for {wanted} ({_tensors(count)})"
                yield Diagnostic(code, message, help=_TYPE_HELP[what])


_TYPE_HELP = {
    "shape": "correct the spec's dimensions, or use the checkpoint that the spec describes",
    "dtype": "only the published formats are read: convert the tensor, it is never cast here",
}


def _unexpected(names: set[str], expected: dict[str, TensorSpec]) -> Iterator[Diagnostic]:
    norms = {name for name in names if _SEPARATE_NORM.fullmatch(name)}
    for text, count in describe(norms):
        yield Diagnostic(
            "E408",
            f"{text}: a separate hyper-connection norm ({_tensors(count)})",
            notes=("the kernels apply no weight between the statistic and `hc_*_fn`",),
            help="multiply the norm weight into the columns of `hc_*_fn` and drop the tensor",
        )
    image = {name for name in names if _is_image(name)}
    if image and not any(map(_is_image, expected)):
        yield Diagnostic(
            "E407",
            f"the checkpoint holds {_tensors(len(image))} for images, the model declares none",
            help="add `vision` and `image_routing_bias: true` to the model",
        )
        names = names - image
    places = defaultdict(list)
    for name in expected if names else ():
        places[name_pattern(name)].append(name)
    for text, count in describe(names - norms):
        yield Diagnostic(
            "E407", f"{text}: unexpected ({_tensors(count)})", help=_nearest(text, places)
        )


def _nearest(text: str, places: dict[str, list[str]]) -> str:
    """Advice for an unknown name: where the spec has it, or what it resembles."""
    pattern = re.sub(r"(?<=\.)\{[\d.,]*\}(?=\.|$)", "{}", name_pattern(text))
    if pattern in places:
        known = ", ".join(place for place, _ in describe(places[pattern]))
        return f"the spec has this tensor only as {known}"
    close = get_close_matches(pattern, places, n=1, cutoff=0.0)
    known = next((place for place, _ in describe(places[close[0]])), "") if close else ""
    return f"remove it, or rename it; the nearest known name is {known}"


def describe(names: Iterable[str]) -> list[tuple[str, int]]:
    """Names folded over their numbers, `a.{0..3}.b`, each with the count it stands for."""
    by_pattern: dict[str, list[tuple[int, ...]]] = defaultdict(list)
    for name in names:
        numbers = tuple(int(n) for n in NUMBER.findall(name))
        by_pattern[name_pattern(name)].append(numbers)
    lines: list[tuple[str, int]] = []
    for pattern in sorted(by_pattern):
        for ranges, count in _boxes(by_pattern[pattern]):
            parts = pattern.split("{}")
            text = "".join(
                a + b for a, b in zip(parts, (*map(_range_text, ranges), ""), strict=True)
            )
            lines.append((text, count))
    return lines


def _boxes(rows: list[tuple[int, ...]]) -> list[tuple[tuple[tuple[int, ...], ...], int]]:
    """Rows as products of index sets: the first index gathers those with the same rest."""
    if not rows or not rows[0]:
        return [((), len(rows))]
    rest_of: dict[int, list[tuple[int, ...]]] = defaultdict(list)
    for first, *rest in sorted(rows):
        rest_of[first].append(tuple(rest))
    firsts_of: dict[tuple[tuple[int, ...], ...], list[int]] = defaultdict(list)
    for first, rests in rest_of.items():
        firsts_of[tuple(rests)].append(first)
    return [
        ((tuple(firsts), *ranges), len(firsts) * count)
        for rests, firsts in firsts_of.items()
        for ranges, count in _boxes(list(rests))
    ]


def _range_text(numbers: tuple[int, ...]) -> str:
    """`3`, or `{0..5,9}`."""
    if len(numbers) == 1:
        return str(numbers[0])
    runs: list[list[int]] = []
    for n in numbers:
        if runs and n == runs[-1][1] + 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    return "{" + ",".join(str(a) if a == b else f"{a}..{b}" for a, b in runs) + "}"


def _is_image(name: str) -> bool:
    return name.startswith(("vision.", "aligner.", "image_")) or name.endswith(".gate.bias_vl")


def _tensors(count: int) -> str:
    return "1 tensor" if count == 1 else f"{count} tensors"
