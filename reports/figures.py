"""Figures for plotly.js as plain data, made of the answers that ``--format json`` prints.

Colours of text, lines and background come from the page, which knows its theme; those of causes
and kinds are here. They stay apart for colour-blind readers (Okabe and Ito 2008, Tol 2021), on
white and on black.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from profiles.units import GIB
from reports.words import CAUSES, KINDS, gib

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = [
    "PALETTE",
    "Figure",
    "choices_figure",
    "front_figure",
    "interval_figure",
    "memory_figure",
    "time_figure",
]

Figure = dict[str, Any]

PALETTE: Final = (
    "#0072B2",
    "#E69F00",
    "#009E73",
    "#CC79A7",
    "#56B4E9",
    "#D55E00",
    "#999933",
    "#882255",
    "#44AA99",
    "#F0E442",
)
GREY: Final = "#999999"
LIMIT: Final = "#D55E00"
CAUSE_COLOURS: Final = {
    "compute_s": "#0072B2",
    "recompute_s": "#56B4E9",
    "tp_s": "#E69F00",
    "cp_s": "#F0E442",
    "ep_s": "#CC79A7",
    "zero_s": "#D55E00",
    "p2p_s": "#009E73",
    "bubble_s": "#BBBBBB",
    "gradient_s": "#882255",
    "optimizer_s": "#44AA99",
    "overhead_s": "#999933",
}
KIND_COLOURS: Final = {
    "parameters": "#0072B2",
    "gradients": "#56B4E9",
    "optimizer": "#009E73",
    "activations": "#E69F00",
    "working": "#D55E00",
    "buffers": "#CC79A7",
    "reserved": "#BBBBBB",
    "context": "#777777",
}
WH_PER_KWH: Final = 1000
FEW: Final = 4  # bars that would be too broad


def memory_figure(
    names: Sequence[str], kinds: Sequence[Mapping[str, int]], *, what: str, usable: Sequence[int]
) -> Figure:
    """GiB by kind, one bar a name (a stage, a plan), and what each device can use of its memory."""
    scaled = [{kind: size / GIB for kind, size in own.items()} for own in kinds]
    figure = _stacked(names, scaled, KINDS, KIND_COLOURS, what=what, unit="GiB")
    most = max(*(sum(own.values()) for own in scaled), *(size / GIB for size in usable))
    figure["layout"]["yaxis"]["range"] = [0, 1.12 * most]
    for size in dict.fromkeys(usable):
        line = {"xref": "paper", "x0": 0, "x1": 1, "y0": size / GIB, "y1": size / GIB}
        words = {"xref": "paper", "x": 1, "y": size / GIB, "text": f"usable {gib(size)}"}
        figure["layout"].setdefault("shapes", []).append(
            {"type": "line", **line, "line": {"color": LIMIT, "width": 2, "dash": "dash"}}
        )
        figure["layout"].setdefault("annotations", []).append(
            {**words, "showarrow": False, "xanchor": "right", "yanchor": "bottom"}
        )
    return figure


def time_figure(
    names: Sequence[str], splits: Sequence[Mapping[str, float]], *, what: str
) -> Figure:
    """Seconds of a step by cause, one bar a name."""
    return _stacked(names, splits, CAUSES, CAUSE_COLOURS, what=what, unit="s")


def _stacked(
    names: Sequence[str],
    parts: Sequence[Mapping[str, float]],
    words: Mapping[str, str],
    colours: Mapping[str, str],
    *,
    what: str,
    unit: str,
) -> Figure:
    """One bar a name, its parts on top of one another; parts that are nowhere are left out."""
    traces = [
        {
            "type": "bar",
            "name": words[key],
            "x": list(names),
            "y": [own[key] for own in parts],
            "marker": {"color": colours[key]},
            "hovertemplate": f"{what} %{{x}}<br>{words[key]}: %{{y:.4g}} {unit}<extra></extra>",
        }
        for key in words
        if any(own[key] for own in parts)
    ]
    layout = {
        "barmode": "stack",
        "bargap": 0.6 if len(names) < FEW else 0.2,
        "height": 420,
        "xaxis": {"title": {"text": what}, "type": "category", "showgrid": False},
        "yaxis": {"title": {"text": unit}},
    }
    return {"data": traces, "layout": layout}


def front_figure(answer: Mapping[str, Any]) -> Figure:
    """Step time against memory of every layout that the search simulated and that fits."""
    tried = answer["tried"]
    front = _front([(each["step_s"], each["peak_mem_bytes"] / GIB) for each in tried])
    traces = [
        _points("simulated", tried, {"color": GREY, "size": 7, "opacity": 0.7}),
        {
            "type": "scatter",
            "mode": "lines",
            "name": "front",
            "x": [x for x, _ in front],
            "y": [y for _, y in front],
            "line": {"shape": "hv", "color": PALETTE[4], "width": 2},
            "hoverinfo": "skip",
        },
        _points(
            "next best",
            [
                {**each, "layout": f"next best {at}"}
                for at, each in enumerate(answer["runners_up"], start=1)
            ],
            {"color": PALETTE[1], "size": 11, "symbol": "diamond"},
        ),
        _points(
            "chosen", [{**answer, "layout": "chosen"}],
            {"color": LIMIT, "size": 16, "symbol": "star"},
        ),
    ]  # fmt: skip
    layout = {
        "height": 420,
        "xaxis": {"title": {"text": "step, s"}},
        "yaxis": {"title": {"text": "fullest device, GiB"}},
    }
    return {"data": [each for each in traces if each["x"]], "layout": layout}


def _points(name: str, own: Sequence[Mapping[str, Any]], marker: dict[str, Any]) -> Figure:
    return {
        "type": "scatter",
        "mode": "markers",
        "name": name,
        "x": [each["step_s"] for each in own],
        "y": [each["peak_mem_bytes"] / GIB for each in own],
        "text": [each["layout"] for each in own],
        "marker": marker,
        "hovertemplate": "%{text}<br>%{x:.4g} s, %{y:.1f} GiB<extra></extra>",
    }


def _front(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The points that no other is better than in both, from left to right."""
    front: list[tuple[float, float]] = []
    for point in sorted(points):
        if not front or point[1] < front[-1][1]:
            front.append(point)
    return front


