"""Progress on stderr for work that takes longer than two seconds; silent before that, and when stderr is no terminal."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Any

_PATIENCE_S = 2.0


class Progress:
    """`with Progress("planning") as p: p.update("measuring ops", 3, 40)`; shows itself only when it has something to say."""

    def __init__(self, title: str, *, enabled: bool = True) -> None:
        self._title, self._enabled = title, enabled and sys.stderr.isatty()
        self._started = time.perf_counter()
        self._bar: Any = None
        self._task: Any = None

    def __enter__(self) -> Progress:
        return self

    def update(self, phase: str, done: int = 0, total: int = 0) -> None:
        if not self._enabled or (self._bar is None and time.perf_counter() - self._started < _PATIENCE_S):
            return
        if self._bar is None:
            self._open()
        self._bar.update(self._task, description=f"{self._title}: {phase}", completed=done, total=total or None)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.stop()

    def _open(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as Bar

        columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
        self._bar = Bar(*columns, console=Console(stderr=True), transient=True)
        self._task = self._bar.add_task(self._title, total=None)
        self._bar.start()
