"""What is under way: how far it is, on stderr, and when it should stop."""

from __future__ import annotations

import math
import os
import signal
import sys
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

from reports.words import per_cent, seconds

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType

    from planner.finalists import Finalist

__all__ = [
    "Stop",
    "discard_stdout",
    "profile_progress",
    "progress_on_stderr",
    "sweep_progress",
    "until_interrupt",
]


@contextmanager
def progress_on_stderr() -> Iterator[Callable[[int, Finalist | None, float], None] | None]:
    """How far the search is, on one line that goes away; None where nobody would see it."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console  # noqa: PLC0415 - seldom seen

    with Console(file=sys.stderr).status("searching") as status:

        def tell(visited: int, best: Finalist | None, bound_s: float) -> None:
            found = "none fits yet"
            if best is not None:
                step_s = best.estimate.step_s
                gap = max(0.0, 1 - bound_s / step_s)
                found = f"best {seconds(step_s)}, gap {per_cent(gap)}"
            status.update(f"visited {visited:,}, {found}, bound {seconds(bound_s)}")

        yield tell


@contextmanager
def profile_progress() -> Iterator[Callable[[int, int, str], None]]:
    """A bar with the remaining time on stderr, for ``done``, ``total`` and what is measured now;
    where stderr is no terminal, a line for each tenth.
    """
    if not sys.stderr.isatty():
        yield _tenths()
        return
    from rich.console import Console  # noqa: PLC0415 - seldom seen
    from rich.progress import Progress, TextColumn, TimeRemainingColumn  # noqa: PLC0415

    console = Console(file=sys.stderr)
    columns = (
        *Progress.get_default_columns()[:3],
        TimeRemainingColumn(),
        TextColumn("{task.fields[now]}"),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        bar = progress.add_task("measuring", total=None, now="")

        def tell(done: int, total: int, now: str) -> None:
            progress.update(bar, completed=done, total=total, now=now)

        yield tell


@contextmanager
def sweep_progress(total: int) -> Iterator[Callable[[], None]]:
    """A bar with the remaining time on stderr, one step further at each call; nothing where nobody
    would see it.
    """
    if not sys.stderr.isatty():
        yield lambda: None
        return
    from rich.console import Console  # noqa: PLC0415 - seldom seen
    from rich.progress import (  # noqa: PLC0415
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    columns = (TextColumn("planning"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(file=sys.stderr), transient=True) as progress:
        task = progress.add_task("planning", total=total)
        yield lambda: progress.advance(task)


def _tenths() -> Callable[[int, int, str], None]:
    told = -1

    def tell(done: int, total: int, now: str) -> None:
        nonlocal told
        if 10 * done // max(total, 1) > told:
            told = 10 * done // max(total, 1)
            sys.stderr.write(f"{done} of {total}: {now}\n")
            sys.stderr.flush()

    return tell


class Stop:
    """Whether to stop: Ctrl-C was pressed, or time is up."""

    def __init__(self, limit_s: float | None) -> None:
        """Time runs from now on; None: without end."""
        self.interrupted = False
        self._late_s = math.inf if limit_s is None else time.monotonic() + limit_s

    def __call__(self) -> bool:
        """Ask."""
        return self.interrupted or time.monotonic() >= self._late_s


@contextmanager
def until_interrupt(limit_s: float | None = None) -> Iterator[Stop]:
    """Whether Ctrl-C was pressed, instead of an exception, or ``limit_s`` is over; pressed twice,
    it is one again.
    """
    asked = Stop(limit_s)

    def stop(_signal: int, _frame: FrameType | None) -> None:
        asked.interrupted = True
        signal.signal(signal.SIGINT, before)

    before = signal.signal(signal.SIGINT, stop)
    try:
        yield asked
    finally:
        signal.signal(signal.SIGINT, before)


def discard_stdout() -> None:
    """Let what is still to be written go nowhere, once the reader has gone."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
