"""What a refusal looks like at run time: the compiler's look, without the compiler.

    error[E452]: the engine's files are not those its manifest names
      --> nano.engine
       = kernels/engine.so: sha256 differs
       = help: copy the engine again, or recompile it

A code's first digit is the stage, and decides the exit status (design.md section 11):

    E0xx command line or request   -> 2      E4xx engine or checkpoint  -> 4
    E2xx target, device, memory    -> 3      E5xx disk                  -> 5
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from pathlib import Path

_EXIT_BY_STAGE = {"0": 2, "1": 2, "2": 3, "3": 3, "4": 4, "5": 5}


class EngineError(Exception):
    """One refusal; `notes` hold every problem of its kind, found together."""

    def __init__(
        self,
        code: str,
        message: str,
        *,
        where: str = "",
        notes: Iterable[str] = (),
        help: str = "",
    ) -> None:
        self.code = code
        self.message = message
        self.where = where
        self.notes = tuple(notes)
        self.help = help
        super().__init__(self.render())

    @property
    def exit_code(self) -> int:
        return _EXIT_BY_STAGE[self.code[1]]

    def render(self) -> str:
        """The text a user reads."""
        out = [f"error[{self.code}]: {self.message}"]
        if self.where:
            out.append(f"  --> {self.where}")
        out += [f"   = {note}" for note in self.notes]
        if self.help:
            out.append(f"   = help: {self.help}")
        return "\n".join(out)

    def to_json(self) -> dict[str, object]:
        """The same facts for a program; absent facts are left out."""
        facts: dict[str, object] = {
            "code": self.code,
            "message": self.message,
            "where": self.where,
            "notes": list(self.notes),
            "help": self.help,
        }
        return {name: value for name, value in facts.items() if value}


class RequestError(EngineError, ValueError):
    """A prompt, sampling parameter or setting that cannot be served as asked."""


class NotYet(EngineError, NotImplementedError):
    """A name DeepInfer has and this runtime does not serve yet: refused, never ignored."""


class NotReady(EngineError):
    """The oracle's answer is no."""

    @property
    def exit_code(self) -> int:
        return 1


class Stopped(EngineError):
    """A step failed: what the engine's memory holds since is nobody's answer."""

    def __init__(self, failure: Exception) -> None:
        super().__init__(
            "E071",
            f"the engine stopped: {type(failure).__name__}: {failure}",
            help="this is our bug: report it, and load the engine again",
        )
        self.__cause__ = failure


class NotCompiled(EngineError):
    """A checkpoint was given where an engine is needed."""

    def __init__(self, folder: Path) -> None:
        out = f"{folder.name or 'model'}-cpu.engine"
        command = (
            f"deepinfer-compile --from-hf {shlex.quote(str(folder))} --target cpu "
            f"-o {shlex.quote(out)}"
        )
        super().__init__(
            "E456",
            "this is a checkpoint; the runtime serves compiled engines",
            where=str(folder),
            help=f"compile it once, then load the engine: {command}",
        )
        self.command = command
