"""The longest path through a schedule: which passes, one after another, make a run take so long.

Whatever the durations, a run takes at least the sum over the passes of any one path. So the path of
one run is a lower bound for every other run of that schedule, in which durations differ.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from costmodel.schedules import BACKWARD, FORWARD, INPUT, PASSES, WEIGHT
from costmodel.simulate import Run, hop

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from costmodel.schedules import Action, Schedule, Shape
    from costmodel.simulate import PassTimes

__all__ = ["CriticalPath", "critical_path", "num_traced"]

TRACED_GROUPS = 5  # groups of p micro-batches of a run that is traced, where more are alike


class CriticalPath(NamedTuple):
    """How often a path takes each pass, ``passes[kind, device, chunk]``, and how often it waits
    for each link, ``hops[link]``; ``last``: the device where it ends.
    """

    passes: NDArray[np.int64]
    hops: NDArray[np.int64]
    last: int

    def seconds(self, durations: NDArray[np.float64], delays: NDArray[np.float64]) -> float:
        """Its length under other ``durations[kind, device, chunk]`` and ``delays[link]``."""
        return float((self.passes * durations).sum() + (self.hops * delays).sum())


def critical_path(
    schedule: Schedule, shape: Shape, times: PassTimes, delay_s: Sequence[float]
) -> CriticalPath:
    """The longest path of a run from an empty pipeline to an empty one, traced from its end; of a
    long run of a steady schedule one that repeats a part of the longest path of a shorter one.
    """
    groups = shape.microbatches // shape.stages
    if schedule.steady and groups > TRACED_GROUPS:
        more = groups - TRACED_GROUPS
        shorter = replace(shape, microbatches=shape.microbatches - more * shape.stages)
        walk = _Walk(schedule, shorter, times, delay_s)
        part = walk.repeating()
        if part is not None:
            return walk.path(part, more)
    return _Walk(schedule, shape, times, delay_s).path()


def num_traced(schedule: Schedule, shape: Shape) -> int:
    """Passes of the run that is traced to find the longest path of this one."""
    microbatches = shape.microbatches
    if schedule.steady:
        rest = microbatches % shape.stages
        microbatches = min(microbatches, TRACED_GROUPS * shape.stages + rest)
    return (3 if schedule.splits else 2) * shape.stages * shape.chunks * microbatches


class _Walk:
    """The longest path of a run, ``steps[i]`` = (device, place in its order), the first pass first,
    and ``links[i]``, the link that step i waits for, if it waits for one.
    """

    def __init__(
        self, schedule: Schedule, shape: Shape, times: PassTimes, delay_s: Sequence[float]
    ) -> None:
        self.run = run = Run(schedule, shape, times, delay_s)
        self.shape = shape
        paths = schedule.paths(shape)
        self.chunks = 1 + max(chunk for path in paths for _, chunk in path)
        places = {place: (path, i) for path in paths for i, place in enumerate(path)}
        numbers = [{action: i for i, action in enumerate(order)} for order in run.orders]
        self.steps: list[tuple[int, int]] = []
        self.links: list[int | None] = []
        device = max(range(shape.stages), key=lambda each: run.clock[each])
        number = len(run.orders[device]) - 1
        while True:
            self.steps.append((device, number))
            action = run.orders[device][number]
            waited = run.ready(device, action)
            free = run.end(device, run.orders[device][number - 1]) if number else 0.0
            if number and free >= waited:
                self.links.append(None)
                number -= 1
                continue
            path, i = places[device, action[1]]
            if action[0] == FORWARD and i == 0:
                self.links.append(None)
                break
            kinds, j = _before(action[0], i, len(path))
            (there, chunk), batch = path[j], action[2]
            near, far = path[min(i, j)][0], path[max(i, j)][0]
            self.links.append(None if there == device else hop(near, far, shape.stages))
            causes = ((kind, chunk, batch) for kind in kinds)
            device, number = there, next(numbers[there][c] for c in causes if c in numbers[there])
        self.steps.reverse()
        self.links.reverse()

    def repeating(self) -> tuple[int, int] | None:
        """The longest part of the path, behind step ``first`` up to step ``last``, that may be run
        through again for every p micro-batches more; None if there is none.

        A longer run of a steady schedule has the orders of this one up to the last forward of each
        device's first chunk, goes on as before for every group of p micro-batches more, and ends
        as this one does, so many micro-batches later. So what is before ``last`` must stand before
        those places, and what is behind ``first`` where the orders are known to repeat.
        """
        steady = [self._steady(device) for device in range(self.shape.stages)]
        before = [number <= steady[device][1] for device, number in self.steps]
        behind = [number >= steady[device][0] for device, number in self.steps]
        last = before.index(False) if False in before else len(before)
        first = len(behind) - behind[::-1].index(False) if False in behind else 0
        seen: dict[tuple[int, Action], int] = {}
        found, longest = None, 0.0
        for i in range(first, last):
            device, number = self.steps[i]
            kind, chunk, batch = action = self.run.orders[device][number]
            seen[device, action] = i
            start = seen.get((device, (kind, chunk, batch - self.shape.stages)))
            if start is not None:
                seconds = self._end(i) - self._end(start)
                if seconds > longest:
                    found, longest = (start, i), seconds
        return found

    def _end(self, i: int) -> float:
        device, number = self.steps[i]
        return self.run.end(device, self.run.orders[device][number])

    def _steady(self, device: int) -> tuple[int, int]:
        """The first and the last place between which a device's order repeats every p
        micro-batches.
        """
        order, group = self.run.orders[device], self.shape.stages
        lag = len(order) // self.shape.microbatches * group
        last = order.index((FORWARD, 0, self.shape.microbatches - 1))
        first = last
        while first >= lag:
            kind, chunk, batch = order[first]
            if order[first - lag] != (kind, chunk, batch - group):
                break
            first -= 1
        return first + 1 - lag, last

    def path(self, part: tuple[int, int] = (0, 0), times: int = 0) -> CriticalPath:
        """The path, with ``part`` of it run through so many times more."""
        passes = np.zeros((len(PASSES), self.shape.stages, self.chunks), dtype=np.int64)
        hops = np.zeros(self.shape.stages, dtype=np.int64)
        for i, ((device, number), link) in enumerate(zip(self.steps, self.links, strict=True)):
            often = 1 + times if part[0] < i <= part[1] else 1
            kind, chunk, _ = self.run.orders[device][number]
            passes[kind, device, chunk] += often
            if link is not None:
                hops[link] += often
        return CriticalPath(passes, hops, self.steps[-1][0])


def _before(kind: int, i: int, places: int) -> tuple[tuple[int, ...], int]:
    """What a pass at place ``i`` of a path waits for beside its device: kinds, place."""
    if kind == FORWARD:
        return (FORWARD,), i - 1
    if kind == WEIGHT:
        return (INPUT,), i
    return ((FORWARD,), i) if i + 1 == places else ((BACKWARD, INPUT), i + 1)
