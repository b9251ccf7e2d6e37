"""One schedule by itself: names and numbers as people type them -> a run of it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from costmodel.schedules import PASSES, SCHEDULES, Schedule, Shape
from costmodel.schedules.check import staleness, with_transfers
from costmodel.schedules.core import SEND_BACKWARD, SEND_FORWARD
from costmodel.simulate import PassTimes, Span, peak_held, simulate
from costmodel.timeline import Timeline, play
from profiles.errors import InputError, Problem
from profiles.nearest import nearest

if TYPE_CHECKING:
    from costmodel.schedules import Order

__all__ = ["ScheduleRun", "run_schedule"]

MOST_DRAWN: Final = 20_000  # passes beyond which a run has totals but no timeline
TIMES_FORM: Final = "three numbers: F,B,W of a whole stage for one micro-batch, as 1,1,1"


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleRun:
    """A schedule with durations, and what came out.

    ``bubble`` is the idle part of the device with the longest span. ``peak_in_flight``:
    micro-batches of its whole share that a device holds at most until their backward (its input
    gradient); ``peak_until_weight``: until their weight gradient. ``timeline`` is None for long
    runs.
    """

    schedule: Schedule
    shape: Shape
    times: tuple[float, float, float]
    span: Span
    bubble: float
    peak_in_flight: tuple[float, ...]
    peak_until_weight: tuple[float, ...]
    timeline: Timeline | None

    @property
    def chunks_per_device(self) -> int:
        """Chunks that a device holds, both directions' together."""
        return self.shape.chunks * self.schedule.copies

    @property
    def stale_updates(self) -> tuple[int, ...]:
        """Weight updates between a micro-batch's forward and backward on each device."""
        if self.schedule.drains:
            return (0,) * self.shape.stages
        return tuple(staleness(order) for order in self._endless())

    @property
    def handed_over(self) -> int:
        """Messages between devices in a step, both ways."""
        lists = with_transfers(self.schedule, self.shape)
        return sum(kind in (SEND_FORWARD, SEND_BACKWARD) for order in lists for kind, _, _ in order)

    def _endless(self) -> list[Order]:
        """Orders long enough to be full."""
        stages = self.shape.stages
        return self.schedule.orders(Shape(stages, self.shape.chunks, 3 * stages))


def run_schedule(
    name: str,
    *,
    stages: int,
    microbatches: int,
    chunks: int | None = None,
    unit: int | None = None,
    times: str = "1,1,1",
) -> ScheduleRun:
    """Run a schedule. ``chunks`` are those of a device; None: as many as the schedule usually has.
    ``times`` are shared equally by the chunks that a micro-batch crosses on a device. Raises
    ``InputError`` with the rule that is broken and the nearest legal value.
    """
    if name not in SCHEDULES:
        problem = Problem(
            where="parplan schedule",
            message=f"there is no schedule {name!r}",
            expected=f"one of {', '.join(SCHEDULES)}",
            hint=nearest(name, SCHEDULES),
        )
        raise InputError(problem)
    schedule = SCHEDULES[name]
    problems: list[Problem] = []
    seconds = _times(times, problems)
    if unit is not None and name != "zeropp":
        message = f"{name} has no units of micro-batches"
        problems.append(
            Problem(where="--unit", message=message, expected="--unit with zeropp only")
        )
    shape = Shape(stages, _crossed(schedule, chunks, problems), microbatches, unit or 0)
    rule = None if problems else schedule.problem(shape)
    if rule is not None:
        problems.append(Problem(where="parplan schedule", message=rule))
    if problems:
        raise InputError(problems)
    return _run(schedule, shape, seconds)


def _times(text: str, problems: list[Problem]) -> tuple[float, float, float]:
    try:
        forward, backward, weight = (float(part) for part in text.split(","))
    except ValueError:
        forward = backward = weight = math.nan
    found = forward, backward, weight
    if not all(0 <= each < math.inf for each in found) or not any(found):
        message = f"times are {text!r}"
        problems.append(Problem(where="--times", message=message, expected=TIMES_FORM))
    return found


def _crossed(schedule: Schedule, chunks: int | None, problems: list[Problem]) -> int:
    """Chunks of a device that one micro-batch crosses: of two directions half of them."""
    if chunks is None:
        return schedule.usual_chunks
    if schedule.copies == 1:
        return chunks
    held = schedule.usual_chunks * schedule.copies
    if chunks not in (held, schedule.usual_chunks):
        message = f"{schedule.name} has {held} chunks a device, not {chunks}"
        hint = f"nearest: {held}"
        problems.append(Problem(where="--chunks", message=message, hint=hint))
    return schedule.usual_chunks


def _run(schedule: Schedule, shape: Shape, seconds: tuple[float, float, float]) -> ScheduleRun:
    chunks = shape.chunks * schedule.copies
    forward, inputs, weight = ([[s / shape.chunks] * chunks] * shape.stages for s in seconds)
    times = PassTimes(forward_s=forward, input_s=inputs, weight_s=weight)
    span = simulate(schedule, shape, times)
    share = [[1 / shape.chunks] * chunks] * shape.stages
    until_input, until_weight = (
        peak_held(schedule, shape, share, until_weight=until) for until in (False, True)
    )
    passes = shape.stages * chunks * shape.microbatches * len(PASSES)
    return ScheduleRun(
        schedule=schedule,
        shape=shape,
        times=seconds,
        span=span,
        bubble=max(0.0, 1 - shape.microbatches * sum(seconds) / span.span_s),
        peak_in_flight=until_input,
        peak_until_weight=until_weight,
        timeline=play(schedule, shape, times) if passes <= MOST_DRAWN else None,
    )
