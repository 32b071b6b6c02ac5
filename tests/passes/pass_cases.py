"""Golden cases of passes as text: a graph, and exactly what passes make of it.

[case fuse_x_keeps_y]
[run] fuse-x                       passes, in order
[target] cpu                       fuse only what it has kernels for; left out: everything
[in] (%x: bf16[R,64], %s: !f32[9,4,2,64])      inputs; those with a `!` are states
  %y: ... = ...
  probe %y
  return %z
[out]                              the same without its first line; until the next case
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from deepinfer_compile.driver import find_target, fuse
from deepinfer_compile.ir.graph import Graph
from deepinfer_compile.ir.text import parse_graph, print_graph
from deepinfer_compile.ir.verify import verify
from deepinfer_compile.passes import find_pass

FOLDER = Path(__file__).parent


@dataclass
class PassCase:
    """One case of a .test file, parsed. `line` is where its [out] is."""

    name: str
    run: list[str] = field(default_factory=list)
    target: str = ""
    inputs: str = ""
    before: str = ""
    after: str = ""

    def graph(self) -> Graph:
        values = self.inputs.strip("()").replace("], ", "]\n").splitlines()
        kinds = ["state" if "!" in value else "input" for value in values]
        lines = [f"  {kind} {value}" for kind, value in zip(kinds, values, strict=True)]
        graph = parse_graph("\n".join(["graph case", *lines, self.before]), self.name)
        verify(graph)
        return graph

    def fused(self, graph: Graph) -> Graph:
        passes = [find_pass(name, self.name) for name in self.run]
        target = find_target(self.target) if self.target else None
        (after,) = fuse([graph], target, passes)
        return after


def body(graph: Graph) -> str:
    """The text from the first node on."""
    defined = ("graph ", "  input ", "  weight ", "  state ")
    lines = print_graph(graph).splitlines(keepends=True)
    return "".join(line for line in lines if not line.startswith(defined))


def parse_cases(text: str) -> list[PassCase]:
    """The cases of a .test file, in order."""
    cases: list[PassCase] = []
    mode = ""
    for line in text.splitlines():
        word, _, rest = line.partition(" ")
        if word == "[case":
            cases.append(PassCase(rest.removesuffix("]")))
        elif word == "[run]":
            cases[-1].run = rest.split()
        elif word == "[target]":
            cases[-1].target = rest
        elif word == "[in]":
            cases[-1].inputs = rest
        elif word != "[out]" and not line.strip():
            continue
        elif mode == "[in]" and word != "[out]":
            cases[-1].before += line + "\n"
        elif mode == "[out]":
            cases[-1].after += line + "\n"
        elif word != "[out]":
            raise ValueError(f"not part of a case: {line}")
        mode = word if word.startswith("[") else mode
    return cases


def show(case: PassCase) -> str:
    """The text of a case."""
    target = f"[target] {case.target}\n" if case.target else ""
    head = f"[case {case.name}]\n[run] {' '.join(case.run)}\n{target}"
    return f"{head}[in] {case.inputs}\n{case.before}[out]\n{case.after}"


def rewrite(path: Path) -> None:
    """Put what the passes make of each case into its file."""
    cases = parse_cases(path.read_text(encoding="utf-8"))
    for case in cases:
        case.after = body(case.fused(case.graph()))
    path.write_text("\n".join(map(show, cases)), encoding="utf-8")
