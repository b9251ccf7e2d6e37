"""Tasks on resources -> when each starts and ends: the event simulation under every timeline.

A task waits for others and then for its resource. A resource is either a stream, which runs its
tasks in the order of the list (a device's compute, one direction of a link), or a pool of equal
servers, each of which takes the task that has been ready longest (the NICs of a node).
"""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Mapping, Sequence

__all__ = ["CycleError", "Task", "run_tasks"]

ENDS, READY = 0, 1  # at one moment servers are freed before tasks are placed


class CycleError(ValueError):
    """Tasks that wait for one another, the cycle named."""


class Task(NamedTuple):
    """``seconds`` on ``resource`` once all ``waits`` (positions in the list of tasks) have ended,
    each of them ``lag_s`` ago.
    """

    resource: Hashable
    seconds: float
    waits: tuple[int, ...] = ()
    lag_s: float = 0.0


@dataclass(slots=True)
class _Resource:
    free: int
    in_order: deque[int] | None  # tasks still to come, of a stream
    ready: deque[int]


def run_tasks(
    tasks: Sequence[Task],
    pools: Mapping[Hashable, int] | None = None,
    *,
    label: Callable[[int], str] = "task {}".format,
) -> tuple[list[float], list[float]]:
    """(start, end) of each task in seconds. ``pools``: servers of the resources that are pools;
    all others are streams. ``label``: what to call a task by its position. Raises CycleError where
    tasks wait for one another.
    """
    run = _Run(tasks, pools or {})
    while run.heap:
        run.step()
    if run.left:
        stuck = {i for i, end in enumerate(run.ends) if end < 0}
        cycle = map(label, _cycle(tasks, stuck, run.before))
        msg = f"tasks wait for one another: {' <- '.join(cycle)}"
        raise CycleError(msg)
    return run.starts, run.ends


class _Run:
    def __init__(self, tasks: Sequence[Task], pools: Mapping[Hashable, int]) -> None:
        self.tasks, self.left = tasks, len(tasks)
        self.starts = [-1.0] * len(tasks)
        self.ends = [-1.0] * len(tasks)
        self.waiting = [len(task.waits) for task in tasks]
        self.followers: list[list[int]] = [[] for _ in tasks]
        self.resources: dict[Hashable, _Resource] = {}
        self.before: dict[int, int] = {}  # the task before in a stream
        last: dict[Hashable, int] = {}
        for i, task in enumerate(tasks):
            servers = pools.get(task.resource)
            own = self.resources.setdefault(
                task.resource,
                _Resource(servers or 1, deque() if servers is None else None, deque()),
            )
            if own.in_order is not None:
                own.in_order.append(i)
                if task.resource in last:
                    self.before[i] = last[task.resource]
                last[task.resource] = i
            for before in task.waits:
                self.followers[before].append(i)
        self.heap = [(0.0, READY, i) for i, count in enumerate(self.waiting) if not count]
        self.done: set[int] = set()
        heapq.heapify(self.heap)

    def step(self) -> None:
        """One moment: a task has ended, or has all that it waits for."""
        now, what, i = heapq.heappop(self.heap)
        resource = self.resources[self.tasks[i].resource]
        if what == ENDS:
            resource.free += 1
            for follower in self.followers[i]:
                self.waiting[follower] -= 1
                if not self.waiting[follower]:
                    ready = now + self.tasks[follower].lag_s
                    heapq.heappush(self.heap, (ready, READY, follower))
        elif resource.in_order is None:
            resource.ready.append(i)
        else:
            self.done.add(i)
        self._serve(resource, now)

    def _serve(self, resource: _Resource, now: float) -> None:
        while resource.free:
            if resource.in_order is None:
                if not resource.ready:
                    return
                i = resource.ready.popleft()
            else:
                if not resource.in_order or resource.in_order[0] not in self.done:
                    return
                i = resource.in_order.popleft()
            resource.free -= 1
            self.left -= 1
            self.starts[i], self.ends[i] = now, now + self.tasks[i].seconds
            heapq.heappush(self.heap, (self.ends[i], ENDS, i))


def _cycle(tasks: Sequence[Task], stuck: set[int], before: Mapping[int, int]) -> list[int]:
    """The tasks of a cycle, each waiting for the next."""
    walk = [min(stuck)]
    while walk[-1] not in walk[:-1]:
        own = [*tasks[walk[-1]].waits, *([before[walk[-1]]] if walk[-1] in before else [])]
        walk.append(next(i for i in own if i in stuck))
    return walk[walk.index(walk[-1]) :]
