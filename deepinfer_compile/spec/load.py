"""YAML -> `ModelSpec`: every user mistake dies here, with file, line and column.

    text --parse--> tree --environment, --set--> tree --schema--> sections --rules--> ModelSpec

Each stage collects all it can find; whatever any of them found is raised together.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from deepinfer_compile.diagnostics import CompileError, Span
from deepinfer_compile.spec import rules, settings
from deepinfer_compile.spec.schema import Checkpoint, Document, EngineSettings, Model
from deepinfer_compile.spec.tree import Places, Tree, parse_tree, read_text, shown
from deepinfer_compile.spec.validate import unknown_key, validate


@dataclass(frozen=True)
class ModelSpec:
    """A spec that passed every rule. Equal specs say the same, wherever they were written.

    `spans` maps dotted paths (`model.compression.ratios[3]`) to places; `sources` names what set
    a path when it was not the file (`environment DEEPINFER_BATCH_INVARIANT`).
    """

    model: Model
    checkpoint: Checkpoint
    engine: EngineSettings
    spans: Mapping[str, Span] = field(compare=False, repr=False)
    file: str = field(compare=False)
    sources: Mapping[str, str] = field(compare=False, default_factory=dict)

    def span(self, key: str) -> Span:
        """Where `key` was written, or the nearest enclosing path that was."""
        return Places(self.file, self.spans).span(key)


def load_spec(
    path: str | os.PathLike[str],
    *,
    overrides: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> ModelSpec:
    """Read a spec file; `overrides` are `--set` strings. All problems in one `CompileError`."""
    place = Path(path)
    file = shown(place)
    tree = parse_tree(read_text(place, file), file)
    return assemble(tree, overrides=overrides, environment=environment)


def assemble(
    tree: Tree,
    *,
    overrides: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    pinned: Sequence[str] = (),
) -> ModelSpec:
    """A parsed tree, whatever file it came from, to a checked spec.

    `pinned` paths were given by hand and are not the environment's to change.
    """
    outside = os.environ if environment is None else environment
    from_environment, bad_variables = settings.from_environment(outside)
    from_environment = [setting for setting in from_environment if setting.key not in pinned]
    from_command_line, bad_overrides = settings.from_command_line(overrides)
    values, sources, misplaced = settings.apply(
        tree.values, [*from_environment, *from_command_line]
    )
    places = replace(tree.places, sources={**tree.places.sources, **sources})

    model, model_problems = validate(Model, "model", values, places)
    checkpoint, checkpoint_problems = validate(Checkpoint, "checkpoint", values, places)
    engine, engine_problems = validate(EngineSettings, "engine", values, places)
    problems = [
        *tree.problems,
        *(unknown_key(key, places) for key in values if key not in Document.model_fields),
        *model_problems,
        *checkpoint_problems,
        *engine_problems,
        *rules.check(model, checkpoint, engine, places),
    ]
    diagnostics = [*bad_variables, *bad_overrides, *misplaced]
    diagnostics += [places.diagnostic(problem) for problem in problems]
    if diagnostics:
        raise CompileError(diagnostics)
    assert model is not None, "no problems, so every section is there"
    assert checkpoint is not None
    assert engine is not None
    return ModelSpec(model, checkpoint, engine, places.spans, places.file, places.sources)


def default_target(environment: Mapping[str, str] | None = None) -> str | None:
    """What `DEEPINFER_ACCELERATOR` says, in lower case; the target it means is not known here."""
    outside = os.environ if environment is None else environment
    return outside.get("DEEPINFER_ACCELERATOR", "").strip().lower() or None


def host_compiler(environment: Mapping[str, str] | None = None) -> str:
    """The C++ compiler: what `CXX` says, as everywhere, or g++."""
    outside = os.environ if environment is None else environment
    return outside.get("CXX", "").strip() or "g++"
