"""The sections of a report page: each a title, sentences, and a figure, a table or a grid."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from planner.explain import rival_of
from planner.spend import Spend
from profiles.units import GIB
from reports.comparison import decisions
from reports.figures import (
    choices_figure,
    front_figure,
    interval_figure,
    memory_figure,
    time_figure,
)
from reports.layoutgrid import layout_grid
from reports.text import by_cause, differences, search_report
from reports.timelinefigure import timeline_figure
from reports.words import (
    energy,
    gib,
    layout_words,
    money,
    per_cent,
    recompute_words,
    seconds,
    training_words,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from planner.compare import Comparison
    from planner.plan import Plan
    from reports.figures import Figure
    from reports.layoutgrid import Grid

__all__ = [
    "Section",
    "Table",
    "assumptions_section",
    "choices_section",
    "cost_sections",
    "decisions_section",
    "front_section",
    "interval_section",
    "layout_section",
    "memory_section",
    "rivals_section",
    "search_section",
    "sensitivity_section",
    "spend_section",
    "tiles",
    "time_section",
    "timeline_section",
]

Answer = dict[str, Any]
SHORT_HASH: Final = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Head and rows as text; ``left`` columns are words, the others numbers."""

    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    left: tuple[int, ...] = (0,)


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """One part of a page. ``items`` are heads with lines below them."""

    key: str
    title: str
    notes: tuple[str, ...] = ()
    figure: Figure | None = None
    table: Table | None = None
    grid: Grid | None = None
    items: tuple[tuple[str, tuple[str, ...]], ...] = ()

    @property
    def legend(self) -> list[tuple[str, str]]:
        """Names and colours of what the figure shows."""
        traces = [] if self.figure is None else self.figure["data"]
        return [
            (each["name"], (each.get("marker") or each["line"])["color"])
            for each in traces
            if "name" in each
        ]


def tiles(answer: Answer) -> list[tuple[str, str, str]]:
    """The figures at the top: name, value, and what to know about it."""
    low, high = answer["interval_s"]
    spend = Spend(**answer["spend"])
    fits = f"fits with probability {answer['fit_probability']:.2f}"
    found = [
        ("step", seconds(answer["step_s"]), f"{seconds(low)} to {seconds(high)}"),
        (
            "tokens/s/GPU",
            f"{answer['tokens_per_s_per_gpu']:,.0f}",
            f"MFU {per_cent(answer['mfu'])}",
        ),
        (
            "memory",
            gib(answer["peak_mem_bytes"]),
            f"of {gib(answer['usable_bytes'])}, {fits}",
        ),
        ("GPUs", f"{answer['layout']['used_gpus']:,}", f"knowledge: {answer['knowledge']}"),
    ]
    if spend.price_per_step is not None and spend.price_per_million_tokens is not None:
        per = f"{money(spend.price_per_million_tokens)} a million tokens"
        found.append(("price of a step", money(spend.price_per_step), per))
    return found


def layout_section(plan: Plan, *, name: str = "", key: str = "layout") -> Section:
    """The stages with their ranks and strategies, and what each takes."""
    rows = tuple(
        (
            str(stage.stage),
            recompute_words(plan.layout, stage.stage),
            f"{stage.split.total_s - stage.split.bubble_s:.4g}",
            f"{stage.split.bubble_s:.3g}",
            f"{stage.memory.device_bytes / GIB:.1f}",
        )
        for stage in plan.estimate.stages
    )
    head = ("stage", "recomputed", "busy s", "waiting s", "memory GiB")
    return Section(
        key=key,
        title=_titled("Layout", name),
        notes=(layout_words(plan.layout),),
        grid=layout_grid(plan),
        table=Table(head=head, rows=rows, left=(0, 1)),
    )


def _titled(title: str, name: str) -> str:
    return f"{title}: {name}" if name else title


def memory_section(answer: Answer) -> Section:
    """Memory of each stage by kind, and the device's limit."""
    stages = answer["stages"]
    figure = memory_figure(
        [str(stage["stage"]) for stage in stages],
        [stage["memory"] for stage in stages],
        what="stage",
        usable=[answer["usable_bytes"]],
    )
    low, high = answer["peak_mem_interval_bytes"]
    note = (
        f"At the peak of a steady step. Fullest stage: {gib(answer['allocated_bytes'])} allocated, "
        f"{gib(answer['reserved_bytes'])} reserved, {gib(answer['peak_mem_bytes'])} on the device "
        f"({gib(low)} to {gib(high)})."
    )
    return Section(key="memory", title="Memory by stage", notes=(note,), figure=figure)


def time_section(answer: Answer) -> Section:
    """Seconds of each stage by cause."""
    stages = answer["stages"]
    figure = time_figure(
        [str(stage["stage"]) for stage in stages],
        [stage["split"] for stage in stages],
        what="stage",
    )
    note = "What each stage does during the step; communication is what nothing hides."
    return Section(key="time", title="Time by stage", notes=(note,), figure=figure)


def timeline_section(plan: Plan, *, name: str = "", key: str = "timeline") -> Section:
    """The pipeline's timeline."""
    figure, told = timeline_figure(plan)
    return Section(key=key, title=_titled("Timeline", name), notes=(told,), figure=figure)


def front_section(answer: Answer) -> Iterator[Section]:
    """Time against memory of what the search simulated; none for a layout nobody searched for."""
    if answer.get("tried"):
        note = (
            f"The {len(answer['tried']):,} layouts that the search simulated and that fit, of "
            f"{answer['search']['candidates']:,} candidates."
        )
        yield Section(
            key="front", title="Time against memory", notes=(note,), figure=front_figure(answer)
        )


