"""What to choose: the search, the plan, its file and its explanation.

    inputs = load_inputs("llama3-70b", "16x8xh100-80g")
    planned = plan_training(inputs)
    save_plan(planned.plan, "plan.yaml")

Everything is loaded when first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from planner.advice import advice
    from planner.choices import Restrictions
    from planner.compare import compare_plans, load_sound_plans
    from planner.explain import explain_plan
    from planner.inputs import Inputs, load_inputs
    from planner.launchers import LAUNCHERS
    from planner.manual import ManualLayout, layout_from_degrees
    from planner.native import executed
    from planner.objective import Objective, plan_for
    from planner.plan import Plan, diff_plans, plan_of
    from planner.plandocument import (
        plan_document,
        plan_text,
        save_plan,
    )
    from planner.planfile import json_schema, schema_kinds
    from planner.planning import (
        AfterSearch,
        InterruptedSearchError,
        NothingInTimeError,
        Planned,
        plan_training,
        question_of,
    )
    from planner.planreader import load_plan
    from planner.profiled import with_profiles
    from planner.restrictions import parse_restrictions
    from planner.schedulerun import run_schedule
    from planner.smallest import Smallest, plan_smallest

__all__ = [
    "LAUNCHERS",
    "AfterSearch",
    "Inputs",
    "InterruptedSearchError",
    "ManualLayout",
    "NothingInTimeError",
    "Objective",
    "Plan",
    "Planned",
    "Restrictions",
    "Smallest",
    "advice",
    "compare_plans",
    "diff_plans",
    "executed",
    "explain_plan",
    "json_schema",
    "layout_from_degrees",
    "load_inputs",
    "load_plan",
    "load_sound_plans",
    "parse_restrictions",
    "plan_document",
    "plan_for",
    "plan_of",
    "plan_smallest",
    "plan_text",
    "plan_training",
    "question_of",
    "run_schedule",
    "save_plan",
    "schema_kinds",
    "with_profiles",
]

_MODULES: Final = {
    "LAUNCHERS": "launchers",
    "Inputs": "inputs",
    "InterruptedSearchError": "planning",
    "ManualLayout": "manual",
    "NothingInTimeError": "planning",
    "Objective": "objective",
    "Plan": "plan",
    "Planned": "planning",
    "Restrictions": "choices",
    "AfterSearch": "planning",
    "Smallest": "smallest",
    "advice": "advice",
    "compare_plans": "compare",
    "diff_plans": "plan",
    "executed": "native",
    "explain_plan": "explain",
    "json_schema": "planfile",
    "layout_from_degrees": "manual",
    "load_inputs": "inputs",
    "load_plan": "planreader",
    "load_sound_plans": "compare",
    "parse_restrictions": "restrictions",
    "plan_document": "plandocument",
    "plan_for": "objective",
    "plan_of": "plan",
    "plan_smallest": "smallest",
    "plan_text": "plandocument",
    "plan_training": "planning",
    "question_of": "planning",
    "run_schedule": "schedulerun",
    "save_plan": "plandocument",
    "schema_kinds": "planfile",
    "with_profiles": "profiled",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"planner.{_MODULES[name]}"), name)
