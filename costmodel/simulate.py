"""Durations + order -> timeline: the longest path through a schedule.

Every rank runs its passes in order; a forward waits for the same micro-batch's forward on the
virtual stage before, a backward for the backward on the one after (the last one for its forward).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from costmodel.schedules import BACKWARD, FORWARD

if TYPE_CHECKING:
    from collections.abc import Sequence

    from costmodel.schedules import Schedule

__all__ = ["DeadlockError", "Timeline", "peak_held", "simulate"]


SHORT_RUN = 4  # micro-batches per stage after which a steady schedule has warmed up
STEADY = 1e-11  # relative difference that rounding of the additions may leave


_Pass = tuple[list[float], list[float], float, float]  # waits for, notes, delay, seconds


class DeadlockError(RuntimeError):
    """A schedule whose passes wait for one another: our own bug, never the user's."""


@dataclass(frozen=True, slots=True)
class Timeline:
    """When each stage ends its last pass, and the whole span, in seconds from 0."""

    stage_ends_s: tuple[float, ...]

    @property
    def makespan_s(self) -> float:
        """End of the last pass."""
        return max(self.stage_ends_s)


def simulate(
    schedule: Schedule,
    *,
    forward_s: Sequence[Sequence[float]],
    backward_s: Sequence[Sequence[float]],
    delay_s: Sequence[float],
    microbatches: int,
) -> Timeline:
    """Run ``schedule``: durations are ``[stage][chunk]`` of one micro-batch; ``delay_s[s]`` is
    the time between a pass on stage s and its follower on stage s + 1 (the last: back to 0).

    Long runs of one chunk a stage are cut short where that changes nothing. The end of every
    stage is a convex, piecewise linear function of the number of micro-batches (a longest path
    through equal groups), whose slope cannot exceed the busiest stage's time. Once the slope has
    reached that, it stays, and the rest is a multiplication. Interleaved passes of unequal length
    can settle above the busiest stage's time, so they are run in full.
    """
    passes = _Passes(schedule, forward_s, backward_s, delay_s)
    busiest = max(sum(f) + sum(b) for f, b in zip(forward_s, backward_s, strict=True))
    stages = len(forward_s)
    short = SHORT_RUN * stages + microbatches % stages
    settles = schedule.steady and not schedule.interleaves and not any(delay_s) and stages > 1
    while settles and short + stages < microbatches:
        before, after = passes.run(short), passes.run(short + stages)
        slopes = [b - a for a, b in zip(before, after, strict=True)]
        if all(abs(s - stages * busiest) <= STEADY * stages * busiest for s in slopes):
            groups = (microbatches - short - stages) / stages
            return Timeline(tuple(e + groups * stages * busiest for e in after))
        short += short // stages * stages
    return Timeline(tuple(passes.run(microbatches)))


@dataclass(frozen=True, slots=True)
class _Passes:
    """A schedule with its durations."""

    schedule: Schedule
    forward_s: Sequence[Sequence[float]]
    backward_s: Sequence[Sequence[float]]
    delay_s: Sequence[float]

    def run(self, microbatches: int) -> list[float]:
        """End of the last pass of each stage: rank after rank runs as far as it can."""
        stages, chunks = len(self.forward_s), len(self.forward_s[0])
        tables = self._tables(microbatches)
        orders = [
            iter(self.schedule.order(stages, chunks, microbatches, stage))
            for stage in range(stages)
        ]
        clock = [0.0] * stages
        waiting = [next(order, None) for order in orders]
        while any(waiting):
            progress = False
            for stage, order in enumerate(orders):
                now, action, table = clock[stage], waiting[stage], tables[stage]
                while action is not None:
                    kind, chunk, batch = action
                    before, own, delay, seconds = table[kind][chunk]
                    ready = before[batch] + delay
                    if ready < 0:
                        break
                    now = (now if now > ready else ready) + seconds  # noqa: FURB136 - innermost loop
                    own[batch] = now
                    action = next(order, None)
                    progress = True
                clock[stage], waiting[stage] = now, action
            if not progress:
                msg = f"{self.schedule.name}: {stages} stages, {chunks} chunks, {microbatches}"
                raise DeadlockError(msg)
        return clock

    def _tables(self, microbatches: int) -> list[tuple[list[_Pass], list[_Pass]]]:
        """``[stage][kind][chunk]``: what a pass waits for, where it notes its end, the delay
        between the two, and its seconds. An end that has not come yet is minus infinity.
        """
        stages, chunks = len(self.forward_s), len(self.forward_s[0])
        virtual = range(stages * chunks)
        forwards = [[-math.inf] * microbatches for _ in virtual]
        backwards = [[-math.inf] * microbatches for _ in virtual]
        start = [0.0] * microbatches
        tables = []
        for stage in range(stages):
            rows: tuple[list[_Pass], list[_Pass]] = ([], [])
            for chunk in range(chunks):
                at = chunk * stages + stage
                arriving = (forwards[at - 1], self.delay_s[stage - 1]) if at else (start, 0.0)
                returning = (
                    (backwards[at + 1], self.delay_s[stage])
                    if at + 1 < len(virtual)
                    else (forwards[at], 0.0)
                )
                for row, (before, delay), own, seconds in (
                    (rows[FORWARD], arriving, forwards[at], self.forward_s[stage][chunk]),
                    (rows[BACKWARD], returning, backwards[at], self.backward_s[stage][chunk]),
                ):
                    row.append((before, own, delay, seconds))
            tables.append(rows)
        return tables


def peak_held(
    schedule: Schedule, *, held_bytes: Sequence[Sequence[int]], microbatches: int
) -> tuple[int, ...]:
    """Greatest sum of what each stage holds between forward and backward of its passes.

    ``held_bytes[stage][chunk]`` is held by one micro-batch. A rank's order alone decides it.
    """
    stages, chunks = len(held_bytes), len(held_bytes[0])
    if schedule.steady:  # a warm-up is at most 2 (p - 1) + (v - 1) p passes of v chunks
        microbatches = min(microbatches, SHORT_RUN * stages)
    peaks = []
    for stage, held in enumerate(held_bytes):
        order = np.array(schedule.order(stages, chunks, microbatches, stage))
        change = np.asarray(held)[order[:, 1]] * np.where(order[:, 0] == BACKWARD, -1, 1)
        peaks.append(int(np.cumsum(change).max()))
    return tuple(peaks)
