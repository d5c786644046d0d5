"""Progress on stderr: bars on a terminal; anywhere else one plain line a phase, or nothing."""

import contextlib
import sys
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TransferSpeedColumn,
)

from kettle.cli.render import say

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kettle.chaos.attempts import Progress as PhaseProgress


class PlainLines:
    """One line a phase, for files and pipes."""

    def phase(self, title: str, *, total_steps: int | None = None) -> None:  # noqa: ARG002 - part of the interface, a line has no bar
        """Say what begins."""
        say(title)

    def step(self, step: int) -> None:
        """Say nothing: a log isn't for single steps."""


class PhaseBars:
    """One bar a phase; finished ones stay above as the story so far."""

    def __init__(self, bars: Progress) -> None:
        self._bars = bars
        self._current: TaskID | None = None

    def phase(self, title: str, *, total_steps: int | None = None) -> None:
        """Stop the bar of the phase before, and begin another below it."""
        if self._current is not None:
            self._bars.stop_task(self._current)
        self._current = self._bars.add_task(title, total=total_steps, reached="")

    def step(self, step: int) -> None:
        """Move the bar to this step."""
        if self._current is not None:
            total = self._bars.tasks[self._current].total
            reached = f"{step}/{total:.0f}" if total else str(step)
            self._bars.update(self._current, completed=step, reached=reached)


@contextlib.contextmanager
def phases() -> "Iterator[PhaseProgress]":
    """Progress in the form that stderr can show."""
    if not sys.stderr.isatty():
        yield PlainLines()
        return
    bars = Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=20),
        TextColumn("{task.fields[reached]}"),
        TimeElapsedColumn(),
        console=Console(stderr=True, highlight=False),
    )
    with bars:
        yield PhaseBars(bars)


@contextlib.contextmanager
def transfer(title: str, *, size_bytes: int) -> "Iterator[Callable[[int], None]]":
    """A bar for bytes that are read or written, to be told how many came; gone at the end."""
    if not sys.stderr.isatty():
        yield lambda _count: None
        return
    bars = Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=20),
        DownloadColumn(),
        TransferSpeedColumn(),
        console=Console(stderr=True, highlight=False),
        transient=True,
    )
    with bars:
        task = bars.add_task(title, total=size_bytes)
        yield lambda count: bars.advance(task, count)
