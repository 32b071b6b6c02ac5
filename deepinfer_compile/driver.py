"""The compiler on one page.

spec --build--> graphs --passes--> graphs --plan--> EnginePlan --emit--> sources
                                                                            | toolchain
                                                             folder <--- library
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import entry_points, version
from pathlib import Path

from deepinfer_compile.build import PHASES, build_graph
from deepinfer_compile.build.dimensions import Dimensions
from deepinfer_compile.checkpoint.coverage import check_coverage
from deepinfer_compile.checkpoint.headers import CheckpointIndex, read_checkpoint
from deepinfer_compile.checkpoint.locate import locate
from deepinfer_compile.checkpoint.synthetic import write_checkpoint
from deepinfer_compile.checkpoint.vocabulary import read_tokenizer, token_map
from deepinfer_compile.diagnostics import CompileError, error
from deepinfer_compile.emit.sources import kernel_sources, program_sources
from deepinfer_compile.format import jsons
from deepinfer_compile.format.manifest import (
    CONSTANTS,
    MANIFEST,
    PACKED_WEIGHTS,
    PLAN,
    TOKENIZER,
    Library,
)
from deepinfer_compile.format.plan import EnginePlan
from deepinfer_compile.ir.graph import Graph, Node
from deepinfer_compile.ir.text import print_graph
from deepinfer_compile.ir.verify import verify
from deepinfer_compile.oracle.stored import Stored
from deepinfer_compile.oracle.write import write_oracle
from deepinfer_compile.package.folder import check_output, engine_folder
from deepinfer_compile.package.manifest import make_manifest
from deepinfer_compile.package.weights import Tensors, write_packed, write_tensors
from deepinfer_compile.passes import PIPELINE
from deepinfer_compile.passes.base import Pass, run_pipeline
from deepinfer_compile.plan.invariance import check_invariance
from deepinfer_compile.plan.kernels import Kernel, select_kernels
from deepinfer_compile.plan.program import plan_engine
from deepinfer_compile.spec.load import ModelSpec, host_compiler
from deepinfer_compile.target import Isa, Target

Progress = Callable[[str, int, int], None]  # what is being done, how much of it, of how much


@dataclass(frozen=True)
class Lowered:
    """A spec lowered for one target, before anything is built."""

    graphs: tuple[Graph, ...]
    kernels: Mapping[str, Kernel]
    plan: EnginePlan


def targets() -> dict[str, Target]:
    """Every installed target by name: ours and anyone's come through the same entry point."""
    found = entry_points(group="deepinfer_compile.targets")
    return {target.name: target for target in (entry.load() for entry in found)}


def find_target(name: str) -> Target:
    """The installed target `name`."""
    known = targets()
    if name not in known:
        raise _no_target(f"unknown target `{name}`", "--target")
    return _equipped(known[name])


def find_target_for(accelerator: str) -> Target:
    """The installed target that DEEPINFER_ACCELERATOR means: by its name, or what it serves."""
    place = "environment DEEPINFER_ACCELERATOR"
    serving = [t for t in targets().values() if accelerator in (t.name, *t.accelerators)]
    if not serving:
        raise _no_target(f"no installed target serves accelerator `{accelerator}`", place)
    if len(serving) > 1:
        names = " and ".join(sorted(target.name for target in serving))
        raise _no_target(f"accelerator `{accelerator}` may mean {names}", place)
    return _equipped(serving[0])


def _no_target(message: str, place: str) -> CompileError:
    installed = f"installed targets: {', '.join(sorted(targets()))}"
    return error(
        "E201", message, where=place, notes=[installed], help="choose one of them with --target"
    )


def _equipped(target: Target) -> Target:
    """With the compiler that this host's user wants."""
    return replace(target, toolchain=replace(target.toolchain, cxx=host_compiler()))


def find_isas(target: Target, name: str | None) -> tuple[Isa, ...]:
    """The instruction sets to compile for: all of the target's unless one is named."""
    if name is None:
        return target.isas
    if name == "native":
        return (target.toolchain.native(),)
    named = tuple(isa for isa in target.isas if isa.name == name)
    if not named:
        raise error(
            "E202",
            f"target {target.name} has no instruction set `{name}`",
            where="--isa",
            help=f"choose one of {', '.join(isa.name for isa in target.isas)}, native",
        )
    return named


def engine_name(spec: ModelSpec) -> str:
    """What the model's files are called: the spec's name, or the checkpoint folder's."""
    file = Path(spec.file)
    return file.stem if file.name != "config.json" else file.absolute().parent.name


def lower(spec: ModelSpec, target: Target, dump: Path | None = None) -> Lowered:
    """Graphs, kernels and the exact plan; nothing is read but the spec. `dump`: see `fuse`."""
    graphs = fuse(build(spec), target, PIPELINE, dump)
    dims = Dimensions(spec)
    max_rows = {graph.name: dims.max_rows(graph.name) for graph in graphs}
    kernels, chosen = select_kernels(graphs, target, max_rows)
    if spec.engine.batch_invariant:
        check_invariance(kernels, chosen.values())
    return Lowered(graphs, kernels, plan_engine(spec, target.name, graphs, chosen))


def build(spec: ModelSpec) -> tuple[Graph, ...]:
    """The verified graph of every phase."""
    graphs = tuple(build_graph(spec, phase) for phase in PHASES)
    for graph in graphs:
        verify(graph)
    return graphs


def fuse(
    graphs: Iterable[Graph],
    target: Target | None,
    passes: Sequence[Pass],
    dump: Path | None = None,
) -> tuple[Graph, ...]:
    """The graphs after `passes`; their text after each goes to the folder `dump`, if one is given.

    A fusion is applied where `target` has a kernel for it; without a target, everywhere."""
    refusals = partial(_no_kernel, target)
    return tuple(run_pipeline(graph, passes, refusals, dump) for graph in graphs)