def choices_figure(objective: Mapping[str, Any]) -> Figure:
    """Step time against what an objective counts, one point a choice; the front is joined."""
    units = {"cost": "price of a step", "energy": "Wh a step", "time-to-target": "s to the target"}
    scale = WH_PER_KWH if objective["name"] == "energy" else 1
    choices = sorted(objective["choices"], key=lambda each: float(each["step_s"]))
    front = [each for each in choices if each["on_front"]]
    groups = (
        ("front", front, "lines+markers", PALETTE[4]),
        ("others", [each for each in choices if not each["on_front"]], "markers", GREY),
        ("chosen", objective["choices"][:1], "markers", LIMIT),
    )
    traces = [
        {
            "type": "scatter",
            "mode": mode,
            "name": name,
            "x": [each["step_s"] for each in own],
            "y": [scale * each["value"] for each in own],
            "text": [f"{each['gpus']} GPUs, global batch {each['global_batch']}" for each in own],
            "marker": {"color": colour, "size": 14 if name == "chosen" else 8},
            "hovertemplate": "%{text}<br>%{x:.4g} s, %{y:.4g}<extra></extra>",
        }
        for name, own, mode, colour in groups
        if own
    ]
    layout = {
        "height": 380,
        "xaxis": {"title": {"text": "step, s"}},
        "yaxis": {"title": {"text": units[objective["name"]]}},
    }
    return {"data": traces, "layout": layout}


def interval_figure(plans: Sequence[Mapping[str, Any]]) -> Figure:
    """Step times of plans with their intervals, one line a plan."""
    trace = {
        "type": "scatter",
        "mode": "markers",
        "x": [each["step_s"] for each in plans],
        "y": [each["name"] for each in plans],
        "marker": {"size": 12, "color": PALETTE[0]},
        "error_x": {
            "type": "data",
            "symmetric": False,
            "array": [each["interval_s"][1] - each["step_s"] for each in plans],
            "arrayminus": [each["step_s"] - each["interval_s"][0] for each in plans],
            "color": PALETTE[0],
            "thickness": 2,
        },
        "hovertemplate": "%{y}: %{x:.4g} s<extra></extra>",
        "showlegend": False,
    }
    layout = {
        "height": 130 + 40 * len(plans),
        "xaxis": {"title": {"text": "step with its 90 % interval, s"}, "rangemode": "tozero"},
        "yaxis": {"type": "category", "autorange": "reversed"},
    }
    return {"data": [trace], "layout": layout}
