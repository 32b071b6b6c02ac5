"""What is compiled together, and what of it an instruction set needs for itself.

    kernels/linear__a.cpp, kernels/linear__b.cpp  ->  kernels/linear.unit.cpp

Kernels of an operator share headers and whatever their templates have in common. A unit includes
its kernels as they are, each in a namespace of its own, since they use the same names.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath

_INCLUDE = re.compile(r'^#include (?:"(.+)"|<.+>)$', re.MULTILINE)


@dataclass(frozen=True)
class Unit:
    """A file to compile and the sources in it; `reads` is the text of all files it includes."""

    path: str
    text: str
    sources: tuple[str, ...]
    reads: str


def units_of(sources: Mapping[str, str]) -> tuple[Unit, ...]:
    """Units over all `.cpp` of `sources` (path -> text), the longest first."""
    operators: dict[str, list[str]] = {}
    for path in sorted(path for path in sources if path.endswith(".cpp")):
        operators.setdefault(PurePosixPath(path).stem.partition("__")[0], []).append(path)
    units = [_unit(operator, paths, sources) for operator, paths in operators.items()]
    return tuple(sorted(units, key=lambda unit: -sum(len(sources[s]) for s in unit.sources)))


def _unit(operator: str, paths: list[str], sources: Mapping[str, str]) -> Unit:
    reads = "\n".join(sources[path] for path in _reached(paths, sources))
    if len(paths) == 1:
        return Unit(paths[0], sources[paths[0]], tuple(paths), reads)
    folder = PurePosixPath(paths[0]).parent
    lines = dict.fromkeys(m[0] for path in paths for m in _INCLUDE.finditer(sources[path]))
    for i, path in enumerate(paths):
        kernel = PurePosixPath(path).name
        lines |= dict.fromkeys([f"namespace kernel_{i} {{", f'#include "{kernel}"', f"}}  // {i}"])
    text = "".join(f"{line}\n" for line in lines)
    return Unit(str(folder / f"{operator}.unit.cpp"), text, tuple(paths), reads)


def _reached(paths: Iterable[str], sources: Mapping[str, str]) -> tuple[str, ...]:
    """`paths` and every file of `sources` that they include, directly or not."""
    reached: dict[str, None] = {}
    ahead = list(paths)
    while ahead:
        path = ahead.pop()
        if path not in reached:
            reached[path] = None
            names = (m[1] for m in _INCLUDE.finditer(sources[path]) if m[1])
            ahead += [str(PurePosixPath(path).with_name(name)) for name in names]
    return tuple(reached)
