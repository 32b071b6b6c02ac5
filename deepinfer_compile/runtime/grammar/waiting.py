"""Requests with a structure: not scheduled until their grammar is there, then held to it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from deepinfer_compile.runtime.grammar.asked import Structure
from deepinfer_compile.runtime.grammar.constraint import Constraint
from deepinfer_compile.runtime.grammar.errors import GrammarError
from deepinfer_compile.runtime.grammar.pool import GrammarPool, Ticket
from deepinfer_compile.runtime.scheduler import Emitted, Finish, Request


@dataclass(frozen=True)
class _Waiting:
    request: Request
    structure: Structure
    ticket: Ticket


class Structured:
    """The structured requests of one step loop. Without a pool, as in loops that know no text, it
    takes none."""

    def __init__(self, pool: Callable[[], GrammarPool] | None, eos_token_id: int) -> None:
        self._make_pool = pool
        self._pool: GrammarPool | None = None
        self._eos = eos_token_id
        self._waiting: dict[int, _Waiting] = {}
        self._constraints: dict[int, Constraint] = {}

    @property
    def busy(self) -> bool:
        """Some grammar is not there yet."""
        return bool(self._waiting)

    def submit(self, request: Request, structure: Structure) -> None:
        """Ask for the request's grammar."""
        if self._pool is None:
            assert self._make_pool is not None, "a structured request in a loop without grammars"
            self._pool = self._make_pool()
        self._waiting[request.id] = _Waiting(request, structure, self._pool.ask(structure))

    def abort(self, id: int) -> Emitted | None:
        """The end of a request that still waits; None: it is not here."""
        found = self._waiting.pop(id, None)
        return None if found is None else Emitted(id, None, Finish.ABORT)

    def ready(self) -> tuple[list[Request], list[Emitted]]:
        """Requests that may be scheduled from now on, and those that end without a grammar."""
        ready: list[Request] = []
        failed: list[Emitted] = []
        for id, one in tuple(self._waiting.items()):
            assert self._pool is not None
            try:
                matcher = self._pool.answer(one.ticket)
            except GrammarError as fault:
                failed.append(Emitted(id, None, Finish.GRAMMAR, str(fault)))
            else:
                if matcher is None:
                    continue
                self._constraints[id] = Constraint(one.structure, matcher, self._eos)
                ready.append(one.request)
            del self._waiting[id]
        return ready, failed

    def wait(self) -> None:
        """Sleep until some grammar is there, but only a moment."""
        assert self._pool is not None
        self._pool.wait(one.ticket for one in self._waiting.values())

    def fill(self, id: int, words: NDArray[np.int32]) -> bool:
        """Whether a request's next token has a mask, written to `words`. GrammarError: nothing
        may follow."""
        constraint = self._constraints.get(id)
        return constraint is not None and constraint.fill(words)

    def take(self, id: int, token: int) -> str:
        """A request goes on by a token; what is wrong with that, or ""."""
        constraint = self._constraints.get(id)
        try:
            if constraint is None or constraint.take(token):
                return ""
        except GrammarError as fault:
            return str(fault)
        return (
            f"so_args: token {token} is not allowed here: the logits are NaN, or no token would be"
        )

    def forget(self, id: int) -> None:
        """The request has ended."""
        self._constraints.pop(id, None)
