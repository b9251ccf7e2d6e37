"""Durations + order -> when each device starts and ends: the longest path through a schedule.

Every device runs its passes in order; a forward waits for the same micro-batch's forward at the
place before, a backward for the backward at the place behind (the last one for its forward), a
weight gradient for its input gradient. ``costmodel.timeline`` gives every event and more resources.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING

from costmodel.schedules import BACKWARD, FORWARD, INPUT, PASSES, WEIGHT, Shape

if TYPE_CHECKING:
    from collections.abc import Sequence

    from costmodel.schedules import Action, Path, Place, Schedule

__all__ = [
    "DeadlockError",
    "PassTimes",
    "Run",
    "Span",
    "hop",
    "in_flight",
    "least_in_flight",
    "peak_held",
    "send_seconds",
    "simulate",
]


WARM_GROUPS = 8  # groups of p micro-batches after which a steady schedule is looked at
FULL_GROUPS = 12  # groups over which the mean period of a pipeline that stays full is taken
WINDOW = 4  # groups back that a pass depends on
CYCLES = (1, 2, 3, 4)  # groups after which a steady state may repeat
SHORT_RUN = 5  # groups in which a steady schedule holds as much as it ever does
STEADY = 1e-12  # relative difference that rounding of the additions may leave

_Pass = tuple[list[float], list[float], float, list[float]]  # waits for, notes, delay, seconds


class DeadlockError(RuntimeError):
    """A schedule whose passes wait for one another: our own bug, never the user's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PassTimes:
    """Seconds of the passes of one micro-batch, ``[device][chunk]``: a number, or one for each
    micro-batch. A whole backward takes ``input_s`` + ``weight_s``.
    """

    forward_s: Sequence[Sequence[float | Sequence[float]]]
    input_s: Sequence[Sequence[float | Sequence[float]]]
    weight_s: Sequence[Sequence[float | Sequence[float]]]

    def of(self, device: int, chunk: int, microbatches: int) -> tuple[list[float], ...]:
        """Seconds by micro-batch of the four kinds of passes."""
        forward, inputs, weight = (
            _by_batch(table[device][chunk], microbatches)
            for table in (self.forward_s, self.input_s, self.weight_s)
        )
        whole = [i + w for i, w in zip(inputs, weight, strict=True)]
        return forward, whole, inputs, weight

    @property
    def repeat(self) -> bool:
        """Whether all micro-batches take the same time."""
        tables = (self.forward_s, self.input_s, self.weight_s)
        return all(isinstance(s, float | int) for table in tables for row in table for s in row)


def _by_batch(seconds: float | Sequence[float], microbatches: int) -> list[float]:
    if isinstance(seconds, float | int):
        return [float(seconds)] * microbatches
    if len(seconds) != microbatches:
        msg = f"{len(seconds)} durations for {microbatches} micro-batches"
        raise ValueError(msg)
    return list(seconds)


@dataclass(frozen=True, slots=True)
class Span:
    """When each device starts its first and ends its last pass, in seconds from 0."""

    starts_s: tuple[float, ...]
    ends_s: tuple[float, ...]

    @property
    def makespan_s(self) -> float:
        """End of the last pass of all."""
        return max(self.ends_s)

    @property
    def span_s(self) -> float:
        """Longest time of any device from its first start to its last end."""
        return max(end - start for start, end in zip(self.starts_s, self.ends_s, strict=True))


def hop(before: int, after: int, stages: int) -> int:
    """The link between two neighbours: s joins s and s + 1, the last one p - 1 and 0."""
    return before if (after - before) % stages == 1 else after


def send_seconds(schedule: Schedule, shape: Shape, link_s: Sequence[float]) -> dict[Place, float]:
    """Seconds for which each place is held up by handing its result on, from those of each link;
    none at the end of the chain and where a path turns around.
    """
    found = {}
    for path in schedule.paths(shape):
        for here, there in zip(path, (*path[1:], path[-1]), strict=True):
            near = here[0] == there[0]
            found[here] = 0.0 if near else link_s[hop(here[0], there[0], len(link_s))]
    return found


def simulate(
    schedule: Schedule, shape: Shape, times: PassTimes, delay_s: Sequence[float] = ()
) -> Span:
    """Run ``schedule``. ``delay_s[s]`` is the time between a pass on device s and its follower on
    device s + 1, or back (the last: between devices p - 1 and 0).

    A schedule that does not drain is told by how often a pipeline that is full ends a micro-batch.
    Long runs are cut short where that changes nothing. Each pass of a steady schedule is the
    greatest of a few sums over passes at most ``WINDOW`` groups of p micro-batches before it, by
    the same rule in every group. So once all passes of that many groups come a constant time after
    those of some groups before, they do for ever, and so does the drain behind them.
    """
    delays = delay_s or [0.0] * shape.stages
    if not schedule.drains:
        end = shape.microbatches * _period_s(schedule, shape, times, delays)
        return Span((0.0,) * shape.stages, (end,) * shape.stages)
    return _drained(schedule, shape, times, delays)


