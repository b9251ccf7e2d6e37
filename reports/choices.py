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

__all__ = ["choices_answer", "choices_report"]

TITLES = {
    Objective.COST: ("Time against cost", "a step"),
    Objective.ENERGY: ("Time against energy", "a step"),
    Objective.TIME_TO_TARGET: ("Time to the target", "to target"),
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
    title, counted = TITLES[objective]
    table = plain_table(title)
    for name in ("GPUs", "global batch", "step", counted, "a Mtoken"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("")
    table.add_column("layout", overflow="fold")
    for each in sorted(choices, key=lambda choice: choice.step_s):
        plan = each.planned.plan
        spend = spend_of(plan)
        of_tokens = {
            Objective.COST: (spend.price_per_million_tokens, money),
            Objective.ENERGY: (spend.kwh_per_million_tokens, energy),
        }
        words = {Objective.COST: money, Objective.ENERGY: energy}.get(objective, duration)
        per_tokens, word = of_tokens.get(objective, (spend.price_per_million_tokens, money))
        marks = ["chosen"] * (each is choices[0]) + ["front"] * each.on_front
        table.add_row(
            f"{each.gpus:,}",
            f"{each.global_batch:,}",
            seconds(each.step_s),
            words(each.value),
            "" if per_tokens is None else word(per_tokens),
            ", ".join(marks),
            layout_words(plan.layout),
        )
    return [table]
