"""g++ over the generated sources: an object per operator in parallel processes, then the libraries.

Kernels of an operator are one unit: they share headers and whatever their templates have in common.
The header that all include first is precompiled: parsing the intrinsics takes longer than most
kernels. The program, the largest unit, needs none of it and is compiled meanwhile, without the loop
optimisations that a list of launches has no use for.

Of several instruction sets the first compiles everything. Another shares its objects, except those
of units whose text asks for a feature (`#ifdef __AVX512F__`): the rest would be no faster.

The compiler contracts no products and sums on its own, so every instruction set gives the same
bits. Sources are compiled in a scratch folder under relative names: no path of this machine reaches
a library.
"""

from __future__ import annotations

import errno
import os
import re
import shlex
import shutil
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from deepinfer_targets.cpu.isas import flags, macros, native
from deepinfer_targets.cpu.units import Unit, units_of

from deepinfer_compile.diagnostics import CompileError, Diagnostic, error
from deepinfer_compile.target import Binary, Isa, Toolchain

FLAGS = (
    "-std=c++17",
    "-fPIC",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-ffp-contract=off",
    "-fno-ident",
    "-Wno-psabi",
)
SHARED_HEADER = "kernels/numerics.h"
PROGRAM = "kernels/engine.cpp"
_FEW = 4  # units that are compiled sooner than the precompiled header
LINK = ("-shared", "-static-libstdc++", "-static-libgcc", "-pthread", "-s", "-Wl,--build-id=none")
_FAULT = re.compile(r"^(kernels/[^:]+):\d.*\berror\b", re.MULTILINE)


def _run(command: Sequence[str], folder: Path) -> None:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        if os.strerror(errno.ENOSPC) in done.stderr:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        output = (done.stderr or done.stdout).strip()
        fault = _FAULT.search(output)
        raise error(
            "E302",
            f"{command[0]} failed with status {done.returncode}",
            where=fault[1] if fault else command[-1],
            notes=output.splitlines()[:20],
            help="with g++ 12 or newer this is our bug: report the kernel and the lines above",
        )


@contextmanager
def _scratch() -> Iterator[Path]:
    """A folder to compile in; E501 when its disk, which need not be the engine's, runs full."""
    place = "the scratch folder"
    try:
        place = tempfile.gettempdir()
        with tempfile.TemporaryDirectory(prefix="deepinfer-", dir=place) as scratch:
            yield Path(scratch)
    except OSError as failure:
        full = failure.errno == errno.ENOSPC
        raise error(
            "E501" if full else "E502",
            f"cannot compile the kernels: {(failure.strerror or str(failure)).lower()}",
            where=place,
            help="free some space there, or set TMPDIR to another folder",
        ) from failure


@dataclass(frozen=True)
class _Job:
    """One run of the compiler: a unit for an instruction set."""

    unit: Unit
    isa: Isa

    @property
    def object(self) -> str:
        return f"{self.unit.path}.{self.isa.name}.o"

    @property
    def flags(self) -> tuple[str, ...]:
        return (*flags(self.isa), "-O1" if self.unit.path == PROGRAM else "-O3")


def _jobs(units: Sequence[Unit], first: Isa, isa: Isa) -> tuple[_Job, ...]:
    """The objects of `isa`'s library; those it has in common with `first` are `first`'s."""
    asked = macros(isa)
    return tuple(
        _Job(unit, isa if any(macro in unit.reads for macro in asked) else first) for unit in units
    )


def _usable_cpus() -> int:
    """Of this process; macOS, where a cross compiler may run, has no affinity."""
    known = hasattr(os, "sched_getaffinity")
    return len(os.sched_getaffinity(0)) if known else os.cpu_count() or 1


def _in_turn(jobs: Sequence[_Job]) -> Iterator[tuple[Isa, list[_Job]]]:
    """Jobs as they are started: the program, which reads no header of kernels, then by ISA."""
    for early in (True, False):
        for isa in dict.fromkeys(job.isa for job in jobs):
            its = [job for job in jobs if job.isa == isa and (job.unit.path == PROGRAM) == early]
            if its:
                yield isa, its


