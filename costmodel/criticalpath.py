"""The longest path through a schedule: which passes, one after another, make a run take so long.

Whatever the durations, a run takes at least the sum over the passes of any one path. So the path of
one run is a lower bound for every other run of that schedule, in which durations differ.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from costmodel.schedules import BACKWARD, FORWARD, INPUT, PASSES, WEIGHT
from costmodel.simulate import Run, hop

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from costmodel.schedules import Schedule, Shape
    from costmodel.simulate import PassTimes

__all__ = ["CriticalPath", "critical_path"]


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
    """The longest path of a run from an empty pipeline to an empty one, traced from its end."""
    run = Run(schedule, shape, times, delay_s)
    places = {place: (path, i) for path in schedule.paths(shape) for i, place in enumerate(path)}
    numbers = [{action: i for i, action in enumerate(order)} for order in run.orders]
    chunks = 1 + max(chunk for _, chunk in places)
    passes = np.zeros((len(PASSES), shape.stages, chunks), dtype=np.int64)
    hops = np.zeros(shape.stages, dtype=np.int64)
    device = last = max(range(shape.stages), key=lambda each: run.clock[each])
    number = len(run.orders[device]) - 1
    while True:
        action = run.orders[device][number]
        passes[action[0], device, action[1]] += 1
        waited = run.ready(device, action)
        free = run.end(device, run.orders[device][number - 1]) if number else 0.0
        if number and free >= waited:
            number -= 1
            continue
        path, i = places[device, action[1]]
        if action[0] == FORWARD and i == 0:
            return CriticalPath(passes, hops, last)
        kinds, j = _before(action[0], i, len(path))
        (there, chunk), batch = path[j], action[2]
        if there != device:
            near, far = path[min(i, j)][0], path[max(i, j)][0]
            hops[hop(near, far, shape.stages)] += 1
        causes = ((kind, chunk, batch) for kind in kinds)
        device, number = there, next(numbers[there][c] for c in causes if c in numbers[there])


def _before(kind: int, i: int, places: int) -> tuple[tuple[int, ...], int]:
    """What a pass at place ``i`` of a path waits for beside its device: kinds, place."""
    if kind == FORWARD:
        return (FORWARD,), i - 1
    if kind == WEIGHT:
        return (INPUT,), i
    return ((FORWARD,), i) if i + 1 == places else ((BACKWARD, INPUT), i + 1)
