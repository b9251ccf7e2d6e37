"""Plans side by side: what they decide differently first, then what that costs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.text import Text

from planner.explain import memory_kinds, seconds_by_cause
from profiles.units import GIB
from reports.answers import estimate_answer
from reports.run import run_report
from reports.tables import plain_table
from reports.words import CAUSES, KINDS, per_cent, verdict

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import RenderableType
    from rich.table import Table

    from planner.compare import Comparison, Contender
    from planner.measuredrun import RunOfPlan
    from planner.plan import Plan

__all__ = ["against", "comparison_answer", "comparison_report", "decisions"]

ROUNDING = 1e-9  # what additions leave behind
CHOICES = {"model": "model", "global_batch": "batch", "seq_len": "sequence length"}


def comparison_answer(
    found: Comparison, refused: Sequence[str] = (), runs: Sequence[RunOfPlan] = ()
) -> dict[str, Any]:
    """Every plan with its estimate, the others against the first, its runs, and the files that were
    not sound. ``slower`` is a part of the first one's time for the same tokens.
    """
    return {
        "plans": [{"name": name, **estimate_answer(plan)} for name, plan in found.plans],
        "others": [_contender(each) for each in found.others],
        "runs": [
            {
                "name": each.name,
                "same_plan": each.same_plan,
                "slower": each.slower,
                "inside": each.inside,
                "measured": each.record["measured"],
            }
            for each in runs
        ],
        "refused": list(refused),
    }


def _contender(each: Contender) -> dict[str, Any]:
    return {
        "name": each.name,
        "comparable": each.comparable,
        "other_work": list(each.other_work),
        "other_basis": list(each.other_basis),
        "slower": each.slower,
        "within_uncertainty": each.within_uncertainty,
        "differences": [
            {"choice": own.choice, "first": own.left, "this": own.right} for own in each.differences
        ],
        "slower_by_cause_s": each.by_cause_s,
        "more_by_kind_bytes": each.by_kind_bytes,
    }


def comparison_report(found: Comparison, runs: Sequence[RunOfPlan] = ()) -> list[RenderableType]:
    """How each stands against the first, verdicts, decisions, seconds by cause, memory by kind."""
    plans = found.plans
    measured: list[RenderableType] = []
    for run in runs:
        measured += [Text(f"{run.name}: {_of_run(run)}", style="bold"), *run_report(run.record), ""]
    if not found.others and runs:
        return [f"{found.name}: {verdict(found.plan)}", *measured]
    return [
        *(Text(f"{each.name}: {against(each, found.name)}", style="bold") for each in found.others),
        *(f"{name}: {verdict(plan)}" for name, plan in plans),
        "",
        _decision_table(found),
        _seconds_table(plans),
        _memory_table(plans),
        *measured,
    ]


def _of_run(run: RunOfPlan) -> str:
    """How a run stands against the plan's estimate."""
    if not run.same_plan:
        return "NOT COMPARABLE, a run of another model, batch or layout"
    pace = f"{per_cent(abs(run.slower))} {'slower' if run.slower > 0 else 'faster'}"
    return f"{pace} than estimated, {'inside' if run.inside else 'OUTSIDE'} the interval"


def against(each: Contender, first: str) -> str:
    """How a plan stands against the first one, in words."""
    if not each.comparable:
        told = ", ".join(CHOICES.get(name, name) for name in (*each.other_work, *each.other_basis))
        words = f"NOT COMPARABLE with {first}, other {told}"
        return words if "model" in each.other_work else f"{words}; per token {_pace(each)}"
    unsure = ", within uncertainty" if each.within_uncertainty else ", beyond uncertainty"
    return f"{_pace(each)} than {first}{unsure}"


def _pace(each: Contender) -> str:
    if each.slower == 0:
        return "no slower"
    return f"{per_cent(abs(each.slower))} {'slower' if each.slower > 0 else 'faster'}"


def decisions(found: Comparison) -> list[tuple[str, list[str]]]:
    """Every choice in which a plan differs from the first, with its value in each plan."""
    rows: dict[str, list[str]] = {}
    count = len(found.plans)
    for at, each in enumerate(found.others, start=1):
        for own in each.differences:
            rows.setdefault(own.choice, [own.left] * count)[at] = own.right
    return list(rows.items())


def _decision_table(found: Comparison) -> Table | str:
    rows = decisions(found)
    if not found.others or not rows:
        return "No decision differs.\n" if found.others else ""
    table = plain_table("Decisions that differ")
    table.add_column("choice", no_wrap=True)
    for name, _ in found.plans:
        table.add_column(name, overflow="fold")
    for choice, values in rows:
        table.add_row(choice, *values)
    return table


def _seconds_table(plans: Sequence[tuple[str, Plan]]) -> Table:
    splits = [seconds_by_cause(plan.estimate.split) for _, plan in plans]
    rows = {
        CAUSES[cause]: [own[cause] for own in splits]
        for cause in CAUSES
        if any(own[cause] for own in splits)
    }
    rows["step"] = [plan.estimate.step_s for _, plan in plans]
    return _numbers("Seconds of a step, by cause (of the busiest stage)", plans, rows, ".4g")


def _memory_table(plans: Sequence[tuple[str, Plan]]) -> Table:
    fullest = [
        max(plan.estimate.stages, key=lambda stage: stage.memory.device_bytes) for _, plan in plans
    ]
    kinds = [memory_kinds(stage.memory) for stage in fullest]
    rows = {words: [own[kind] / GIB for own in kinds] for kind, words in KINDS.items()}
    rows["total"] = [stage.memory.device_bytes / GIB for stage in fullest]
    return _numbers("Memory by kind (of the fullest stage), GiB", plans, rows, ".1f")


def _numbers(
    title: str, plans: Sequence[tuple[str, Plan]], rows: dict[str, list[float]], form: str
) -> Table:
    """One column a plan; how the others differ from the first stands behind each number."""
    table = plain_table(title)
    table.add_column("")
    for name, _ in plans:
        table.add_column(name, justify="right")
    for name, (first, *others) in rows.items():
        beside = (f"{own:{form}} ({_signed(own - first, form)})" for own in others)
        table.add_row(name, f"{first:{form}}", *beside)
    return table


def _signed(difference: float, form: str) -> str:
    if abs(difference) < ROUNDING:
        difference = 0.0
    return f"{difference:+{'.3g' if form.endswith('g') else form}}"
