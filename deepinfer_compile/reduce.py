"""Developer tool: shrink a spec that makes a command fail, and keep the failure.

    python -m deepinfer_compile.reduce spec.yaml -o small.yaml -- deepinfer-compile {} --check ...

The command is run with `{}` replaced by a candidate file. A candidate is kept when the command
ends as it did with the whole spec: the same exit status, and the same error codes or exceptions in
what it prints. Layers go first, then keys, then numbers, until nothing smaller fails that way.
"""

from __future__ import annotations

import argparse
import copy
import io
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ruamel.yaml import YAML

from deepinfer_compile.diagnostics import CompileError, error
from deepinfer_compile.format.whole_file import write_whole
from deepinfer_compile.spec.tree import Value, parse_tree

Tree = dict[str, Value]
_CODE = re.compile(r"error\[(E\d{3})\]|^(\w+(?:Error|Exception))\b", re.MULTILINE)
_SMALLER = (0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 4096)
_CANDIDATE_SOURCE = "model.indexer.candidate_source_layer_id"
_LAYER_LISTS = (
    "model.compression.kv_source_layer_ids",
    "model.compression.index_k_source_layer_ids",
    "model.compression.index_source_layer_ids",
    "model.dspark.dspark_target_layer_ids",
)


@dataclass(frozen=True)
class Failure:
    """How a command ended: its exit status, and every error code and exception name it printed."""

    status: int
    names: tuple[str, ...]

    def __str__(self) -> str:
        return f"exit status {self.status}" + (f", {', '.join(self.names)}" if self.names else "")


def run(command: Sequence[str], file: Path) -> Failure:
    """What `command` makes of `file`, which stands where it says `{}`."""
    words = [word.replace("{}", str(file)) for word in command]
    try:
        done = subprocess.run(words, capture_output=True, text=True, errors="replace", check=False)
    except OSError as failure:
        message = f"cannot run the command: {failure.strerror or failure}"
        raise error("E005", message, where=words[0]) from failure
    printed = _CODE.findall(done.stdout + done.stderr)
    return Failure(done.returncode, tuple(sorted({code or name for code, name in printed})))


def reduce(tree: Tree, fails: Callable[[Tree], bool]) -> Tree:
    """The smallest tree found for which `fails` still holds, as it does for `tree`."""
    while True:
        before = tree
        for candidates in (without_layer, _without_key, _with_smaller_number):
            tree = shrunk(tree, candidates, fails)
        if tree == before:
            return tree


def shrunk(
    tree: Tree, candidates: Callable[[Tree], Iterator[Tree]], fails: Callable[[Tree], bool]
) -> Tree:
    """`tree` after the first candidate that fails, and the next, until none does."""
    while (found := next((c for c in candidates(tree) if fails(c)), None)) is not None:
        tree = found
    return tree


def without_layer(tree: Tree) -> Iterator[Tree]:
    """One backbone layer less, the last first; ids of later layers move down."""
    count = _get(tree, "model.num_hidden_layers")
    for layer in reversed(range(count if isinstance(count, int) else 0)):
        out = copy.deepcopy(tree)
        _put(out, "model.num_hidden_layers", count - 1 if isinstance(count, int) else None)
        ratios = _get(out, "model.compression.ratios")
        tables = _get(out, "model.engram.engram_num_embeddings")
        engrams = _get(out, "model.engram.engram_layer_ids")
        if isinstance(ratios, list):
            del ratios[layer : layer + 1]
        if isinstance(tables, list) and isinstance(engrams, list) and layer in engrams:
            del tables[engrams.index(layer)]
        _put(out, "model.engram.engram_layer_ids", _moved_down(engrams, layer))
        source = _get(out, _CANDIDATE_SOURCE)
        if isinstance(source, int):
            _put(out, _CANDIDATE_SOURCE, source - (source > layer))
        for path in _LAYER_LISTS:
            _put(out, path, _moved_down(_get(out, path), layer))
        yield out


def _moved_down(ids: Value, gone: int) -> Value:
    if not isinstance(ids, list):
        return ids
    numbers = [i for i in ids if isinstance(i, int) and i != gone]
    return [i - (i > gone) for i in numbers]


