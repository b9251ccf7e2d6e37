"""The choices of an objective: time against what it counts, and which of them are on the front."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from planner.objective import Objective
from planner.spend import spend_of
from reports.tables import plain_table
from reports.words import duration, energy, layout_words, money, seconds

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import RenderableType

    from planner.objective import Choice
    from planner.spend import Spend

__all__ = ["choices_answer", "choices_report"]

COLUMNS = {  # title, what is counted and how it is said
    Objective.COST: ("Time against cost", "a step", money),
    Objective.ENERGY: ("Time against energy", "a step", energy),
    Objective.TIME_TO_TARGET: ("Time to the target", "to target", duration),
}


def choices_answer(objective: Objective, choices: Sequence[Choice]) -> dict[str, Any]:
    """Every choice, the best first. ``value``: price or kWh of a step, or seconds to the target."""
    return {
        "objective": {
            "name": objective.value,
            "choices": [
                {
                    "gpus": each.gpus,
                    "global_batch": each.global_batch,
                    "value": each.value,
                    "step_s": each.step_s,
                    **asdict(spend_of(each.planned.plan)),
                    "on_front": each.on_front,
                }
                for each in choices
            ],
        }
    }


def choices_report(objective: Objective, choices: Sequence[Choice]) -> list[RenderableType]:
    """One line a choice, fastest step first; the front is what no other choice beats in both."""
    title, counted, words = COLUMNS[objective]
    table = plain_table(title)
    for name in ("GPUs", "global batch", "step", counted, "a Mtoken"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("")
    table.add_column("layout", overflow="fold")
    for each in sorted(choices, key=lambda choice: choice.step_s):
        plan = each.planned.plan
        marks = ["chosen"] * (each is choices[0]) + ["front"] * each.on_front
        table.add_row(
            f"{each.gpus:,}",
            f"{each.global_batch:,}",
            seconds(each.step_s),
            words(each.value),
            _of_tokens(objective, spend_of(plan)),
            ", ".join(marks),
            layout_words(plan.layout),
        )
    return [table]


def _of_tokens(objective: Objective, spend: Spend) -> str:
    """What a million tokens cost, in energy where that is the objective."""
    if objective is Objective.ENERGY:
        kwh = spend.kwh_per_million_tokens
        return "" if kwh is None else energy(kwh)
    price = spend.price_per_million_tokens
    return "" if price is None else money(price)