def _period_s(schedule: Schedule, shape: Shape, times: PassTimes, delays: Sequence[float]) -> float:
    """Seconds from one micro-batch to the next in a pipeline that stays full, on the mean of many:
    devices that wait for one another may repeat only after several. All devices end micro-batches
    equally often, so none more often than the busiest one can.
    """
    few, many = (replace(shape, microbatches=n * FULL_GROUPS * shape.stages) for n in (1, 2))
    before, after = (_drained(schedule, each, times, delays).makespan_s for each in (few, many))
    busiest = 0.0
    for device in range(shape.stages):
        passes = [times.of(device, chunk, 1) for chunk in range(shape.chunks)]
        busiest = max(busiest, sum(own[FORWARD][0] + own[BACKWARD][0] for own in passes))
    return max(busiest, (after - before) / few.microbatches)


def _drained(schedule: Schedule, shape: Shape, times: PassTimes, delays: Sequence[float]) -> Span:
    """From an empty pipeline to an empty one."""
    groups = shape.microbatches // shape.stages
    if schedule.steady and times.repeat:
        warm = WARM_GROUPS
        while warm + max(CYCLES) < groups:
            found = _cut_short(schedule, shape, times, delays, groups, warm)
            if found is not None:
                return found
            warm *= 2
    run = Run(schedule, shape, times, delays)
    return Span(tuple(run.starts), tuple(run.clock))


def _cut_short(
    schedule: Schedule,
    shape: Shape,
    times: PassTimes,
    delays: Sequence[float],
    groups: int,
    warm: int,
) -> Span | None:
    """The whole run from ``warm`` groups and a few more, if they end in a steady state."""
    rest = shape.microbatches - groups * shape.stages
    run = Run(schedule, replace(shape, microbatches=warm * shape.stages + rest), times, delays)
    for cycle in CYCLES:
        if (groups - warm) % cycle:
            continue
        period = run.period(cycle)
        if period is not None:
            more = (groups - warm) // cycle * period
            return Span(tuple(run.starts), tuple(end + more for end in run.clock))
    return None


