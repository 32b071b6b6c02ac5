"""Grammars compile beside the step loop: few threads, each schema once, nobody waits for long."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from deepinfer_compile.runtime.grammar.asked import SchemaType, Structure
from deepinfer_compile.runtime.grammar.errors import GrammarError
from deepinfer_compile.runtime.grammar.library import Matcher

_THREADS = 4  # DeepInfer's
_SECONDS = 20.0  # DeepInfer's
_NAP = 0.01  # seconds
_KEPT = 256  # schemas that are remembered

Compile = Callable[[SchemaType, str], Matcher]


@dataclass(frozen=True)
class Ticket:
    """A grammar that was asked for, and when its request stops waiting for it."""

    future: Future[Matcher]
    deadline: float


class GrammarPool:
    """Compiled grammars of one engine. A schema that fails is remembered like one that does not.

    Compiling cannot be interrupted: what takes too long keeps its thread until it is done, while
    its requests have long ended; there are never more threads than `threads`.
    """

    def __init__(
        self,
        compile: Compile,
        *,
        threads: int = _THREADS,
        seconds: float = _SECONDS,
        kept: int = _KEPT,
    ) -> None:
        self._compile = compile
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix="grammar")
        self._seconds = seconds
        self._kept = kept
        self._known: OrderedDict[tuple[SchemaType, str], Future[Matcher]] = OrderedDict()

    def ask(self, structure: Structure) -> Ticket:
        """Compile a grammar, or take the one that is there."""
        key = (structure.type, structure.schema)
        if key not in self._known:
            self._known[key] = self._executor.submit(self._compile, *key)
        self._known.move_to_end(key)
        while len(self._known) > self._kept:
            self._known.popitem(last=False)
        return Ticket(self._known[key], time.monotonic() + self._seconds)

    def answer(self, ticket: Ticket) -> Matcher | None:
        """A matcher of the caller's own, or None: not yet. GrammarError: there will be none."""
        if ticket.future.done():
            failure = ticket.future.exception()
            if failure is None:
                return ticket.future.result().copy()
            if isinstance(failure, GrammarError):
                raise GrammarError(*failure.args)
            raise GrammarError(f"{type(failure).__name__}: {failure}") from failure  # the library's
        if time.monotonic() >= ticket.deadline:
            raise GrammarError(f"the grammar did not compile within {self._seconds:g} s")
        return None

    def wait(self, tickets: Iterable[Ticket]) -> None:
        """Sleep until one of these may have an answer, or a moment: the caller has other duties."""
        waiting = {ticket.future for ticket in tickets}
        futures.wait(waiting, timeout=_NAP, return_when=futures.FIRST_COMPLETED)

    def close(self) -> None:
        """Begin nothing more; a thread ends with what it compiles."""
        self._executor.shutdown(wait=False, cancel_futures=True)
