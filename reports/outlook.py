"""What a session of the profiler would take, as text."""

from __future__ import annotations

from typing import Any

from reports.words import gib

__all__ = ["outlook_report"]

MINUTE_S = 60


def outlook_report(answer: dict[str, Any]) -> list[str]:
    """How many points, how long, and the memory of the largest."""
    minutes = max(1, round(answer["seconds"] / MINUTE_S))
    told = f"{answer['num_points']} points, {answer['num_samplings']} samplings"
    room = f"{gib(answer['largest_bytes'])} of {gib(answer['memory_bytes'])}"
    lines = [
        f"{told}: about {minutes} min on {answer['device']}, and what building the layers takes",
        f"memory: {room} for {answer['largest']}",
    ]
    if answer["too_large"]:
        lines.append(f"{len(answer['too_large'])} points will not fit, as {answer['too_large'][0]}")
    return lines
