"""The accuracy table of ``parplan validate``, and what ``parplan calibrate`` found."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.text import Text

from costmodel.accuracy import summaries
from reports.tables import plain_table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import RenderableType
    from rich.table import Table

    from costmodel.accuracy import Judged, Summary
    from costmodel.validation import Calibrated

__all__ = ["accuracy_answer", "accuracy_report", "calibration_report"]

MOST_ROWS = 150  # beyond it a table of rows helps nobody; --format json has them all
ROW = (
    "id",
    "predicted_step_s",
    "measured_step_s",
    "error",
    "interval_s",
    "predicted_peak_mem_gib",
    "peak_mem_interval_gib",
    "measured_peak_mem_gib",
    "measured_outcome",
    "predicted_fits",
    "fit_probability",
    "calibration",
    "hint",
    "skipped",
)


def accuracy_answer(judged: Sequence[Judged], *, runs: str, notes: Sequence[str]) -> dict[str, Any]:
    """Every row and the summaries as plain data."""
    return {
        "runs": runs,
        "rows": [_row(each) for each in judged],
        "summary": {source: asdict(own) for source, own in summaries(judged).items()},
        "notes": list(notes),
    }


def _row(each: Judged) -> dict[str, Any]:
    values = {
        "id": each.run.id,
        "measured_step_s": each.run.step_time_s,
        "measured_outcome": each.run.outcome,
    }
    return {name: values.get(name, getattr(each, name, None)) for name in ROW}


def accuracy_report(judged: Sequence[Judged], *, runs: str) -> list[RenderableType]:
    """Rows (if they are few), what was skipped and why, and the table by source."""
    parts: list[RenderableType] = [Text(f"runs: {runs}, {len(judged)} rows")]
    if len(judged) <= MOST_ROWS:
        parts += [Text(), _rows_table(judged)]
    hints = [each for each in judged if each.hint is not None]
    parts += [Text(f"hint: {each.run.id}: {each.hint}") for each in hints]
    skipped = [each for each in judged if each.skipped is not None]
    parts += [Text(f"skipped: {each.run.id}: {each.skipped}") for each in skipped]
    return [*parts, Text(), _summary_table(summaries(judged))]


def _rows_table(judged: Sequence[Judged]) -> Table:
    table = plain_table("Runs")
    table.add_column("id", overflow="fold")
    for name in ("measured s", "estimated s", "error %", "interval s", "GiB", "measured GiB"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("fits")
    for each in judged:
        if each.skipped is not None:
            continue
        low, high = each.interval_s or (0.0, 0.0)
        table.add_row(
            each.run.id,
            _number(each.run.step_time_s),
            _number(each.predicted_step_s),
            _percent(each.error),
            f"{low:.4g} to {high:.4g}",
            _number(each.predicted_peak_mem_gib, 3),
            _number(each.measured_peak_mem_gib, 3),
            f"{each.fit_probability:.2f}",
        )
    return table


def _summary_table(found: dict[str, Summary]) -> Table:
    """One line a source."""
    table = plain_table(
        "Accuracy in %: step time (median, P90, bias, in the interval), OOM, memory"
    )
    table.add_column("source", no_wrap=True)
    columns = ("n", "median", "P90", "bias", "inside", "OOM", "rejected")
    for name in (*columns, "memory", "sweeps", "tau", "regret"):
        table.add_column(name, justify="right", no_wrap=True)
    for source, own in found.items():
        table.add_row(
            source,
            str(own.n),
            _percent(own.median),
            _percent(own.p90),
            _percent(own.bias),
            _percent(own.coverage, digits=0),
            _percent(own.oom_accuracy),
            _percent(own.false_rejections),
            _percent(own.memory_median),
            str(own.sweeps or ""),
            "" if own.tau is None else f"{own.tau:.2f}",
            _percent(own.regret_mean),
        )
    return table


def calibration_report(found: Calibrated) -> list[RenderableType]:
    """The efficiencies that were fitted, beside what the runs say of them."""
    table = plain_table("Efficiencies")
    table.add_column("efficiency")
    table.add_column("fitted", justify="right")
    table.add_column("prior's spread left %", justify="right")
    for parameter in found.fit.model.parameters:
        table.add_row(
            parameter.name,
            f"{parameter.value(found.calibration.efficiencies):.4g}",
            _percent(found.fit.left[parameter.name], digits=0),
        )
    errors = sorted(abs(error) for error in found.fit.residuals)
    words = f"{len(errors)} runs, median error {100 * errors[len(errors) // 2]:.1f} % in sample"
    own = found.calibration
    return [Text(f"{own.stack} on {own.device}: {words}; prior {found.prior}"), Text(), table]


def _number(value: float | None, digits: int = 4) -> str:
    return "" if value is None else f"{value:.{digits}g}"


def _percent(value: float | None, digits: int = 1) -> str:
    return "" if value is None else f"{100 * value:.{digits}f}"
