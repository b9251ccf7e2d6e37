"""Pipeline schedules as order lists: for each rank, the passes it runs, one after another.

A pass is (kind, chunk, micro-batch). Virtual stage c * p + s is chunk c of stage s. A schedule is
one function of (stages, chunks, micro-batches, stage); register it in ``SCHEDULES``.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["BACKWARD", "FORWARD", "SCHEDULES", "Order", "Schedule"]

FORWARD, BACKWARD = 0, 1
Order = list[tuple[int, int, int]]


@dataclass(frozen=True, slots=True)
class Schedule:
    """A schedule: its orders, and how many micro-batches (of a stage's whole share) are in
    flight at most on each stage. ``steady``: after a warm-up it repeats the same passes for every
    further group of micro-batches (of p, if it interleaves), so neither its greatest memory nor
    the time of one more group depends on how many there are.
    """

    name: str
    order: Callable[[int, int, int, int], Order]
    in_flight: Callable[[int, int, int, int], float]
    interleaves: bool = False
    steady: bool = True

    def problem(self, *, stages: int, chunks: int, microbatches: int) -> str | None:
        """Why the schedule cannot run so, with the nearest legal value; None if it can."""
        if not self.interleaves:
            if chunks == 1:
                return None
            return f"{self.name} has one chunk a stage, not {chunks}"
        if chunks == 1:
            return f"{self.name} needs at least 2 chunks a stage"
        if stages == 1:
            return f"{self.name} needs at least 2 stages"
        if microbatches % stages:
            nearest = max(stages, round(microbatches / stages) * stages)
            return (
                f"{self.name} needs micro-batches ({microbatches}) divisible by stages "
                f"({stages}); nearest: {nearest}"
            )
        return None


def _gpipe(_stages: int, _chunks: int, microbatches: int, _stage: int) -> Order:
    """All forwards, then all backwards (Huang et al. 2019)."""
    forwards = [(FORWARD, 0, m) for m in range(microbatches)]
    return forwards + [(BACKWARD, 0, m) for m in range(microbatches)]


def _one_f_one_b(stages: int, _chunks: int, microbatches: int, stage: int) -> Order:
    """P - s - 1 forwards, then one forward and one backward in turn (Narayanan et al. 2021)."""
    warmup = min(stages - stage - 1, microbatches)
    order: Order = [(FORWARD, 0, m) for m in range(warmup)]
    for m in range(microbatches - warmup):
        order += [(FORWARD, 0, warmup + m), (BACKWARD, 0, m)]
    return order + [(BACKWARD, 0, m) for m in range(microbatches - warmup, microbatches)]


@lru_cache(maxsize=128)  # the stages of one pipeline, for its time and for its memory
def _interleaved(stages: int, chunks: int, microbatches: int, stage: int) -> Order:
    """Groups of p micro-batches go through chunk 0, 1, ...; backwards through them in reverse.

    Warm-up is 2 (p - s - 1) + (v - 1) p passes (Narayanan et al. 2021, section 2.2).
    """
    total = microbatches * chunks
    warmup = min(2 * (stages - stage - 1) + (chunks - 1) * stages, total)

    def step(kind: int, index: int) -> tuple[int, int, int]:
        group, within = divmod(index, stages * chunks)
        chunk, position = divmod(within, stages)
        if kind == BACKWARD:
            chunk = chunks - 1 - chunk
        return kind, chunk, group * stages + position

    order = [step(FORWARD, i) for i in range(warmup)]
    for i in range(total - warmup):
        order += [step(FORWARD, warmup + i), step(BACKWARD, i)]
    return order + [step(BACKWARD, i) for i in range(total - warmup, total)]


def _all_in_flight(_stages: int, _chunks: int, microbatches: int, _stage: int) -> float:
    return float(microbatches)


def _as_many_as_follow(stages: int, _chunks: int, microbatches: int, stage: int) -> float:
    return float(min(stages - stage, microbatches))


def _interleaved_in_flight(stages: int, chunks: int, microbatches: int, stage: int) -> float:
    warmup = 2 * (stages - stage - 1) + (chunks - 1) * stages
    return min(warmup + 1, microbatches * chunks) / chunks


SCHEDULES = {
    schedule.name: schedule
    for schedule in (
        Schedule("gpipe", _gpipe, _all_in_flight, steady=False),
        Schedule("1f1b", _one_f_one_b, _as_many_as_follow),
        Schedule("interleaved-1f1b", _interleaved, _interleaved_in_flight, interleaves=True),
    )
}
