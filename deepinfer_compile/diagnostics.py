"""Spans, diagnostics and the one exception a user's mistake becomes.

A code's first digit is the stage that found the problem, and decides the exit status
(design.md section 11):

    E0xx command line   E1xx spec          -> 2
    E2xx plan or target E3xx toolchain     -> 3
    E4xx checkpoint or engine              -> 4
    E5xx disk or network                   -> 5
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

_EXIT_BY_STAGE = {"0": 2, "1": 2, "2": 3, "3": 3, "4": 4, "5": 5}


@dataclass(frozen=True, order=True)
class Span:
    """A place in a spec: `file` as the user named it, 1-based `line` and `col`, `width` columns.

    `source` is the text of the line, kept so that a caret can be drawn without the file.
    """

    file: str
    line: int
    col: int
    key: str = ""
    width: int = 1
    source: str = ""

    def __str__(self) -> str:
        place = f"{self.file}:{self.line}"
        return f"{place} {self.key}" if self.key else place


@dataclass(frozen=True)
class Diagnostic:
    """One problem: what was found, what was expected (`message`), and what to do (`help`).

    `where` names a place that has no span: a file, a tensor, a setting.
    """

    code: str
    message: str
    span: Span | None = None
    where: str = ""
    notes: tuple[str, ...] = ()
    help: str = ""

    def render(self) -> str:
        """The text a user reads, with the source line and a caret where there is a span."""
        out = [f"error[{self.code}]: {self.message}"]
        margin = ""
        if self.span is not None:
            number = str(self.span.line)
            margin = " " * len(number)
            out.append(f"{margin} --> {self.span.file}:{self.span.line}:{self.span.col}")
            if self.span.source:
                caret = " " * (self.span.col - 1) + "^" * max(1, self.span.width)
                out += [f"{margin} |", f"{number} | {self.span.source}", f"{margin} | {caret}"]
        elif self.where:
            out.append(f" --> {self.where}")
        out += [f"{margin} = {note}" for note in self.notes]
        if self.help:
            out.append(f"{margin} = help: {self.help}")
        return "\n".join(out)

    def to_json(self) -> dict[str, object]:
        """The same facts for a program; absent facts are left out."""
        span = self.span
        place = (
            {"file": span.file, "line": span.line, "col": span.col, "key": span.key} if span else {}
        )
        facts: dict[str, object] = {
            "code": self.code,
            "message": self.message,
            "span": place,
            "where": self.where,
            "notes": list(self.notes),
            "help": self.help,
        }
        return {name: value for name, value in facts.items() if value}


class CompileError(Exception):
    """All problems of one kind, found together; `exit_code` follows from the first code's stage."""

    def __init__(self, diagnostics: Iterable[Diagnostic]) -> None:
        self.diagnostics = tuple(diagnostics)
        assert self.diagnostics, "a CompileError carries at least one diagnostic"
        super().__init__("\n\n".join(d.render() for d in self.diagnostics))

    @property
    def exit_code(self) -> int:
        return _EXIT_BY_STAGE[self.diagnostics[0].code[1]]


def error(
    code: str,
    message: str,
    *,
    span: Span | None = None,
    where: str = "",
    notes: Iterable[str] = (),
    help: str = "",
) -> CompileError:
    """A `CompileError` of a single diagnostic."""
    return CompileError([Diagnostic(code, message, span, where, tuple(notes), help)])
