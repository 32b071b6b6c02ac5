"""A step loop in a thread of its own: requests from any thread, pieces through their callbacks.

One request's trouble stays its own: a text that cannot be decoded ends that request with its error.
If a step itself fails, every request ends with that error and nothing more is taken in.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue

from deepinfer_compile.runtime.errors import EngineError, RequestError
from deepinfer_compile.runtime.loop import StepLoop
from deepinfer_compile.runtime.metrics import Metrics
from deepinfer_compile.runtime.reply import Piece, Reply
from deepinfer_compile.runtime.sampling import SamplingParams
from deepinfer_compile.runtime.scheduler import Emitted, Load


@dataclass(eq=False)
class Ticket:
    """A request as its owner knows it. `deliver` is called in the worker's thread with every piece,
    the last one finished, or with an error that ends it. `id` is None until the loop has it."""

    prompt: Sequence[int]
    params: SamplingParams
    priority: int
    reply: Reply
    deliver: Callable[[Piece | Exception], object]
    id: int | None = None
    failure: Exception | None = None

    def watch(self, token: int) -> bool:
        """As `Reply.watch`; an error ends this request instead of the step."""
        try:
            return self.reply.watch(token)
        except Exception as failure:
            self.failure = failure
            return True


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
                command.id = self._loop.submit(
                    command.prompt, command.params, command.watch, command.priority
                )
                self._tickets[command.id] = command
                self._metrics.arrived(command.id, len(command.prompt))
            case _Abort(None):
                for id in self._tickets:
                    self._loop.abort(id)
            case _Abort(Ticket(id=int(id))):
                self._loop.abort(id)

    def _hand_out(self, event: Emitted) -> None:
        ticket = self._tickets[event.id]
        self._metrics.emitted(event)
        if event.finish is not None:
            del self._tickets[event.id]
        try:
            ticket.deliver(ticket.failure or ticket.reply.piece(0, event))
        except Exception as failure:  # its text, or an owner who is gone
            ticket.failure = failure
            self._loop.abort(event.id)

    def _fail(self, failure: Exception) -> None:
        """Everybody hears of it, those too who were about to be taken in."""
        stopped = EngineError(
            "E071",
            f"the engine stopped: {type(failure).__name__}: {failure}",
            help="this is our bug: report it, and load the engine again",
        )
        stopped.__cause__ = failure
        with self._gate:
            self._closed = stopped
            waiting = list(self._tickets.values())
            while not self._commands.empty():
                command = self._commands.get()
                if isinstance(command, Ticket):
                    waiting.append(command)
        for ticket in waiting:
            try:
                ticket.deliver(stopped)
            except Exception:  # its owner is gone
                continue
