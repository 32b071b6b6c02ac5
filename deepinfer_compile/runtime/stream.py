"""Work for the device, in the order in which it is given: what a CUDA stream is to a GPU.

The host goes on meanwhile. While it launches a step it must not wait for one, or the device would
have nothing to do: that is refused, so that nobody does it by accident.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Generic, TypeVar
from weakref import finalize

from deepinfer_compile.runtime.errors import EngineError

T = TypeVar("T")


class Stream:
    """One thread for all jobs, or none if not `asynchronous`: jobs are then done when they are
    given. After a job that failed none is done: they fail as it did."""

    def __init__(self, *, asynchronous: bool) -> None:
        self._launching = False
        self._closed = False
        self._failure: BaseException | None = None
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        if asynchronous:  # a daemon: a program may end without having closed it
            self._thread = threading.Thread(
                target=_serve, args=(self._jobs,), name="deepinfer-device", daemon=True
            )
            self._thread.start()
            self._end = finalize(self, self._jobs.put, None)

    def run(self, job: Callable[[], T]) -> Pending[T]:
        """Do this after all before it. E021: the stream was closed."""
        if self._closed:
            raise EngineError("E021", "the engine is closed")
        pending = Pending[T](self)
        if self._thread is None:
            self._do(job, pending.future)
        else:
            self._jobs.put(lambda: self._do(job, pending.future))
        return pending

    @contextmanager
    def launching(self) -> Iterator[None]:
        """In here, no result can be waited for."""
        self._launching = True
        try:
            yield
        finally:
            self._launching = False

    def check_may_wait(self) -> None:
        if self._launching:
            raise RuntimeError("the host waits for the device while it launches a step")

    def close(self) -> None:
        """Wait for all that was given; nothing can follow."""
        self._closed = True
        if self._thread is not None:
            self._end()
            self._thread.join()

    def _do(self, job: Callable[[], T], future: Future[T]) -> None:
        try:
            if self._failure is not None:
                raise self._failure
            future.set_result(job())
        except BaseException as failure:
            self._failure = failure
            future.set_exception(failure)


class Pending(Generic[T]):
    """What a job will have found."""

    def __init__(self, stream: Stream) -> None:
        self.future: Future[T] = Future()
        self._stream = stream

    def result(self) -> T:
        """Wait for it. Raises what the job raised."""
        self._stream.check_may_wait()
        return self.future.result()


def _serve(jobs: SimpleQueue[Callable[[], None] | None]) -> None:
    """Knows no stream, so that one that nobody closes can go, and this with it."""
    while (job := jobs.get()) is not None:
        job()
        del job  # or the newest would live until the next comes
