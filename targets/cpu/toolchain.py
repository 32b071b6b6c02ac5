"""g++ over the generated sources: one object per kernel in parallel processes, one library.

The header all kernels include first is precompiled: parsing the intrinsics takes longer than most
kernels. The program is compiled last in the alphabet but first in time, as the largest unit, and
without the loop optimisations that a list of launches has no use for.

The compiler is found by torch._inductor's C++ driver, so CXX is honoured the way users of
torch.compile know it. Sources are compiled in a scratch folder under relative names: no path of
this machine reaches the library.
"""

from __future__ import annotations

import errno
import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from deepinfer_compile.diagnostics import CompileError, Diagnostic, error
from deepinfer_compile.target import Binary, Toolchain

ISA_FLAGS = {
    "x86-64-v3": ("-march=x86-64-v3",),
    "avx512": ("-march=x86-64-v4",),
}
FLAGS = (
    "-std=c++17",
    "-fPIC",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-ffp-contract=fast",
    "-fno-ident",
    "-Wno-psabi",
)
SHARED_HEADER = "kernels/numerics.h"
PROGRAM = "kernels/engine.cpp"
_FEW = 4  # units that are compiled sooner than the precompiled header
LINK = ("-shared", "-static-libstdc++", "-static-libgcc", "-pthread", "-s", "-Wl,--build-id=none")


def _run(command: list[str], folder: Path) -> None:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        if os.strerror(errno.ENOSPC) in done.stderr:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        lines = (done.stderr or done.stdout).strip().splitlines()
        raise error(
            "E302",
            f"{command[0]} failed with status {done.returncode}",
            where=command[-1],
            notes=lines[:20],
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
class Gxx(Toolchain):
    """The GNU C++ compiler, 12 or newer.

    `warnings` are flags for our tests: another compiler's opinion must never stop a user's build.
    """

    warnings: tuple[str, ...] = ()

    def versions(self) -> Mapping[str, str]:
        command = self._compiler()
        done = subprocess.run(
            [command, "-dumpfullversion"], capture_output=True, text=True, check=True
        )
        return {"g++": done.stdout.strip()}

    def _compiler(self) -> str:
        from torch._inductor import cpp_builder  # here: importing it costs three seconds

        try:
            return str(cpp_builder.get_cpp_compiler())
        except Exception as missing:
            raise error(
                "E301",
                "no C++ compiler found",
                notes=[str(missing).splitlines()[0]],
                help="install g++ 12 or newer (Debian: apt-get install g++), or set CXX",
            ) from None

    def build(
        self, sources: Mapping[str, str], isa: str, progress: Callable[[str], None]
    ) -> tuple[Binary, ...]:
        compiler = self._compiler()
        with _scratch() as root:
            for path, text in sorted(sources.items()):
                file = root / path
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(text)
            units = [path for path in sorted(sources) if path.endswith(".cpp")]
            command = [compiler, *FLAGS, *self.warnings, *ISA_FLAGS[isa]]
            if len(units) > _FEW:
                header = ["-O3", "-x", "c++-header", "-o", f"{SHARED_HEADER}.gch", SHARED_HEADER]
                _run([*command, *header], root)
            units.sort(key=lambda unit: unit != PROGRAM)
            self._compile(command, units, root, progress)
            objects = [f"{unit}.o" for unit in units]
            library = "kernels/engine.so"
            _run([compiler, *LINK, *objects, "-o", library], root)
            return (Binary(library, (root / library).read_bytes()),)

    def _compile(
        self,
        command: list[str],
        units: list[str],
        root: Path,
        progress: Callable[[str], None],
    ) -> None:
        def level(unit: str) -> str:
            return "-O1" if unit == PROGRAM else "-O3"

        problems: list[Diagnostic] = []
        with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
            try:
                jobs = {
                    pool.submit(
                        _run, [*command, level(unit), "-c", "-o", f"{unit}.o", unit], root
                    ): unit
                    for unit in units
                }
                for job in as_completed(jobs):
                    try:
                        job.result()
                    except CompileError as failed:
                        problems += failed.diagnostics
                    progress(jobs[job])
            except BaseException:  # after an interrupt no more are started
                pool.shutdown(cancel_futures=True)
                raise
        if problems:
            raise CompileError(sorted(problems, key=lambda d: d.where))
