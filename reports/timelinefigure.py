"""The pipeline's timeline of a plan as a figure: one line a stage, one bar a pass."""

from __future__ import annotations

from dataclasses import replace
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final

from costmodel.estimate import LayoutCost
from costmodel.schedules import BACKWARD, FORWARD, INPUT, WEIGHT
from costmodel.steptimeline import passes_of_step
from costmodel.timeline import COMPUTE, TENSOR
from reports.words import seconds

if TYPE_CHECKING:
    from collections.abc import Iterable

    from costmodel.timeline import Event
    from planner.plan import Plan
    from reports.figures import Figure

__all__ = ["timeline_figure"]

MOST_PLAYED: Final = 10_000  # passes of a step; a longer one is played with fewer micro-batches
MOST_DRAWN: Final = 6_000  # bars that a browser draws and zooms at once
LEGIBLE: Final = 90  # bars a stage that can be told apart
ROUNDS: Final = 2  # micro-batches that a long step keeps, in stages
DIGITS: Final = 6
MICRO: Final = 1e-6
PASSES: Final = {
    (COMPUTE, FORWARD): ("forward", "#0072B2"),
    (COMPUTE, BACKWARD): ("backward", "#E69F00"),
    (COMPUTE, INPUT): ("input gradients", "#E69F00"),
    (COMPUTE, WEIGHT): ("weight gradients", "#009E73"),
    TENSOR: ("traffic of passes (tp, cp, ep, ZeRO)", "#CC79A7"),
    "gradients": ("gradient reduction", "#882255"),
    "optimizer": ("optimizer", "#44AA99"),
}
Bar = tuple[int, float, float, str]  # stage, start and duration in seconds, what it is


def timeline_figure(plan: Plan) -> tuple[Figure, str]:
    """The figure, and a sentence on what of the step it shows."""
    layout, shown = _short_enough(plan)
    cost = LayoutCost(plan.inputs.context, layout)
    timeline = passes_of_step(cost)
    bars: dict[Any, list[Bar]] = {key: [] for key in PASSES}
    events = sorted((e for e in timeline.events if _is_drawn(e)), key=attrgetter("start_s"))
    for event in events[:MOST_DRAWN]:
        key = TENSOR if event.stream == TENSOR else (COMPUTE, event.kind)
        bars[key].append((event.device, event.start_s, event.end_s - event.start_s, event.name))
    told = f"One step{shown}, without host time once a step and jitter."
    if len(events) > MOST_DRAWN:
        until = seconds(events[MOST_DRAWN].start_s)
        told += f" Drawn are the first {MOST_DRAWN:,} of its {len(events):,} pieces, up to {until}."
    else:
        for stage, own in enumerate(cost.stages):
            end = max(event.end_s for event in timeline.events if event.device == stage)
            bars["gradients"].append((stage, end, own.gradient_s, "gradients"))
            bars["optimizer"].append((stage, end + own.gradient_s, own.optimizer_s, "optimizer"))
    figure = _figure(bars, layout.num_stages)
    most = LEGIBLE * layout.num_stages
    if len(events) > most:
        figure["layout"]["xaxis"]["range"] = [0, _rounded(events[most].start_s)]
        told += " The view starts with its beginning."
    return figure, f"{told} Drag to zoom in, double-click to see all."


def _short_enough(plan: Plan) -> tuple[Any, str]:
    """The layout, of a very long step with fewer micro-batches, and words on that."""
    layout = plan.layout
    per_batch = 2 * layout.num_stages * layout.num_chunks
    fewer = ROUNDS * layout.num_stages
    if layout.num_microbatches <= max(fewer, MOST_PLAYED // per_batch):
        return layout, ""
    fewer = max(fewer, MOST_PLAYED // per_batch // layout.num_stages * layout.num_stages)
    words = f", played with {fewer:,} of its {layout.num_microbatches:,} micro-batches"
    return replace(layout, num_microbatches=fewer), words


def _is_drawn(event: Event) -> bool:
    return event.end_s - event.start_s > MICRO and event.stream in (COMPUTE, TENSOR)


def _figure(bars: dict[Any, list[Bar]], num_stages: int) -> Figure:
    traces = [_trace(*PASSES[key], own) for key, own in bars.items() if _lasts(own)]
    layout = {
        "barmode": "overlay",
        "bargap": 0.15,
        "height": min(1_000, 190 + max(26, 36 - num_stages // 4) * num_stages),
        "dragmode": "zoom",
        "xaxis": {"title": {"text": "s from the start of the step"}, "rangemode": "tozero"},
        "yaxis": {
            "title": {"text": "stage"},
            "autorange": "reversed",
            "fixedrange": True,
            "dtick": max(1, num_stages // 16),
        },
    }
    return {"data": traces, "layout": layout}


def _lasts(own: Iterable[Bar]) -> bool:
    return any(duration > MICRO for _, _, duration, _ in own)


def _trace(name: str, colour: str, own: list[Bar]) -> Figure:
    return {
        "type": "bar",
        "orientation": "h",
        "name": name,
        "y": [stage for stage, *_ in own],
        "base": [_rounded(start) for _, start, *_ in own],
        "x": [_rounded(duration) for _, _, duration, _ in own],
        "text": [what for *_, what in own],
        "textposition": "none",
        "marker": {"color": colour},
        "hovertemplate": (
            f"stage %{{y}}, {name} %{{text}}<br>%{{x:.4g}} s from %{{base:.4g}} s<extra></extra>"
        ),
    }


def _rounded(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")