def _no_kernel(target: Target | None, node: Node) -> tuple[str, ...]:
    """Why `target` has no kernel for `node`; nothing when it has one."""
    if target is None:
        return ()
    rule, refusals = target.choose(node)
    return () if rule else refusals or ("no rule serves this operator",)


def sources(lowered: Lowered, target: Target) -> dict[str, str]:
    """Every generated text of the engine by path: kernels, program, graphs."""
    return {
        **kernel_sources(lowered.kernels, target),
        **program_sources(lowered.plan, lowered.kernels, target),
        "graph.ir": "\n".join(print_graph(graph) for graph in lowered.graphs),
    }


def compile_engine(
    spec: ModelSpec,
    target: Target,
    out: Path,
    *,
    isa: str | None = None,
    checkpoint: Path | None = None,
    pack: bool = False,
    dump: Path | None = None,
    progress: Progress = lambda what, done, total: None,
) -> Path:
    """Write the engine `out`, a folder or (`pack`) one file. Synthetic weights go into it. `dump`:
    see `fuse`."""
    isas = find_isas(target, isa)
    check_output(out)
    lowered = lower(spec, target, dump)
    with (
        _checkpoint(spec, checkpoint, progress) as index,
        engine_folder(out, pack=pack) as folder,
    ):
        texts = sources(lowered, target)
        _write_texts(folder, texts)
        (folder / PLAN).write_text(jsons.dump(lowered.plan), encoding="utf-8")
        libraries = _build(folder, texts, target, isas, progress)
        constants = _constants(spec, index)
        packed = _pack_checkpoint(
            folder, spec, lowered.plan, index, constants, checkpoint, progress
        )
        oracle = write_oracle(
            folder,
            spec,
            lowered.graphs,
            lowered.plan,
            Stored(index, constants),
            lambda done, total: progress("oracle", done, total),
        )
        tools = {**target.toolchain.versions(), "torch": version("torch").partition("+")[0]}
        manifest = make_manifest(
            folder,
            engine_name(spec),
            spec,
            lowered.plan,
            lowered.kernels,
            target,
            libraries,
            tools,
            packed,
            oracle,
        )
        (folder / MANIFEST).write_text(jsons.dump(manifest), encoding="utf-8")
    return out


@contextmanager
def _checkpoint(
    spec: ModelSpec, folder: Path | None, progress: Progress
) -> Iterator[CheckpointIndex]:
    """The checked headers of the checkpoint; a synthetic one is made for the time of the build."""
    seed = spec.checkpoint.synthetic
    if seed is None or folder is not None:
        index = read_checkpoint(locate(spec.checkpoint, folder, spec=spec.file))
        check_coverage(index, spec.model)
        yield index
        return
    with tempfile.TemporaryDirectory(prefix="deepinfer-checkpoint-") as scratch:
        made = Path(scratch) / "checkpoint"
        write_checkpoint(
            spec.model,
            made,
            seed=seed,
            progress=lambda done, total: progress("synthetic weights", done, total),
        )
        yield read_checkpoint(made)


def _write_texts(folder: Path, texts: Mapping[str, str]) -> None:
    for name, text in texts.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")


def _build(
    folder: Path,
    texts: Mapping[str, str],
    target: Target,
    isas: Sequence[Isa],
    progress: Progress,
) -> list[Library]:
    units = {name: text for name, text in texts.items() if name.startswith("kernels/")}
    total = sum(name.endswith(".cpp") for name in units)
    done = 0

    def one_more(unit: str) -> None:
        nonlocal done
        done += 1
        progress("kernels", done, total)

    libraries = []
    for isa, binary in zip(isas, target.toolchain.build(units, isas, one_more), strict=True):
        (folder / binary.path).write_bytes(binary.content)
        libraries.append(Library(binary.path, isa.name, isa.features))
    return libraries


def _pack_checkpoint(
    folder: Path,
    spec: ModelSpec,
    plan: EnginePlan,
    index: CheckpointIndex,
    constants: Tensors,
    given: Path | None,
    progress: Progress,
) -> bool:
    """Constants and tokenizer always; weights when nobody else keeps them. True: packed."""
    (folder / CONSTANTS).parent.mkdir()
    write_tensors(folder / CONSTANTS, constants)
    _copy_tokenizer(folder, spec, index)
    packed = spec.checkpoint.synthetic is not None and given is None
    if packed:
        write_packed(
            folder / PACKED_WEIGHTS,
            plan,
            index,
            lambda done, total: progress("packed weights", done, total),
        )
    return packed


def _constants(spec: ModelSpec, index: CheckpointIndex) -> Tensors:
    """What the compiler computes for the engine."""
    if not spec.model.engram.engram_layer_ids:
        return {}
    ids = token_map(spec.model, index.folder)
    pad = spec.model.engram.engram_pad_token_id
    if ids[pad] != pad:
        raise error(
            "E414",
            f"the Engram pad token {pad} compresses to {ids[pad]}, not to itself",
            where=str(index.folder),
            help="use the tokenizer.json that the model was trained with",
        )
    return {"token_map": ("I32", (len(ids),), ids.astype("<i4").tobytes())}


def _copy_tokenizer(folder: Path, spec: ModelSpec, index: CheckpointIndex) -> None:
    source = index.folder / "tokenizer.json"
    read_tokenizer(source, spec.model.vocab_size)
    (folder / TOKENIZER).parent.mkdir()
    shutil.copyfile(source, folder / TOKENIZER)
    settings = index.folder / "tokenizer_config.json"
    if settings.is_file():
        shutil.copyfile(settings, (folder / TOKENIZER).with_name(settings.name))
