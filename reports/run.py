"""A run beside its estimate: what was measured, what was expected, which collectives ran."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from profiles.units import GIB
from reports.tables import plain_table
from reports.words import seconds

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

__all__ = ["run_report"]

TOTALS: Final = {
    "step_s": "step",
    "tokens_per_s_per_gpu": "tokens/s of a rank",
    "mfu": "MFU",
    "allocated_bytes": "allocated memory",
    "reserved_bytes": "reserved memory",
    "peak_mem_bytes": "memory of the device",
}
CURVE: Final = 8  # rows of a run's loss, about
ON_CPU: Final = "memory of the process"


def run_report(run: dict[str, Any]) -> list[RenderableType]:
    """The record of a run (``run.json``) as tables."""
    own, software = run["measured"], run["software"]
    steps, before = len(run["steps"]), run.get("first_step", 0)
    losses = f"loss {own['first_loss']:.4f} -> {own['last_loss']:.4f}"
    words = f"steps {before + 1} to {steps}" if before else f"{steps} steps"
    ranks = len(run["ranks"])
    where = f"{ranks} rank" if ranks == 1 else f"{ranks} ranks"
    first = f"{words} on {where}, {software['device']}, {losses}"
    curve: list[RenderableType] = ["", _curve(run["steps"])] if before else []
    return [first, *curve, "", _totals(run), "", _stages(run), "", _traffic(run)]


def _curve(steps: list[dict[str, Any]]) -> Table:
    """The loss of a run that was started more than once, at some of its steps and at all where it
    came to another plan.
    """
    table = plain_table("Loss of the run")
    for name in ("step", "loss", "learning rate"):
        table.add_column(name, justify="right")
    table.add_column("plan")
    every = -(-len(steps) // CURVE)
    last = len(steps) - 1
    for number, own in enumerate(steps):
        moves = number < last and steps[number + 1]["plan"] != own["plan"]
        moved = number > 0 and steps[number - 1]["plan"] != own["plan"]
        if number % every == 0 or number == last or moves or moved:
            cells = (str(own["step"] + 1), f"{own['loss']:.3f}", f"{own['lr']:.3g}")
            table.add_row(*cells, own["plan"])
    return table


def _totals(run: dict[str, Any]) -> Table:
    table = plain_table("Measured beside the estimate")
    table.add_column("")
    for name in ("measured", "estimate", "measured / estimate"):
        table.add_column(name, justify="right")
    for key, words in TOTALS.items():
        measured, expected = run["measured"][key], run["estimate"][key]
        if measured is None:
            continue
        on_cpu = key == "peak_mem_bytes" and run["software"]["device"] == "cpu"
        ratio = f"{measured / expected:.2f}" if expected else ""
        name = ON_CPU if on_cpu else words
        table.add_row(name, _shown(key, measured), _shown(key, expected), ratio)
    return table


def _shown(key: str, value: float) -> str:
    if key == "step_s":
        return seconds(value)
    if key.endswith("bytes"):
        return f"{value / GIB:.3f} GiB"
    return f"{100 * value:.1f} %" if key == "mfu" else f"{value:,.0f}"


def _stages(run: dict[str, Any]) -> Table:
    table = plain_table("Stages: seconds of a step in passes, and in the rest")
    table.add_column("stage", justify="right")
    for name in ("passes", "estimate", "rest", "estimate"):
        table.add_column(name, justify="right")
    for stage in run["stages"]:
        cells = [
            f"{stage[source][part]:.4g}"
            for part in ("passes_s", "rest_s")
            for source in ("measured", "estimate")
        ]
        table.add_row(str(stage["stage"]), *cells)
    return table


def _traffic(run: dict[str, Any]) -> Table:
    """Collectives of one step of rank 0 beside those that the plan means."""
    table = plain_table("Collectives of a step, rank 0")
    table.add_column("kind")
    table.add_column("axis")
    for name in ("ran", "planned", "bytes", "planned"):
        table.add_column(name, justify="right")
    first = run["ranks"][0]
    ran, planned = (
        {(row["kind"], row["axis"]): row for row in first[name]} for name in ("ran", "planned")
    )
    none = {"count": 0, "bytes": 0}
    for key in sorted(ran | planned):
        a, b = ran.get(key, none), planned.get(key, none)
        counts = [f"{row[name]:,}" for name in ("count", "bytes") for row in (a, b)]
        table.add_row(*key, *counts)
    return table