def _without_key(tree: Tree) -> Iterator[Tree]:
    """One key less, whole sections before what is in them."""
    for path, _ in sorted(_leaves(tree, sections=True), key=lambda leaf: leaf[0].count(".")):
        out = copy.deepcopy(tree)
        holder, _, name = path.rpartition(".")
        section = _get(out, holder)
        assert isinstance(section, dict)
        del section[name]
        yield out


def _with_smaller_number(tree: Tree) -> Iterator[Tree]:
    """One whole number replaced by a smaller round one, the smallest first, or by the one below."""
    for path, value in _leaves(tree):
        if isinstance(value, int) and not isinstance(value, bool):
            for number in (*(n for n in _SMALLER if n < value - 1), value - 1):
                if 0 <= number < value:
                    out = copy.deepcopy(tree)
                    _put(out, path, number)
                    yield out


def _leaves(tree: Tree, prefix: str = "", sections: bool = False) -> Iterator[tuple[str, Value]]:
    """Every value with its dotted path, sections too if asked."""
    for name, value in tree.items():
        if isinstance(value, dict):
            if sections:
                yield prefix + name, value
            yield from _leaves(value, f"{prefix}{name}.", sections)
        else:
            yield prefix + name, value


def _get(tree: Tree, path: str) -> Value:
    """The value at a dotted path; the tree for "", None where there is none."""
    value: Value = tree
    for name in path.split(".") if path else ():
        value = value.get(name) if isinstance(value, dict) else None
    return value


def _put(tree: Tree, path: str, value: Value) -> None:
    """Replaces what is at a dotted path, if something is."""
    holder, _, name = path.rpartition(".")
    section = _get(tree, holder)
    if isinstance(section, dict) and name in section:
        section[name] = value


def _text(tree: Tree) -> str:
    out = io.StringIO()
    yaml = YAML(typ="safe", pure=True)
    yaml.default_flow_style = None  # sections as blocks, lists on one line
    yaml.sort_base_mapping_type_on_output = False  # type: ignore[assignment]
    yaml.dump(tree, out)
    return out.getvalue()


def main(argv: Sequence[str] | None = None) -> int:
    """The process's exit status."""
    given = list(sys.argv[1:] if argv is None else argv)
    cut = given.index("--") if "--" in given else len(given)
    p = argparse.ArgumentParser(
        prog="python -m deepinfer_compile.reduce",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    p.add_argument("spec", type=Path, metavar="SPEC")
    p.add_argument("-o", "--output", type=Path, required=True, metavar="OUT")
    a, command = p.parse_args(given[:cut]), given[cut + 1 :]
    try:
        return _reduce_file(a.spec, a.output, command)
    except CompileError as failure:
        print("\n\n".join(d.render() for d in failure.diagnostics), file=sys.stderr)
        return failure.exit_code


def _reduce_file(spec: Path, output: Path, command: Sequence[str]) -> int:
    if not any("{}" in word for word in command):
        message = "no command with {} where the candidate's path goes"
        raise error("E001", message, help="end with: -- deepinfer-compile {} --check --target cpu")
    if not output.absolute().parent.is_dir():  # said now, not after minutes of work
        raise error("E502", "the output's folder does not exist", where=str(output))
    tree = parse_tree(_read(spec), str(spec)).values
    with tempfile.TemporaryDirectory(prefix="deepinfer-reduce-") as scratch:
        candidate = Path(scratch) / spec.name

        def fate(tree: Tree) -> Failure:
            candidate.write_text(_text(tree), encoding="utf-8")
            return run(command, candidate)

        wanted = fate(tree)
        if wanted.status == 0:
            message = "the command succeeds with this spec: there is no failure to keep"
            raise error("E001", message, where=str(spec))
        print(f"reducing: {wanted}", file=sys.stderr)
        small = reduce(tree, lambda candidate: fate(candidate) == wanted)
    _write(output, _text(small))
    sizes = [sum(1 for _ in _leaves(each)) for each in (tree, small)]
    print(f"wrote {output}: {sizes[1]} of {sizes[0]} values, fails with {wanted}")
    return 0


def _read(spec: Path) -> str:
    try:
        return spec.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as failure:
        raise error("E502", f"cannot read the spec: {failure}", where=str(spec)) from failure


def _write(output: Path, text: str) -> None:
    try:
        write_whole(output, text)
    except OSError as failure:
        message = f"cannot write the spec: {failure.strerror or failure}"
        raise error("E502", message, where=str(output)) from failure


if __name__ == "__main__":
    raise SystemExit(main())
