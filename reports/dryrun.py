"""A dry run beside the estimate, as tables."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from profiles.units import GIB
from reports.tables import plain_table

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

__all__ = ["dry_run_report"]

WORDS: Final = {
    "parameters": "weights that passes read",
    "gradients": "gradients",
    "optimizer": "optimizer states, fp32 weights",
    "saved": "activations of a micro-batch",
    "peak": "peak",
}


def dry_run_report(answer: dict[str, Any]) -> list[RenderableType]:
    """Memory and collectives of a rank, found and estimated."""
    first = f"rank {answer['rank']} of {answer['num_ranks']}, stage {answer['stage']}"
    plan = f"the plan says {answer['plan_allocated_bytes'] / GIB:.3f} GiB"
    verdict = "within" if answer["passes"] else "beyond"
    last = f"The estimate is {verdict} its tolerances; with the kernels that it assumes {plan}."
    return [first, "", _memory(answer), "", _collectives(answer), "", last]


def _memory(answer: dict[str, Any]) -> Table:
    table = plain_table("GiB")
    table.add_column("")
    for name in ("dry run", "estimate", "difference", "tolerance"):
        table.add_column(name, justify="right")
    for row in answer["memory"]:
        sizes = [f"{row[name] / GIB:.3f}" for name in ("dry_run_bytes", "estimate_bytes")]
        part = f"{100 * row['difference']:+.2f} %" if row["difference"] else "equal"
        table.add_row(WORDS[row["kind"]], *sizes, part, f"{100 * row['tolerance']:g} %")
    return table


def _collectives(answer: dict[str, Any]) -> Table:
    table = plain_table("Collectives of a step")
    table.add_column("kind")
    table.add_column("axis")
    for name in ("ran", "planned", "bytes", "planned"):
        table.add_column(name, justify="right")
    for row in answer["collectives"]:
        names = ("count", "planned_count", "bytes", "planned_bytes")
        table.add_row(row["kind"], row["axis"], *(f"{row[name]:,}" for name in names))
    return table
