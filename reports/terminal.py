"""The answer on stdout."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Final, NoReturn

from rich.console import Console
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from rich.console import RenderableType

__all__ = ["print_report"]

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
