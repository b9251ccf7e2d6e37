"""Where text goes: the answer to stdout, the progress of a profile to stderr."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final, NoReturn

from rich.console import Console
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from rich.console import RenderableType

__all__ = ["print_report", "profile_progress"]

PIPED_WIDTH: Final = 120


class _Console(Console):
    """A console that leaves a reader who has gone to the caller."""

    def on_broken_pipe(self) -> NoReturn:
        """Raise what rich caught: it would end the process with 1, which means "no" here."""
        raise BrokenPipeError


def print_report(report: list[RenderableType]) -> None:
    """Print to stdout. Lines are not broken; tables keep to the terminal, or to 120 columns."""
    width = None if sys.stdout.isatty() else PIPED_WIDTH
    console = _Console(file=sys.stdout, width=width, highlight=False, markup=False, emoji=False)
    for part in report:
        if isinstance(part, Table):
            console.print(part)
        else:
            console.print(part if isinstance(part, Text) else str(part), soft_wrap=True)


@contextmanager
def profile_progress() -> Iterator[Callable[[int, int, str], None]]:
    """A bar with the remaining time on stderr, for ``done``, ``total`` and what is measured now;
    where stderr is no terminal, a line for each tenth.
    """
    if not sys.stderr.isatty():
        yield _tenths()
        return
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


def _tenths() -> Callable[[int, int, str], None]:
    told = -1

    def tell(done: int, total: int, now: str) -> None:
        nonlocal told
        if 10 * done // max(total, 1) > told:
            told = 10 * done // max(total, 1)
            sys.stderr.write(f"{done} of {total}: {now}\n")
            sys.stderr.flush()

    return tell
