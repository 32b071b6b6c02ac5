"""What every damaged input must stay within: a code for each refusal, seconds, bytes."""

from __future__ import annotations

import contextlib
import resource
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

SECONDS = 20  # of a core, that a case may take
MEMORY = 2 << 30  # bytes of address space that a case may add


class Overtime(BaseException):
    """Not an Exception: nothing under test may catch it."""


def counts() -> list[object]:
    """The numbers of one kind's cases: a quarter of 500 in CI, of 10,000 in the long run."""
    return [
        pytest.param(range(125), id="125"),
        pytest.param(range(125, 2500), id="2375", marks=pytest.mark.slow),
    ]


@contextlib.contextmanager
def bounded(case: str, *typed: type[Exception]) -> Iterator[None]:
    """Swallows errors of a `typed` class, which have a code; anything else fails the test."""

    def late(signum: int, frame: object) -> None:
        raise Overtime

    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    in_use = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = signal.signal(signal.SIGPROF, late)
    resource.setrlimit(resource.RLIMIT_AS, (in_use + MEMORY, hard))
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    try:
        yield
    except typed:
        pass
    except Overtime:
        pytest.fail(f"{case} took more than {SECONDS} s of a core")
    except Exception as crash:
        raise AssertionError(f"{case} raised {type(crash).__name__}: {crash}") from crash
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def listing(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))
