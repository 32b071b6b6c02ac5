"""Work for the device, in the order in which it is given: what a CUDA stream is to a GPU.

The host goes on meanwhile. While it launches a step it must not wait for one, or the device would
have nothing to do: that is refused, so that nobody does it by accident.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Generic, TypeVar

from deepinfer_compile.runtime.errors import EngineError

T = TypeVar("T")


class Stream:
    """One thread for all jobs, or none if not `asynchronous`: jobs are then done when they are
    given. After a job that failed none is done: they fail as it did."""

    def __init__(self, *, asynchronous: bool) -> None:
        self._thread = ThreadPoolExecutor(1, "deepinfer-device") if asynchronous else None
        self._launching = False
        self._closed = False
        self._failure: Exception | None = None

    def run(self, job: Callable[[], T]) -> Pending[T]:
        """Do this after all before it. E021: the stream was closed."""
        if self._closed:
            raise EngineError("E021", "the engine is closed")
        if self._thread is not None:
            return Pending(self, self._thread.submit(self._do, job))
        done: Future[T] = Future()
        done.set_result(self._do(job))
        return Pending(self, done)

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

    def _do(self, job: Callable[[], T]) -> T:
        if self._failure is not None:
            raise self._failure
        try:
            return job()
        except Exception as failure:
            self._failure = failure
            raise

    def close(self) -> None:
        """Wait for all that was given; nothing can follow."""
        self._closed = True
        if self._thread is not None:
            self._thread.shutdown()


class Pending(Generic[T]):
    """What a job will have found."""

    def __init__(self, stream: Stream, future: Future[T]) -> None:
        self._stream = stream
        self._future = future

    def result(self) -> T:
        """Wait for it. Raises what the job raised."""
        self._stream.check_may_wait()
        return self._future.result()
