"""A schedule as a picture of characters, and as plain data."""

from __future__ import annotations

from fractions import Fraction
from math import gcd, lcm
from typing import TYPE_CHECKING, Any, Final

from costmodel.schedules import LETTERS
from costmodel.timeline import COMPUTE

if TYPE_CHECKING:
    from rich.console import RenderableType

    from costmodel.timeline import Event, Timeline
    from planner.schedulerun import ScheduleRun

__all__ = ["picture", "schedule_answer", "schedule_report"]

FINEST: Final = 64  # of the shortest unit that durations are told apart by
WIDEST: Final = 400  # slots
IDLE: Final = "."


def schedule_answer(run: ScheduleRun) -> dict[str, Any]:
    """The figures, and every event where there are not too many."""
    shape, schedule = run.shape, run.schedule
    stale = run.stale_updates
    return {
        "schedule": schedule.name,
        "stages": shape.stages,
        "micro_batches": shape.microbatches,
        "chunks": run.chunks_per_device,
        "unit": shape.unit_size if shape.unit or schedule.name == "zeropp" else None,
        "times": dict(zip(("F", "B", "W"), run.times, strict=True)),
        "span": run.span.span_s,
        "makespan": run.span.makespan_s,
        "bubble": run.bubble,
        "peak_in_flight": list(run.peak_in_flight),
        "peak_until_weight": list(run.peak_until_weight),
        "hand_overs": run.handed_over,
        "weight_copies": schedule.copies,
        "gradient_equivalent": schedule.drains,
        "staleness": list(stale),
        "weight_versions": [each + 1 for each in stale],
        "idle": None if run.timeline is None else list(run.timeline.idle_s),
        "events": None if run.timeline is None else _events(run.timeline),
    }


def schedule_report(run: ScheduleRun) -> list[RenderableType]:
    """The picture, then the figures."""
    schedule, shape = run.schedule, run.shape
    lines: list[RenderableType] = [f"{schedule.name}: {schedule.summary}", ""]
    if run.timeline is None:
        lines.append("too long to draw")
    else:
        lines += picture(run.timeline)
    parts = [f"span {run.span.span_s:g}", f"makespan {run.span.makespan_s:g}"]
    parts.append(f"bubble {100 * run.bubble:.1f} %")
    lines += [
        "",
        ", ".join(parts),
        f"micro-batches in flight at most: {_listed(run.peak_in_flight)}",
    ]
    if schedule.splits:
        lines.append(f"until their weight gradients: {_listed(run.peak_until_weight)}")
    lines.append(f"hand-overs: {run.handed_over / shape.microbatches:g} a micro-batch")
    if schedule.copies > 1:
        lines.append(f"copies of the weights: {schedule.copies}")
    if not schedule.drains:
        stale = run.stale_updates
        lines += [
            f"weight updates between forward and backward: {_listed(stale)}",
            f"weight versions kept: {_listed([each + 1 for each in stale])}, or 1 without stashing",
            "NOT equivalent to training on one device: gradients are those of older weights",
        ]
    return lines


def picture(timeline: Timeline) -> list[str]:
    """One line for each device, one cell for each slot of time: F3 is the forward pass of
    micro-batch 3, B its backward (input gradient), W its weight gradient; lower case on every
    second chunk. ``-`` continues a pass, ``.`` is idle.
    """
    passes = [e for e in timeline.events if e.stream == COMPUTE and e.end_s > e.start_s]
    slot = _slot([moment for e in passes for moment in (e.start_s, e.end_s)])
    width = 1 + max(len(str(e.microbatch)) for e in passes)
    slots = min(WIDEST, round(timeline.makespan_s / slot))
    lines = []
    for device in range(len(timeline.idle_s)):
        cells = [IDLE.ljust(width)] * slots
        for event in passes:
            if event.device == device:
                _draw(cells, event, slot, width)
        lines.append(f"{device:>2} " + "".join(cells).rstrip())
    if slots == WIDEST:
        lines.append(f"(the first {WIDEST} slots)")
    return lines


def _draw(cells: list[str], event: Event, slot: float, width: int) -> None:
    letter = LETTERS[event.kind]
    name = f"{letter.lower() if event.chunk % 2 else letter}{event.microbatch}"
    first, stop = round(event.start_s / slot), round(event.end_s / slot)
    for at in range(first, min(stop, len(cells))):
        cells[at] = (name if at == first else "-").ljust(width)


def _slot(moments: list[float]) -> float:
    """The longest time of which all moments are multiples, to one part in ``FINEST``."""
    parts = [Fraction(moment).limit_denominator(FINEST) for moment in moments]
    bottom = lcm(*(part.denominator for part in parts))
    top = gcd(*(int(part * bottom) for part in parts))
    return top / bottom if top else 1.0


def _listed(values: tuple[float, ...] | tuple[int, ...] | list[int]) -> str:
    return ", ".join(f"{value:g}" for value in values)


def _events(timeline: Timeline) -> list[dict[str, Any]]:
    return [
        {
            "device": e.device,
            "stream": e.stream,
            "kind": LETTERS[e.kind],
            "chunk": e.chunk,
            "micro_batch": e.microbatch,
            "start": e.start_s,
            "end": e.end_s,
        }
        for e in timeline.events
    ]
