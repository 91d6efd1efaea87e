"""Progress on a terminal as bars with an ETA, elsewhere as one line per step. All of it goes to stderr."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import TYPE_CHECKING

from quantkit.cli.output import visible

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress
    from rich.progress import TaskID

    from quantkit.job.progress import Progress


def stderr_progress() -> Bars | Lines:
    """Bars where stderr is a terminal, lines elsewhere; use as a context."""
    return Bars() if sys.stderr.isatty() else Lines()


class Lines:
    """One line when a step ends, one for each note."""

    def __init__(self) -> None:
        self._step, self._n, self._started = "", 0, 0.0

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        return None

    def start(self, step: str, total: int) -> None:
        """Remember the step; its line comes at its end."""
        self._step, self._n, self._started = step, total, time.monotonic()

    def advance(self, n: int = 1) -> None:
        """Lines do not move."""

    def finish(self) -> None:
        """Write the step's line."""
        self.note(f"{self._step}: done, {self._n} in {time.monotonic() - self._started:.1f} s")

    def note(self, text: str) -> None:
        """Write a line; what comes out of files and off the network cannot steer the terminal."""
        print(visible(text), file=sys.stderr, flush=True)


class Bars:
    """A bar per step, done ones kept, notes above."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

        self._bars: RichProgress = Progress(
            TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
            TextColumn("eta"), TimeRemainingColumn(), console=Console(stderr=True))
        self._task: TaskID | None = None

    def __enter__(self) -> Progress:
        self._bars.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._bars.stop()

    def start(self, step: str, total: int) -> None:
        """Begin a bar."""
        self._task = self._bars.add_task(visible(step), total=total)

    def advance(self, n: int = 1) -> None:
        """Move the bar."""
        if self._task is not None:
            self._bars.advance(self._task, n)

    def finish(self) -> None:
        """Leave the bar as it is."""
        self._task = None

    def note(self, text: str) -> None:
        """Print a line above the bars."""
        self._bars.console.print(visible(text), markup=False, highlight=False)