class Run:
    """A schedule with its durations, run device after device as far as each can."""

    def __init__(
        self, schedule: Schedule, shape: Shape, times: PassTimes, delays: Sequence[float]
    ) -> None:
        """Run it."""
        self.shape = shape
        self.orders = schedule.orders(shape)
        if schedule.gathers_by_unit:
            self.orders = [[a for a in order if a[0] in PASSES] for order in self.orders]
        self.tables = self._tables(schedule.paths(shape), times, delays)
        self.clock = [0.0] * shape.stages
        self._run(schedule.name)
        self.starts = [self._start(device) for device in range(shape.stages)]

    def _run(self, name: str) -> None:
        orders = [iter(order) for order in self.orders]
        waiting = [next(order, None) for order in orders]
        while any(waiting):
            progress = False
            for device, order in enumerate(orders):
                now, action, table = self.clock[device], waiting[device], self.tables[device]
                while action is not None:
                    kind, chunk, batch = action
                    before, own, delay, seconds = table[kind][chunk]
                    ready = before[batch] + delay
                    if ready < 0:
                        break
                    now = (now if now > ready else ready) + seconds[batch]  # noqa: FURB136 - innermost loop
                    own[batch] = now
                    action = next(order, None)
                    progress = True
                self.clock[device], waiting[device] = now, action
            if not progress:
                msg = f"{name}: {self.shape}"
                raise DeadlockError(msg)

    def _start(self, device: int) -> float:
        return max(0.0, self.ready(device, self.orders[device][0]))

    def ready(self, device: int, action: Action) -> float:
        """When what a pass waits for has come to its device."""
        kind, chunk, batch = action
        before, _, delay, _ = self.tables[device][kind][chunk]
        return before[batch] + delay

    def end(self, device: int, action: Action) -> float:
        """When a pass ends."""
        kind, chunk, batch = action
        return self.tables[device][kind][chunk][1][batch]

    def _tables(
        self, paths: Sequence[Path], times: PassTimes, delays: Sequence[float]
    ) -> list[dict[int, dict[int, _Pass]]]:
        """``[device][kind][chunk]``: what a pass waits for, where it notes its end, the delay
        between the two, and its seconds. An end that has not come yet is minus infinity.
        """
        stages, microbatches = self.shape.stages, self.shape.microbatches
        tables: list[dict[int, dict[int, _Pass]]] = [
            {kind: {} for kind in PASSES} for _ in range(stages)
        ]
        start = [0.0] * microbatches
        for path in paths:
            forwards, backwards, weights = (
                [[-math.inf] * microbatches for _ in path] for _ in range(3)
            )
            for i, (device, chunk) in enumerate(path):
                forward, whole, inputs, weight = times.of(device, chunk, microbatches)
                arriving = (forwards[i - 1], _delay(path, i - 1, delays)) if i else (start, 0.0)
                returning = (
                    (backwards[i + 1], _delay(path, i, delays))
                    if i + 1 < len(path)
                    else (forwards[i], 0.0)
                )
                own = tables[device]
                own[FORWARD][chunk] = (arriving[0], forwards[i], arriving[1], forward)
                own[BACKWARD][chunk] = (returning[0], backwards[i], returning[1], whole)
                own[INPUT][chunk] = (returning[0], backwards[i], returning[1], inputs)
                own[WEIGHT][chunk] = (backwards[i], weights[i], 0.0, weight)
        return tables

    def period(self, cycle: int) -> float | None:
        """Seconds that ``cycle`` more groups take, if on each device the actions before the drain
        (from the last forward of its first chunk on), as far back as later ones depend on them,
        are those of as many groups before and come so much later.
        """
        lag, rounding = cycle * self.shape.stages, STEADY * max(self.clock)
        extremes: list[float] = []
        for order, table in zip(self.orders, self.tables, strict=True):
            passes = len(order) // self.shape.microbatches
            last = order.index((FORWARD, 0, self.shape.microbatches - 1))
            first = last + 1 - WINDOW * self.shape.stages * passes
            now, before = (order[first - ago : last + 1 - ago] for ago in (0, lag * passes))
            if before != [(kind, chunk, batch - lag) for kind, chunk, batch in now]:
                return None
            gaps = [
                own[batch] - own[batch - lag]
                for own, batch in ((table[kind][chunk][1], batch) for kind, chunk, batch in now)
            ]
            extremes += min(gaps), max(gaps)
            if max(extremes) - min(extremes) > rounding:
                return None
        return extremes[0]


def _delay(path: Path, at: int, delays: Sequence[float]) -> float:
    """Seconds from a place of a path to the next one."""
    before, after = path[at][0], path[at + 1][0]
    return 0.0 if before == after else delays[hop(before, after, len(delays))]


def peak_held(
    schedule: Schedule, shape: Shape, held: Sequence[Sequence[float]], *, until_weight: bool = True
) -> tuple[float, ...]:
    """Greatest sum of what each device holds of its passes, from forward to backward.

    ``held[device][chunk]`` is held by one micro-batch. A device's order alone decides it. Where
    weight gradients are passes of their own, it is held until their end (``until_weight``), or
    until the input gradient is done, which is how schedules are compared in print.
    """
    known = schedule.held(shape)
    if known is not None and shape.chunks * schedule.copies == 1 and until_weight:
        return tuple(flight * sizes[0] for flight, sizes in zip(known, held, strict=True))
    if schedule.steady:
        shape = replace(shape, microbatches=min(shape.microbatches, SHORT_RUN * shape.stages))
    peaks = []
    for sizes, order in zip(held, schedule.orders(shape), strict=True):
        now = peak = 0.0
        for kind, chunk, _ in order:
            if kind == FORWARD:
                now += sizes[chunk]
                peak = max(peak, now)
            elif kind in (BACKWARD, WEIGHT if until_weight else INPUT):
                now -= sizes[chunk]
        peaks.append(peak)
    return tuple(peaks)


def in_flight(schedule: Schedule, shape: Shape) -> tuple[float, ...]:
    """Micro-batches of its whole share that each device holds at most."""
    known = schedule.held(shape)
    if known is not None:
        return known
    if schedule.steady:
        shape = replace(shape, microbatches=min(shape.microbatches, SHORT_RUN * shape.stages))
    return _measured_in_flight(schedule, shape)


def least_in_flight(schedule: Schedule, shape: Shape) -> tuple[float, ...]:
    """Micro-batches of its whole share that each device is sure to hold, without long orders."""
    if schedule.least_held is not None:
        return (schedule.least_held(shape),) * shape.stages
    return in_flight(schedule, shape)


@lru_cache(maxsize=4096)
def _measured_in_flight(schedule: Schedule, shape: Shape) -> tuple[float, ...]:
    share = [1 / shape.chunks] * (shape.chunks * schedule.copies)
    return peak_held(schedule, shape, [share] * shape.stages)
