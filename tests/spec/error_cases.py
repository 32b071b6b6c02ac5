"""Error cases as text: a spec made from a base by edits, and exactly what the user must read.

    [case max_rows_too_few]
    [base] v41_nano                    a file of examples/; `hf`: tests/spec/flash_config.json
    [edit] engine.max_rows = 4         replace a value, or add the key to its section
    [again] engine.max_rows = 4        write the key a second time
    [drop] engine.max_context          remove a key or a section
    [set] engine.max_rows=4            a --set of the command line
    [env] NAME=value                   an environment variable
    [spec]                             instead of a base: the whole text, until [error]
    [error]                            the exact text, until the next case

Rewrite the expected texts, then read the diff: python tests/spec/error_cases.py
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field
from pathlib import Path

from deepinfer_compile.diagnostics import CompileError
from deepinfer_compile.spec.hf import from_hf
from deepinfer_compile.spec.load import load_spec
from deepinfer_compile.spec.tree import parse_tree

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "tests" / "errors"


@dataclass
class Case:
    """One case of a .test file, parsed."""

    name: str
    base: str = ""
    text: str = ""
    changes: list[tuple[str, str]] = field(default_factory=list)
    overrides: list[str] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)
    expected: str = ""

    def run(self, folder: Path) -> str:
        """What the spec's mistakes read like; empty when there are none."""
        try:
            if self.base == "hf":
                text = (ROOT / "tests" / "spec" / "flash_config.json").read_text()
                (folder / "config.json").write_text(changed(text, self.changes))
                return self._load_hf(folder)
            path = folder / f"{self.base or 'case'}.yaml"
            if self.base:
                text = (ROOT / "examples" / path.name).read_text()
                path.write_text(changed(text, self.changes))
            elif self.text:
                path.write_bytes(self.text.encode())
            load_spec(path, overrides=self.overrides, environment=self.environment)
        except CompileError as problem:
            return str(problem).replace(str(folder), "FOLDER").replace(folder.name, "FOLDER")
        return ""

    def _load_hf(self, folder: Path) -> str:
        from_hf(folder, overrides=self.overrides, environment=self.environment)
        return ""


def parse_cases(text: str) -> list[Case]:
    """The cases of a .test file, in order."""
    cases: list[Case] = []
    mode = ""
    for line in text.splitlines():
        word, _, rest = line.partition(" ")
        if word == "[case":
            cases.append(Case(rest.removesuffix("]")))
            mode = ""
        elif word in ("[error]", "[spec]"):
            mode = word
        elif mode == "[error]":
            cases[-1].expected += line + "\n"
        elif mode == "[spec]":
            cases[-1].text += line + "\n"
        elif word == "[base]":
            cases[-1].base = rest
        elif word in ("[edit]", "[again]", "[drop]"):
            cases[-1].changes.append((word, rest))
        elif word == "[set]":
            cases[-1].overrides.append(rest)
        elif word == "[env]":
            name, _, value = rest.partition("=")
            cases[-1].environment[name] = value
        elif line and not line.startswith("#"):
            raise ValueError(f"not part of a case: {line}")
    for case in cases:
        case.expected = case.expected.strip("\n")
    return cases


def changed(text: str, changes: list[tuple[str, str]]) -> str:
    """`text` after each change, found by the span of its dotted path."""
    for verb, rest in changes:
        key, _, value = (part.strip() for part in rest.partition(" = "))
        spans = parse_tree(text, "").places.spans
        lines = text.splitlines()
        parent, leaf = key.rpartition(".")[0], key.rpartition(".")[2]
        quote = '"' if text.startswith("{") else ""
        entry = value if key.endswith("]") else f"{quote}{leaf}{quote}: {value}"
        if key not in spans:
            above = spans[parent].line if parent else 1
            indent = 0 if not parent else spans[parent].col + 1
            lines.insert(above, " " * indent + entry + ("," if quote else ""))
        elif verb == "[drop]":
            end = spans[key].line
            while end < len(lines) and _depth(lines[end]) >= spans[key].col:
                end += 1
            if quote and end < len(lines) and end > spans[key].line:
                end += 1  # the closing brace
            del lines[spans[key].line - 1 : end]
        else:
            span = spans[key]
            at, line = span.line - 1, lines[span.line - 1]
            new = line[: span.col - 1] + entry + line[span.col - 1 + span.width :]
            lines[at : at + 1] = [line, new] if verb == "[again]" else [new]
        text = "\n".join(lines) + "\n"
    return text


def _depth(line: str) -> int:
    """Indentation; a blank line counts as inside."""
    return len(line) - len(line.lstrip()) if line.strip() else 1000


def rewrite(folder: Path) -> None:
    """Put what each case now says into its file."""
    for path in sorted(FOLDER.glob("spec_*.test")):
        text = path.read_text()
        heads = text.split("[error]\n")
        out = [heads[0]]
        for case, rest in zip(parse_cases(text), heads[1:], strict=True):
            kept = rest.partition("[case ")
            lead = kept[0].rsplit("\n\n#", 1)[1:]  # a comment before the next case stays
            comment = f"#{lead[0]}" if lead else ""
            out.append(f"{case.run(folder)}\n\n{comment}{kept[1]}{kept[2]}")
        path.write_text("[error]\n".join(out).rstrip("\n") + "\n")


if __name__ == "__main__":
    if os.environ.get("CI"):
        sys.exit("expected texts are not rewritten in CI")
    import tempfile

    with tempfile.TemporaryDirectory() as scratch:
        rewrite(Path(scratch))
