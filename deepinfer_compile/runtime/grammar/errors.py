"""What is wrong with a grammar, or with a text under it: it ends one request, never the engine."""

from __future__ import annotations


class GrammarError(Exception):
    """The message names the fault, and its place in the schema where it has one."""

    def __str__(self) -> str:
        return f"so_args: {super().__str__()}"