@dataclass(frozen=True)
class Gxx(Toolchain):
    """The GNU C++ compiler, 12 or newer.

    `warnings` are flags for our tests: another compiler's opinion must never stop a user's build.
    """

    warnings: tuple[str, ...] = ()

    def versions(self) -> Mapping[str, str]:
        command = [*self._compiler(), "-dumpfullversion"]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        return {"g++": done.stdout.strip()}

    def native(self) -> Isa:
        command = [*self._compiler(), "-march=native", "-dM", "-E", "-x", "c++", os.devnull]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        return native(frozenset(line.split()[1] for line in done.stdout.splitlines()))

    def _compiler(self) -> list[str]:
        command = shlex.split(self.cxx)
        if not command or shutil.which(command[0]) is None:
            raise error(
                "E301",
                f"no C++ compiler found: `{self.cxx}`",
                help="install g++ 12 or newer (Debian: apt-get install g++), or set CXX",
            )
        return command

    def _check_machine(self) -> None:
        """E303 when the compiler's code would not run where an engine does."""
        command = [*self._compiler(), "-dumpmachine"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        machine = done.stdout.strip()
        if not (machine.startswith("x86_64") and "linux" in machine):
            raise error(
                "E303",
                f"`{self.cxx}` compiles for {machine or 'an unknown machine'}; "
                "engines for cpu run on x86_64 Linux",
                help="compile there, or set CXX to a cross compiler such as x86_64-linux-gnu-g++",
            )

    def build(
        self, sources: Mapping[str, str], isas: Sequence[Isa], progress: Callable[[str], None]
    ) -> tuple[Binary, ...]:
        self._check_machine()
        units = units_of(sources)
        libraries = [_jobs(units, isas[0], isa) for isa in isas]
        with _scratch() as root:
            for path, text in [*sources.items(), *((unit.path, unit.text) for unit in units)]:
                file = root / path
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(text, encoding="utf-8")
            self._compile(
                tuple(dict.fromkeys(chain(*zip(*libraries, strict=True)))), root, progress
            )
            return tuple(
                self._link(root, f"kernels/engine.{isa.name}.so", jobs)
                for isa, jobs in zip(isas, libraries, strict=True)
            )

    def _compile(self, jobs: Sequence[_Job], root: Path, progress: Callable[[str], None]) -> None:
        """Every object; `progress` hears of each source once, with its last object."""
        command = [*self._compiler(), *FLAGS, *self.warnings]
        left = Counter(source for job in jobs for source in job.unit.sources)
        problems: list[Diagnostic] = []

        def run(job: _Job) -> None:
            _run([*command, *job.flags, "-c", "-o", job.object, job.unit.path], root)

        with ThreadPoolExecutor(max_workers=_usable_cpus()) as pool:
            try:
                started: dict[Future[None], _Job] = {}
                for isa, its in _in_turn(jobs):  # units compile while the next header does
                    if len(its) > _FEW:
                        self._precompile(command, isa, root)
                    started |= {pool.submit(run, job): job for job in its}
                for done in as_completed(started):
                    try:
                        done.result()
                    except CompileError as failed:
                        problems += failed.diagnostics
                    for source in started[done].unit.sources:
                        left[source] -= 1
                        if not left[source]:
                            progress(source)
            except BaseException:  # after an interrupt no more are started
                pool.shutdown(cancel_futures=True)
                raise
        if problems:
            raise CompileError(sorted(problems, key=lambda d: d.where))

    def _precompile(self, command: Sequence[str], isa: Isa, root: Path) -> None:
        """The shared header; moved into place, so that nobody reads half of it."""
        header = ["-O3", "-x", "c++-header", "-o", f"{isa.name}.gch", SHARED_HEADER]
        _run([*command, *flags(isa), *header], root)
        place = root / f"{SHARED_HEADER}.gch"  # a folder: the compiler takes what fits
        place.mkdir(exist_ok=True)
        (root / f"{isa.name}.gch").rename(place / isa.name)

    def _link(self, root: Path, library: str, jobs: Sequence[_Job]) -> Binary:
        objects = sorted(job.object for job in jobs)
        _run([*self._compiler(), *LINK, *objects, "-o", library], root)
        return Binary(library, (root / library).read_bytes())
