"""Developer tool: run passes on the text of a graph and print what comes out.

    python -m deepinfer_compile.opt ir/00-build.decode.ir -p fuse-swiglu --target cpu

Any file that --dump-ir writes is an input. Exit status 2 when the text or a name is wrong.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from deepinfer_compile.diagnostics import CompileError, error
from deepinfer_compile.driver import find_target, fuse
from deepinfer_compile.ir.graph import Graph
from deepinfer_compile.ir.text import parse_graph, print_graph
from deepinfer_compile.ir.verify import VerifyError, verify
from deepinfer_compile.passes import PIPELINE, find_pass


def main(argv: Sequence[str] | None = None) -> int:
    """The process's exit status."""
    p = argparse.ArgumentParser(prog="python -m deepinfer_compile.opt", description=__doc__)
    p.add_argument("file", metavar="FILE", help="a graph as text")
    p.add_argument("-p", "--pass", action="append", dest="passes", metavar="PASS", help="or all")
    p.add_argument("--target", metavar="T", help="fuse only what it has kernels for")
    a = p.parse_args(argv)
    try:
        passes = [find_pass(name, "-p") for name in a.passes] if a.passes else PIPELINE
        target = find_target(a.target) if a.target else None
        (graph,) = fuse([_read(a.file)], target, passes)
    except CompileError as failure:
        print("\n\n".join(d.render() for d in failure.diagnostics), file=sys.stderr)
        return failure.exit_code
    print(print_graph(graph), end="")
    return 0


def _read(file: str) -> Graph:
    try:
        text = Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as failure:
        raise error("E502", f"cannot read the graph: {failure}", where=file) from failure
    graph = parse_graph(text, file)
    try:
        verify(graph)
    except VerifyError as broken:
        raise error("E197", f"the graph is not well formed: {broken}", where=file) from broken
    return graph


if __name__ == "__main__":
    raise SystemExit(main())
