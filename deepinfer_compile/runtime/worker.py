"""A step loop in a thread of its own: requests from any thread, pieces through their callbacks.

One request's trouble stays its own: a grammar that cannot begin, a text that cannot be decoded or
an owner who does not listen ends that request. If a step itself fails, every request ends with that
error, the log has it once, and nothing more is taken in.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue

from deepinfer_compile.runtime.errors import EngineError, RequestError, Stopped
from deepinfer_compile.runtime.loop import StepLoop
from deepinfer_compile.runtime.metrics import Metrics
from deepinfer_compile.runtime.reply import Piece, Reply
from deepinfer_compile.runtime.sampling import SamplingParams
from deepinfer_compile.runtime.scheduler import Emitted, Load

_LOG = logging.getLogger(__name__)


@dataclass(eq=False)
class Ticket:
    """A request as its owner knows it. `deliver` is called in the worker's thread with every piece,
    the last one finished, or with an error that ends it. `index` says which answer of the prompt it
    is. `id` is None until the loop has it."""

    prompt: Sequence[int]
    params: SamplingParams
    priority: int
    reply: Reply
    deliver: Callable[[Piece | Exception], object]
    index: int
    id: int | None = None


@dataclass(frozen=True)
class _Abort:
    """Of one request, or of all."""

    ticket: Ticket | None


@dataclass(frozen=True)
class _WakeUp:
    """There is something to look at."""


class Worker:
    """Runs steps while there are requests. `submit` and `abort` return at once."""

    def __init__(self, loop: StepLoop, metrics: Metrics) -> None:
        self._loop = loop
        self._metrics = metrics
        self._tickets: dict[int, Ticket] = {}
        self._commands: SimpleQueue[Ticket | _Abort | _WakeUp] = SimpleQueue()
        self._gate = threading.Lock()  # between taking a request in and deciding not to
        self._closed: EngineError | None = None
        self._thread = threading.Thread(target=self._serve, name="deepinfer-steps", daemon=True)
        self._thread.start()

    def submit(self, ticket: Ticket) -> None:
        """Queue a request whose prompt and parameters were checked. E071, E072 when nothing is
        taken in any more."""
        with self._gate:
            if self._closed is not None:
                raise self._closed
            self._commands.put(ticket)

    def abort(self, ticket: Ticket) -> None:
        """End a request, if it has not ended."""
        self._commands.put(_Abort(ticket))

    @property
    def load(self) -> Load:
        return self._loop.load

    def close(self, *, drain: bool) -> None:
        """Take nothing more in and wait: until all requests are done, or aborted if not `drain`."""
        with self._gate:
            message = "the engine is closing: it takes no more requests"
            self._closed = self._closed or RequestError("E072", message)
        self._commands.put(_WakeUp() if drain else _Abort(None))
        self._thread.join()

    def _serve(self) -> None:
        try:
            while self._loop.busy or self._closed is None or not self._commands.empty():
                self._obey()
                for event in self._loop.step():
                    self._hand_out(event)
        except Exception as failure:
            self._fail(failure)

    def _obey(self) -> None:
        """All commands there are; without requests, wait for one."""
        try:
            self._do(self._commands.get(block=not self._loop.busy))
            while True:
                self._do(self._commands.get_nowait())
        except Empty:
            pass

    def _do(self, command: Ticket | _Abort | _WakeUp) -> None:
        match command:
            case Ticket():
                self._take_in(command)
            case _Abort(None):
                for id in self._tickets:
                    self._loop.abort(id)
            case _Abort(Ticket(id=int(id))):
                self._loop.abort(id)

    def _take_in(self, ticket: Ticket) -> None:
        try:
            ticket.id = self._loop.submit(
                ticket.prompt, ticket.params, ticket.reply.watch, ticket.priority
            )
        except Exception as failure:  # most likely its grammar's
            _tell(ticket, failure)
            return
        self._tickets[ticket.id] = ticket
        self._metrics.arrived(ticket.id, len(ticket.prompt))

    def _hand_out(self, event: Emitted) -> None:
        ticket = self._tickets[event.id]
        self._metrics.emitted(event)
        if event.finish is not None:
            del self._tickets[event.id]
        try:
            piece: Piece | Exception = ticket.reply.piece(ticket.index, event)
        except Exception as failure:  # its text's
            piece = failure
        heard = _tell(ticket, piece)
        if event.finish is None and (isinstance(piece, Exception) or not heard):
            self._loop.abort(event.id)

    def _fail(self, failure: Exception) -> None:
        """Everybody hears of it, those too who were about to be taken in; the log once."""
        stopped = Stopped(failure)
        _LOG.critical(stopped.render(), exc_info=failure)
        with self._gate:
            self._closed = stopped
            waiting = list(self._tickets.values())
            while not self._commands.empty():
                command = self._commands.get()
                if isinstance(command, Ticket):
                    waiting.append(command)
        for ticket in waiting:
            _tell(ticket, stopped)


def _tell(ticket: Ticket, piece: Piece | Exception) -> bool:
    """False when the owner is gone."""
    try:
        ticket.deliver(piece)
    except Exception:
        return False
    return True
