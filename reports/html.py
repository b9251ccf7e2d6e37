"""Answers as one HTML file that opens offline: text, tables, figures, and the answer itself.

Everything drawn is made of the answer that ``--format json`` prints, which the page carries as
well (``<script id="answer">``), but for the timeline and the layout, which come from the plan.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from planner.sensitivity import sensitivity
from profiles.errors import InputError, Problem
from reports.answers import sensitivity_answer
from reports.comparison import against
from reports.sections import (
    Section,
    assumptions_section,
    choices_section,
    cost_sections,
    decisions_section,
    front_section,
    interval_section,
    layout_section,
    memory_section,
    rivals_section,
    search_section,
    sensitivity_section,
    spend_section,
    tiles,
    time_section,
    timeline_section,
)
from reports.words import verdict

if TYPE_CHECKING:
    from collections.abc import Sequence

    from planner.compare import Comparison
    from planner.plan import Plan

__all__ = ["comparison_page", "plan_page", "require_pages"]


def require_pages() -> None:
    """Raise ``InputError`` where what pages are made with is not installed."""
    try:
        import jinja2  # noqa: F401, PLC0415
        import plotly  # noqa: F401, PLC0415
    except ModuleNotFoundError as error:
        message = f"{error.name} is not installed"
        hint = "pip install 'parplan[report]'"
        raise InputError(
            Problem(where="--html", message=message, expected="plotly and jinja2", hint=hint)
        ) from None


def plan_page(answer: dict[str, Any], plans: Sequence[Plan]) -> str:
    """The page of a plan: ``answer`` is that of ``plan`` or ``estimate``, ``plans`` the plan and
    its runners-up.
    """
    plan = plans[0]
    shifts = sensitivity_answer(sensitivity(plans))
    answer = {**answer, "sensitivity": shifts}
    sections = [
        layout_section(plan),
        memory_section(answer),
        time_section(answer),
        timeline_section(plan),
        *front_section(answer),
        *choices_section(answer),
        *rivals_section(plans),
        sensitivity_section(shifts, plans),
        spend_section(answer),
        *search_section(plan),
        assumptions_section(plan, answer["plan"]),
    ]
    return _page(
        title=f"{plan.inputs.model.name} on {plan.inputs.cluster.name}",
        verdicts=[(verdict(plan), plan.estimate.fits)],
        warnings=answer["advice"],
        tiles=tiles(answer),
        facts=[],
        sections=sections,
        answer=answer,
    )


def comparison_page(answer: dict[str, Any], found: Comparison) -> str:
    """The page of plans side by side; files that were not sound are told first."""
    plans = [plan for _, plan in found.plans]
    contenders = [
        (f"{each.name}: {against(each, found.name)}", each.comparable) for each in found.others
    ]
    sections = [
        decisions_section(found),
        interval_section(answer),
        *cost_sections(answer),
    ]
    for at, (name, plan) in enumerate(found.plans):
        sections.append(layout_section(plan, name=name, key=f"layout-{at}"))
        sections.append(timeline_section(plan, name=name, key=f"timeline-{at}"))
    for at, (name, plan) in enumerate(found.plans):
        part = answer["plans"][at]["plan"]
        sections.append(assumptions_section(plan, part, name=name, key=f"assumptions-{at}"))
    return _page(
        title=" against ".join(dict.fromkeys(plan.inputs.model.name for plan in plans))
        + ", compared",
        verdicts=contenders,
        warnings=[f"not read: {line}" for line in answer["refused"]],
        tiles=[],
        facts=[f"{name}: {verdict(plan)}" for name, plan in found.plans],
        sections=sections,
        answer=answer,
    )


def _page(*, sections: Sequence[Section], answer: dict[str, Any], **parts: Any) -> str:
    """The file. Text is escaped by the template, data here."""
    import jinja2  # noqa: PLC0415 - an extra
    from plotly.offline import get_plotlyjs  # noqa: PLC0415 - an extra

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("reports", "page"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    figures = {each.key: each.figure for each in sections if each.figure is not None}
    return environment.get_template("report.html").render(
        **parts,
        sections=sections,
        plotlyjs=get_plotlyjs(),
        answer=_data(answer),
        figures=_data(figures),
    )


def _data(value: Any) -> str:
    """JSON that may stand inside a script element."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
