"""Tables of a plan: stages, seconds by cause, bytes by kind; of facts and of the catalogue."""

from __future__ import annotations

from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, Final, TypeAlias

from rich import box
from rich.table import Table

from planner.explain import memory_kinds, seconds_by_cause
from planner.plan import stage_layers
from planner.plandocument import compact_ranks
from profiles.units import GIB
from reports.words import CAUSES, KINDS, recompute_words

if TYPE_CHECKING:
    from planner.plan import Plan
    from profiles.catalog import CatalogEntry

__all__ = [
    "catalog_table",
    "facts_table",
    "memory_table",
    "plain_table",
    "split_table",
    "stage_table",
]

MANY: Final = 3  # stages
Row: TypeAlias = tuple[tuple[str, ...], tuple[str, ...]]  # place and figures


def stage_table(plan: Plan) -> Table:
    """Each stage: who, what, how long, how full."""
    table = plain_table("Layout")
    table.add_column("stage", justify="right")
    table.add_column("ranks", overflow="fold")
    table.add_column("layers", overflow="fold")
    table.add_column("recomputed", overflow="fold")
    table.add_column("busy s", justify="right", no_wrap=True)
    table.add_column("waiting s", justify="right", no_wrap=True)
    table.add_column("memory GiB", justify="right", no_wrap=True)
    rows: list[Row] = []
    for stage in plan.estimate.stages:
        waiting = stage.split.bubble_s
        place = (
            str(stage.stage),
            compact_ranks(plan.layout.mesh, stage.stage),
            stage_layers(plan.inputs.model, plan.layout, stage.stage).replace(",", ", "),
        )
        figures = (
            recompute_words(plan.layout, stage.stage),
            f"{stage.split.total_s - waiting:.4g}",
            f"{waiting:.3g}",
            f"{stage.memory.device_bytes / GIB:.1f}",
        )
        rows.append((place, figures))
    _add_rows(table, rows)
    return table


def _add_rows(table: Table, rows: list[Row]) -> None:
    """Places with their figures; three and more in succession with the same ones share a line."""
    for figures, alike in groupby(rows, key=itemgetter(1)):
        places = [place for place, _ in alike]
        if len(places) < MANY:
            for place in places:
                table.add_row(*place, *figures)
            continue
        ends = zip(places[0], places[-1], strict=True)
        table.add_row(*(f"{first} to {last}" for first, last in ends), *figures)


def split_table(plan: Plan) -> Table:
    """Seconds of the busiest stage's step by cause, nothing that takes none."""
    table = plain_table("Step of the busiest stage")
    table.add_column("cause")
    table.add_column("s", justify="right")
    table.add_column("%", justify="right")
    total = plan.estimate.step_s
    for cause, value in seconds_by_cause(plan.estimate.split).items():
        if value:
            table.add_row(CAUSES[cause], f"{value:.4g}", f"{100 * value / total:.1f}")
    table.add_row("step", f"{total:.4g}", "100.0")
    return table


def memory_table(plan: Plan) -> Table:
    """GiB at the peak of each stage by kind."""
    table = plain_table("Memory at the peak of a steady step (from the second on), GiB")
    table.add_column("stage", justify="right")
    for kind in KINDS.values():
        table.add_column(kind, justify="right")
    table.add_column("total", justify="right")
    rows: list[Row] = []
    for stage in plan.estimate.stages:
        kinds = memory_kinds(stage.memory)
        sizes = [*(kinds[kind] for kind in KINDS), stage.memory.device_bytes]
        rows.append(((str(stage.stage),), tuple(f"{size / GIB:.1f}" for size in sizes)))
    _add_rows(table, rows)
    return table


def facts_table(rows: list[tuple[str, str]]) -> Table:
    """Names and values."""
    table = plain_table(None)
    table.show_header = False
    table.add_column("fact", no_wrap=True)
    table.add_column("value", overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table


def catalog_table(entries: list[CatalogEntry]) -> Table:
    """One line an entry, with the columns of its shelf."""
    table = plain_table(None)
    table.add_column("name", no_wrap=True)
    for column in entries[0].facts:
        numeric = any(not isinstance(entry.facts[column], str) for entry in entries)
        table.add_column(column, justify="right" if numeric else "left", overflow="fold")
    table.add_column("also called", overflow="fold")
    for entry in entries:
        values = (f"{v:,}" if isinstance(v, int) else str(v) for v in entry.facts.values())
        table.add_row(entry.name, *values, ", ".join(entry.aliases))
    return table


def plain_table(title: str | None) -> Table:
    """A table in the one style of all answers."""
    return Table(
        title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False
    )
