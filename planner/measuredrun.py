"""The run of a plan beside its estimate: what ``parplan launch`` measured."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from profiles.errors import InputError, Problem
from profiles.fingerprint import fingerprint
from profiles.runs import read_runs

if TYPE_CHECKING:
    from planner.plan import Plan

__all__ = ["RUN_KIND", "RunOfPlan", "group_of", "is_run", "run_of_plan"]

RECORD: Final = "run.json"
RUN_KIND: Final = "parplan-run"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOfPlan:
    """A run's record. ``same_plan``: of the plan's model, batch and layout. ``slower``: measured
    step over the estimate, less one. ``inside``: it lies in the estimate's interval.
    """

    name: str
    record: dict[str, Any]
    same_plan: bool
    slower: float
    inside: bool

    def passes(self, tolerance: float) -> bool:
        """Whether it is a run of the plan and slower by no more than ``tolerance``, as 0.02."""
        return self.same_plan and self.slower <= tolerance


def group_of(plan: Plan) -> str:
    """What runs that may be ranked against one another have in common: model and batch."""
    training = plan.inputs.training
    return f"{fingerprint(plan.inputs.model)[:8]}-{training.seq_len}-{training.global_batch}"


def is_run(path: str) -> bool:
    """Whether a path is the record of a run, or a folder that has one (a plan may be JSON too)."""
    file = Path(path)
    if file.is_dir():
        return (file / RECORD).is_file()
    if file.suffix != ".json":
        return False
    try:
        document = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False  # whoever reads it as a plan says what is wrong
    return isinstance(document, dict) and document.get("kind") == RUN_KIND


def run_of_plan(plan: Plan, path: str) -> RunOfPlan:
    """A run beside the plan. Raises ``InputError`` where the file is no record of a run."""
    file = Path(path) / RECORD if Path(path).is_dir() else Path(path)
    (row,) = read_runs(file).runs
    record: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    measured = record.get("measured")
    if not isinstance(measured, dict) or not isinstance(measured.get("step_s"), int | float):
        raise InputError(Problem(where=str(file), message="has no measured step"))
    step_s = float(measured["step_s"])
    low, high = plan.estimate.interval_s
    return RunOfPlan(
        name=path,
        record=record,
        same_plan=fingerprint(plan.layout)[:12] in row.id and row.rank_group == group_of(plan),
        slower=step_s / plan.estimate.step_s - 1,
        inside=low <= step_s <= high,
    )
