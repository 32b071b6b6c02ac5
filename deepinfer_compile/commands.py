"""What `deepinfer-compile` does with a loaded spec: one method per command line form."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from deepinfer_compile import driver, report
from deepinfer_compile.checkpoint.fetch import fetch
from deepinfer_compile.checkpoint.synthetic import write_checkpoint
from deepinfer_compile.diagnostics import CompileError, error
from deepinfer_compile.format.whole_file import write_whole
from deepinfer_compile.passes import PIPELINE, find_pass
from deepinfer_compile.plan.roofline import step_bounds
from deepinfer_compile.spec.emit import emit_spec
from deepinfer_compile.spec.load import ModelSpec
from deepinfer_compile.target import Target


def no_target() -> CompileError:
    known = ", ".join(sorted(driver.targets()))
    return error(
        "E002",
        "no target",
        where="--target",
        notes=[f"installed targets: {known}"],
        help="say which, for example --target cpu",
    )


def nothing_to_tune(target: Target, option: str, lock: str) -> CompileError:
    """No rule offers a choice yet, so a lock file could neither be filled nor followed."""
    return error(
        "E204",
        f"target {target.name} has nothing to tune: its rules choose by shape alone",
        where=f"{option} {lock}",
        help=f"compile without {option}",
    )


@dataclass(frozen=True)
class Command:
    """`json`: one object on stdout. `quiet`: no progress on stderr. `dump`: a folder that also gets
    the graphs, as built and after every pass that changed them. Methods return exit codes."""

    spec: ModelSpec
    json: bool
    quiet: bool
    dump: Path | None = None

    def emit_spec(self, file: Path) -> int:
        text = emit_spec(self.spec)
        try:
            write_whole(file, text)
        except OSError as failure:
            message = f"cannot write the spec: {failure.strerror or failure}"
            raise error("E502", message, where=str(file)) from failure
        self._result({"spec": str(file)}, f"wrote {file}")
        return 0

    def fetch(self) -> int:
        source = self.spec.checkpoint
        if source.repo is None:
            raise error(
                "E003",
                "the spec names no repository to fetch from",
                span=self.spec.span("checkpoint"),
                help="give checkpoint.repo and checkpoint.revision",
            )
        folder = fetch(source.repo, source.revision, progress=not self.quiet)
        self._result({"checkpoint": str(folder)}, f"{source.repo}@{source.revision} is in {folder}")
        return 0

    def write_checkpoint(self, folder: Path, seed: int | None) -> int:
        declared = self.spec.checkpoint.synthetic or 0
        with self._progress() as step:
            write_checkpoint(
                self.spec.model,
                folder,
                seed=declared if seed is None else seed,
                progress=lambda done, total: step("synthetic weights", done, total),
            )
        self._result({"checkpoint": str(folder)}, f"wrote {folder}")
        return 0

    def plan(self, target: Target | None) -> int:
        graphs = driver.build(self.spec)
        if target is not None:
            lowered = driver.lower(self.spec, target, self.dump)
            bounds = step_bounds(lowered.graphs, lowered.plan, target.machine)
            facts = report.plan_facts(self.spec, graphs, lowered.plan, bounds)
        else:
            driver.fuse(graphs, None, (), self.dump)
            facts = report.plan_facts(self.spec, graphs, None)
        self._result(facts, report.plan_tables(facts))
        return 0

    def check(self, target: Target) -> int:
        """Every operator's rule; status 1 and all refusals when one has none."""
        try:
            lowered = driver.lower(self.spec, target, self.dump)
        except CompileError as refused:
            problems = [d.to_json() for d in refused.diagnostics]
            text = "\n\n".join(d.render() for d in refused.diagnostics)
            self._result({"target": target.name, "ok": False, "errors": problems}, text)
            return 1
        rules = [
            {"kernel": k.symbol, "rule": k.rule, "uses": k.uses, "refusals": list(k.refusals)}
            for k in lowered.kernels.values()
        ]
        facts: report.Facts = {"target": target.name, "ok": True, "kernels": rules}
        self._result(facts, report.check_table(lowered.kernels))
        return 0

    def compile(
        self,
        target: Target,
        output: Path | None,
        isa: str | None,
        checkpoint: Path | None,
        *,
        pack: bool,
    ) -> int:
        out = output or Path(f"{driver.engine_name(self.spec)}-{target.name}.engine")
        begin = time.monotonic()
        with self._progress() as step:
            driver.compile_engine(
                self.spec,
                target,
                out,
                isa=isa,
                checkpoint=checkpoint,
                pack=pack,
                dump=self.dump,
                progress=step,
            )
        seconds = time.monotonic() - begin
        lowered = driver.lower(self.spec, target)
        facts: report.Facts = {
            "engine": str(out),
            "target": target.name,
            "kernels": len(lowered.kernels),
            "memory": asdict(lowered.plan.memory),
            "seconds": round(seconds, 2),
        }
        self._result(facts, f"wrote {out}: {len(lowered.kernels)} kernels in {seconds:.1f} s")
        return 0

    def stop_after(self, target: Target, name: str) -> int:
        """The passes up to `name` and nothing else; their graphs are what was asked for."""
        last = PIPELINE.index(find_pass(name, "--stop-after"))
        driver.fuse(driver.build(self.spec), target, PIPELINE[: last + 1], self.dump)
        shown = f"stopped after {name}; the graphs are in {self.dump}"
        self._result({"stopped_after": name, "graphs": str(self.dump)}, shown)
        return 0

    def _result(self, facts: report.Facts, shown: str) -> None:
        print(json.dumps({"schema": 1, **facts}, indent=1) if self.json else shown)

    @contextmanager
    def _progress(self) -> Iterator[driver.Progress]:
        """Bars on stderr when it is a terminal; nothing otherwise."""
        console = Console(stderr=True)
        columns = (TextColumn("{task.description:>18}"), BarColumn(), TimeElapsedColumn())
        with Progress(
            *columns, console=console, disable=self.quiet or not sys.stderr.isatty()
        ) as bars:
            tasks: dict[str, TaskID] = {}

            def step(what: str, done: int, total: int) -> None:
                if what not in tasks:
                    tasks[what] = bars.add_task(what)
                bars.update(tasks[what], completed=done, total=total)

            yield step