def choices_section(answer: Answer) -> Iterator[Section]:
    """The choices of an objective other than the step's time."""
    if "objective" in answer:
        own = answer["objective"]
        note = "Each point is planned for itself; no choice beats those on the front in both."
        title = f"Time against {own['name']}".replace("time-to-target", "time to the target")
        yield Section(key="choices", title=title, notes=(note,), figure=choices_figure(own))


def rivals_section(plans: Sequence[Plan]) -> Iterator[Section]:
    """The next best plans and why each lost."""
    rivals = [rival_of(plans[0], other) for other in plans[1:]]
    if not rivals:
        return
    items = []
    for each in rivals:
        slower, part = seconds(each.slower_s), per_cent(each.slower_s / plans[0].estimate.step_s)
        head = f"{slower} ({part}) slower: {layout_words(each.plan.layout)}"
        items.append((head, (f"differs in {', '.join(differences(each))}", by_cause(each))))
    yield Section(key="rivals", title="Next best", items=tuple(items))


def sensitivity_section(shifts: Sequence[Answer], plans: Sequence[Plan]) -> Section:
    """The plans under inputs that are a little other than stated."""
    names = ("chosen", *(f"next best {at}" for at in range(1, len(plans))))
    rows = tuple(
        (
            f"{each['what']} {each['factor'] - 1:+.0%}",
            *(
                seconds(step) + (" (laid out anew)" if anew else "" if fits else " (does not fit)")
                for step, fits, anew in zip(
                    each["step_s"], each["fits"], each["relayout"], strict=True
                )
            ),
            _winner(each, names),
        )
        for each in shifts
    )
    note = (
        "These plans, estimated again; one that does not fit any more is laid out anew with its "
        "degrees. Efficiency is that of GEMMs and attention."
    )
    head = ("", *names, "best of these")
    return Section(
        key="sensitivity",
        title="If inputs were a little other",
        notes=(note,),
        table=Table(head=head, rows=rows, left=(0, len(head) - 1)),
    )


def _winner(shift: Answer, names: Sequence[str]) -> str:
    if shift["best"] is None:
        return "none fits"
    return f"{names[shift['best']]}{' (changes)' if shift['changes_choice'] else ''}"


def spend_section(answer: Answer) -> Section:
    """Price and energy of a step and of a million tokens."""
    own = Spend(**answer["spend"])
    rows = []
    if own.price_per_step is not None and own.price_per_million_tokens is not None:
        rows.append(("price", money(own.price_per_step), money(own.price_per_million_tokens)))
    if own.kwh_per_step is not None and own.kwh_per_million_tokens is not None:
        rows.append(("energy", energy(own.kwh_per_step), energy(own.kwh_per_million_tokens)))
    notes = []
    if own.price_per_step is None:
        notes.append(
            "The cluster states no price: nodes of a cluster YAML have price_per_gpu_hour."
        )
    if own.kwh_per_step is not None:
        notes.append("Energy is that of the GPUs at their power limit, without hosts and cooling.")
    head = ("", "a step", "a million tokens")
    table = Table(head=head, rows=tuple(rows)) if rows else None
    return Section(key="spend", title="Cost and energy", notes=tuple(notes), table=table)


def search_section(plan: Plan) -> Iterator[Section]:
    """What the search showed."""
    _, *lines = (str(line) for line in search_report(plan)) if plan.search else [""]
    if lines:
        notes = tuple(line for line in lines if line)
        yield Section(key="search", title="Search", notes=notes)


def assumptions_section(
    plan: Plan, document: Answer, *, name: str = "", key: str = "assumptions"
) -> Section:
    """What the numbers rest on, with the hashes of the inputs."""
    own = plan.estimate
    notes = (
        training_words(plan),
        f"calibration {own.calibration} (knowledge: {own.knowledge})",
        *plan.notes,
    )
    rows = tuple(
        (part, document[part]["name"], document[part]["sha256"][:SHORT_HASH])
        for part in ("model", "cluster", "calibration")
    )
    table = Table(head=("input", "name", "sha256"), rows=rows, left=(0, 1, 2))
    return Section(key=key, title=_titled("Assumptions", name), notes=notes, table=table)


def decisions_section(found: Comparison) -> Section:
    """The choices that differ, a column for each plan."""
    rows = tuple((choice, *values) for choice, values in decisions(found))
    head = ("choice", *(name for name, _ in found.plans))
    notes = () if rows or not found.others else ("No decision differs.",)
    table = Table(head=head, rows=rows, left=tuple(range(len(head)))) if rows else None
    return Section(key="decisions", title="Decisions that differ", notes=notes, table=table)


def interval_section(answer: Answer) -> Section:
    """Steps with their intervals."""
    note = "Where intervals overlap, the difference is within uncertainty."
    return Section(
        key="intervals", title="Steps", notes=(note,), figure=interval_figure(answer["plans"])
    )


def cost_sections(answer: Answer) -> Iterator[Section]:
    """Seconds by cause and memory by kind, a bar for each plan."""
    plans = answer["plans"]
    names = [each["name"] for each in plans]
    yield Section(
        key="time",
        title="Time by cause",
        notes=("Of the busiest stage of each plan.",),
        figure=time_figure(names, [each["split"] for each in plans], what="plan"),
    )
    fullest = [max(each["stages"], key=lambda own: int(own["device_bytes"])) for each in plans]
    yield Section(
        key="memory",
        title="Memory by kind",
        notes=("Of the fullest stage of each plan.",),
        figure=memory_figure(
            names,
            [each["memory"] for each in fullest],
            what="plan",
            usable=[each["usable_bytes"] for each in plans],
        ),
    )
