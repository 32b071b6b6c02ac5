"""A bar on stderr while a batch runs, when a person is watching."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import TYPE_CHECKING

from deepinfer_compile.runtime.settings import read_settings

if TYPE_CHECKING:
    from rich.progress import Progress as Bar


class Meter:
    """Parts done (`what`) and tokens per second; silent unless wanted and stderr is a terminal."""

    def __init__(self, total: int, wanted: bool, what: str = "prompts") -> None:
        self._done = 0
        self._tokens = 0
        self._begin = time.perf_counter()
        self._bar: Bar | None = None
        if wanted and sys.stderr.isatty():
            self._bar = _bar()
            self._task = self._bar.add_task(what, total=total, rate=0.0)

    def add(self, tokens: int, finished: bool) -> None:
        """Tokens came; `finished`: the last of their part."""
        self._tokens += tokens
        self._done += finished
        if self._bar is not None:
            rate = self._tokens / (time.perf_counter() - self._begin)
            self._bar.update(self._task, completed=self._done, rate=rate)

    def __enter__(self) -> Meter:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()


def _bar() -> Bar:
    from rich.console import Console  # here: a tenth of a second that scripts need not pay
    from rich.progress import Progress, TextColumn

    return Progress(
        *Progress.get_default_columns(),
        TextColumn("{task.fields[rate]:.1f} tokens/s"),
        console=Console(stderr=True, no_color=not read_settings().color),
        transient=True,
    )
