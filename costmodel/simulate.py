"""Durations + order -> timeline: the longest path through a schedule.

Every rank runs its passes in order; a forward waits for the same micro-batch's forward on the
virtual stage before, a backward for the backward on the one after (the last one for its forward).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from costmodel.schedules import BACKWARD, FORWARD

if TYPE_CHECKING:
    from collections.abc import Sequence

    from costmodel.schedules import Schedule

__all__ = ["DeadlockError", "Timeline", "peak_held", "simulate"]


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
    """
    stages, chunks = len(forward_s), len(forward_s[0])
    orders = [schedule.order(stages, chunks, microbatches, stage) for stage in range(stages)]
    last = stages * chunks - 1
    ended = [[[-1.0] * microbatches for _ in range(stages * chunks)] for _ in range(2)]
    clock, position = [0.0] * stages, [0] * stages
    remaining = sum(len(order) for order in orders)
    durations = (forward_s, backward_s)
    while remaining:
        before = remaining
        for stage in range(stages):
            order, now, at = orders[stage], clock[stage], position[stage]
            while at < len(order):
                kind, chunk, batch = order[at]
                virtual = chunk * stages + stage
                if kind == FORWARD:
                    ready = 0.0
                    if virtual:
                        ready = ended[FORWARD][virtual - 1][batch]
                        if ready < 0:
                            break
                        ready += delay_s[stage - 1]
                elif virtual == last:
                    ready = ended[FORWARD][virtual][batch]
                    if ready < 0:
                        break
                else:
                    ready = ended[BACKWARD][virtual + 1][batch]
                    if ready < 0:
                        break
                    ready += delay_s[stage]
                now = max(now, ready) + durations[kind][stage][chunk]
                ended[kind][virtual][batch] = now
                at += 1
            remaining -= at - position[stage]
            clock[stage], position[stage] = now, at
        if remaining == before:
            msg = f"{schedule.name} with {stages} stages, {chunks} chunks, {microbatches} batches"
            raise DeadlockError(msg)
    return Timeline(tuple(clock))


def peak_held(
    schedule: Schedule, *, held_bytes: Sequence[Sequence[int]], microbatches: int
) -> tuple[int, ...]:
    """Greatest sum of what each stage holds between forward and backward of its passes.

    ``held_bytes[stage][chunk]`` is held by one micro-batch. A rank's order alone decides it.
    """
    stages, chunks = len(held_bytes), len(held_bytes[0])
    peaks = []
    for stage, held in enumerate(held_bytes):
        order = np.array(schedule.order(stages, chunks, microbatches, stage))
        change = np.asarray(held)[order[:, 1]] * np.where(order[:, 0] == BACKWARD, -1, 1)
        peaks.append(int(np.cumsum(change).max()))
    return tuple(peaks)
