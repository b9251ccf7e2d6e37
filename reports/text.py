"""Answers as text: the verdict first, then tables."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.text import Text

from planner.advice import advice
from planner.explain import rival_of
from planner.spend import spend_of
from profiles.units import GIB
from reports.facts import human_facts
from reports.tables import catalog_table, facts_table, memory_table, split_table, stage_table
from reports.words import (
    CAUSES,
    KINDS,
    gib,
    layout_words,
    per_cent,
    seconds,
    shift_words,
    spend_words,
    training_words,
    verdict,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import RenderableType

    from planner.explain import BubbleBinding, Explanation, Rival, ScheduleBinding
    from planner.plan import Certificate, Plan
    from planner.planning import Planned
    from planner.sensitivity import Lever
    from planner.smallest import Smallest
    from profiles.catalog import CatalogEntry

__all__ = [
    "by_cause",
    "catalog_report",
    "differences",
    "estimate_report",
    "explain_report",
    "facts_report",
    "plan_report",
    "search_report",
    "smallest_report",
]

Report = list["RenderableType"]
LITTLE = 0.05 * GIB
UNSAID = ("num_microbatches", "stage_layers", "recompute")


def plan_report(planned: Planned) -> Report:
    """The best plan, the next best ones, and what the search showed."""
    plan = planned.plan
    rivals = [rival_of(plan, other) for other in planned.runners_up]
    return [
        *estimate_report(plan, assumptions=False),
        *_rivals(rivals),
        *search_report(plan),
        *_assumptions(plan),
    ]


def smallest_report(smallest: Smallest) -> Report:
    """How many GPUs are needed, and why not fewer."""
    used = smallest.planned.plan.layout.mesh.num_ranks
    idle = f", of which this plan uses {used:,}" if used < smallest.num_gpus else ""
    report: Report = [_title(f"{smallest.num_gpus:,} GPUs are needed{idle}")]
    if smallest.smaller is not None:
        report.append(f"{smallest.smaller:,} are too few: {smallest.lacking}")
    return [*report, ""]


def estimate_report(plan: Plan, *, assumptions: bool = True) -> Report:
    """What one layout costs."""
    report: Report = [
        _headline(plan),
        *_advice(plan),
        "",
        stage_table(plan),
        _three_totals(plan),
        split_table(plan),
        *_spend(plan),
    ]
    return [*report, *_assumptions(plan)] if assumptions else report


def _spend(plan: Plan) -> Report:
    """What a step costs, where price or power are known."""
    words = spend_words(spend_of(plan))
    return [f"Cost: {words}\n"] if words else []


def explain_report(explanation: Explanation) -> Report:
    """Where time and memory go, what binds, and why the next best plans lost."""
    plan, time, memory = explanation.plan, explanation.time, explanation.memory
    free = memory.limit_bytes - memory.device_bytes
    room = f"{gib(free)} are left" if free >= 0 else f"{gib(-free)} too much"
    if 0 <= free < LITTLE:
        room = "it is full"
    binding = [
        (
            f"Time: beside compute, most goes to {CAUSES[time.cause]}, {seconds(time.seconds)} or "
            f"{per_cent(time.part)} of the step."
        ),
        (
            f"Memory: stage {memory.stage} is fullest, {gib(memory.device_bytes)} of "
            f"{gib(memory.usable_bytes)} ({per_cent(memory.part)}); most is "
            f"{KINDS[memory.kind]}, {gib(memory.kind_bytes)}. Up to {gib(memory.limit_bytes)} fit "
            f"with probability {plan.min_fit:g}: {room}."
        ),
    ]
    return [
        _headline(plan),
        *_advice(plan),
        "",
        split_table(plan),
        memory_table(plan),
        _three_totals(plan),
        _title("What binds"),
        *binding,
        *_schedule(explanation.schedule),
        *_bubble(explanation.bubble, explanation.plan.layout.num_stages),
        "",
        *_levers(explanation.levers),
        *_rivals(list(explanation.rivals), causes=True),
        *_sensitivity(explanation),
        *search_report(plan),
        *_assumptions(plan),
    ]


def _schedule(own: ScheduleBinding | None) -> Report:
    """What the schedule does for the plan that 1F1B would not."""
    if own is None:
        return []
    told = (
        f"Schedule: {own.name} holds up to {own.in_flight:g} micro-batches on a stage and waits "
        f"{per_cent(own.idle)} of the step; 1f1b in its place would hold up to "
        f"{own.usual_in_flight:g}, wait {per_cent(own.usual_idle)}, and take "
        f"{gib(own.usual_bytes)} of {gib(own.usable_bytes)}."
    )
    return [told]


def _bubble(own: BubbleBinding | None, stages: int) -> Report:
    """Too few micro-batches, and how many would do."""
    if own is None:
        return []
    told = (
        f"Bubble: {own.microbatches} micro-batches a replica do not fill {stages} stages, which "
        f"wait {per_cent(own.idle)} of the step; accumulating {own.cure_microbatches} (global "
        f"batch {own.cure_global_batch:,}) would leave {per_cent(own.cure_idle)}."
    )
    return [told]


def _levers(found: Sequence[Lever]) -> Report:
    """What would make the plan faster, as tried."""
    report: Report = [_title("What would make it faster, tried with the same degrees")]
    for each in found:
        how = ", by another layout" if each.relayout else ""
        report.append(f"{per_cent(each.faster)}: {each.change}{how}")
    return [*report, "" if found else "nothing that was tried\n"]


def _sensitivity(explanation: Explanation) -> Report:
    """Whether another of the plans shown would win if inputs were a little other."""
    if not explanation.rivals:
        return []
    plans = (explanation.plan, *(rival.plan for rival in explanation.rivals))
    report: Report = [_title("Would another of these win?")]
    for each in explanation.shifts:
        if each.changes_choice:
            winner = (
                "none of them fits" if each.best is None else layout_words(plans[each.best].layout)
            )
            report.append(f"with {shift_words(each)}: {winner}")
    if len(report) == 1:
        report.append("Not with bandwidth, efficiency or memory lower or higher by 10 %.")
    return [*report, ""]


def facts_report(facts: dict[str, Any]) -> Report:
    """Facts as a table of names and values in human units."""
    return [facts_table(human_facts(facts))]


def catalog_report(entries: list[CatalogEntry]) -> Report:
    """The entries of a shelf, one a line."""
    return [catalog_table(entries)]


def _three_totals(plan: Plan) -> str:
    """What tensors take, what the allocator takes, and what the device shows as used."""
    own = plan.estimate
    return (
        f"Fullest stage: {gib(own.allocated_bytes)} allocated, {gib(own.reserved_bytes)} reserved, "
        f"{gib(own.peak_mem_bytes)} on the device\n"
    )


def _headline(plan: Plan) -> Text:
    style = "bold" if plan.estimate.fits else "bold red"
    return Text(verdict(plan), style=style)


def _advice(plan: Plan) -> Report:
    """What would make a plan fit that does not."""
    return [f"- {line}" for line in advice(plan)]


def _title(text: str) -> Text:
    return Text(text, style="bold")


def _rivals(rivals: list[Rival], *, causes: bool = False) -> Report:
    if not rivals:
        return []
    report: Report = [_title("Next best")]
    for rival in rivals:
        part = rival.slower_s / (rival.plan.estimate.step_s - rival.slower_s)
        sign = "slower" if rival.slower_s >= 0 else "FASTER"
        report.append(
            f"{seconds(abs(rival.slower_s))} ({per_cent(abs(part))}) {sign}: "
            f"{layout_words(rival.plan.layout)}"
        )
        report.append(f"  {', '.join(differences(rival))}")
        if causes:
            report.append(f"  {by_cause(rival)}")
    return [*report, ""]


def differences(rival: Rival) -> list[str]:
    """What a rival decides differently, in words."""
    said = [str(each) for each in rival.differences if each.choice not in UNSAID]
    unsaid = {each.choice for each in rival.differences}
    return said + [f"another {word}" for key, word in _OTHER.items() if key in unsaid]


_OTHER = {"stage_layers": "cut", "recompute": "recomputation"}


def by_cause(rival: Rival) -> str:
    """What it loses and what it gains, the largest first."""
    shown = sorted(rival.by_cause_s.items(), key=lambda item: -abs(item[1]))
    lost = [f"+{seconds(value)} {CAUSES[cause]}" for cause, value in shown if value > _NOTICED]
    won = [f"-{seconds(-value)} {CAUSES[cause]}" for cause, value in shown if value < -_NOTICED]
    return f"loses {', '.join(lost) or 'nothing'}; gains {', '.join(won) or 'nothing'}"


_NOTICED = 1e-4


def search_report(plan: Plan) -> Report:
    """What was searched, and what that shows."""
    facts = plan.search
    if facts is None:
        return []
    pruned = ", ".join(f"{count:,} by {cause}" for cause, count in sorted(facts.pruned.items()))
    refused = ", ".join(f"{count:,} {rule}" for rule, count in sorted(facts.refused.items()))
    proof = "shown to be the fastest" if facts.proven else "not proven to be the fastest"
    report: Report = [
        _title("Search"),
        f"{facts.candidates:,} candidates for launcher {plan.launcher}{_restricted(plan)}",
        f"pruned: {pruned or 'none'}",
    ]
    if refused:
        report.append(f"left out by rule: {refused}")
    if not facts.complete:
        report.append("STOPPED EARLY: the best plan so far")
    if facts.equal_degrees_s is None:
        report.append(
            f"no layout of this space is faster than {seconds(facts.bound_s)}, the least bound of "
            f"all candidates; the plan is within {per_cent(facts.gap)} of it, {proof}"
        )
    else:
        report.append(
            f"of layouts whose layers have equal degrees none is faster than "
            f"{seconds(facts.bound_s)} and the best takes {seconds(facts.equal_degrees_s)}; the "
            f"mix is {per_cent(1 - plan.estimate.step_s / facts.equal_degrees_s)} faster"
        )
    return [*report, *_certificate(facts.certificate), ""]


def _certificate(own: Certificate | None) -> Report:
    """What the integer programme says of the best candidate."""
    if own is None:
        return []
    told = (
        f"{own.solver} finds no assignment of the best candidate with a closed form below "
        f"{seconds(own.bound_s)}; the solver's own is within {own.gap:.1e} of it"
    )
    return [told, *([f"note: {own.note}"] if own.note else [])]


def _restricted(plan: Plan) -> str:
    assert plan.search is not None
    own = plan.search.restrictions
    said = [f"{name}={','.join(sorted(values))}" for name, values in sorted(own.fixed.items())]
    said += [f"{name}<={most}" for name, most in sorted(own.at_most.items())]
    said += [f"{name}!={','.join(sorted(values))}" for name, values in sorted(own.excluded.items())]
    said.append("tp across nodes" if own.tp_across_nodes else "tp inside a node")
    return f" ({', '.join(said)})"


def _assumptions(plan: Plan) -> Report:
    own = plan.estimate
    return [
        _title("Assumptions"),
        training_words(plan),
        f"calibration {own.calibration} (knowledge: {own.knowledge})",
        *(f"note: {note}" for note in plan.notes),
    ]
