"""Orders from list scheduling: every pass takes one slot, and a device that is free runs the best
of its passes that are ready and admitted.

A schedule that is told by a rule ("at most U micro-batches of a chunk in flight, weight gradients
last") gets its order lists from here. Each device holds one queue per kind of pass and chunk, in
the order of micro-batches; only heads of queues are looked at, so the work is in proportion to the
passes.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from costmodel.schedules.core import BACKWARD, FORWARD, INPUT, WEIGHT

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from costmodel.schedules.core import Action, Order, Path

__all__ = ["CACHED", "Counts", "list_schedule"]

Key = tuple[int, ...]
NEVER = 1 << 62
CACHED = 8  # shapes whose orders are kept: layouts of one shape are costed one after another


@dataclass(slots=True)
class Counts:
    """What one device has done so far: micro-batches of each chunk between forward and backward,
    forwards and backwards in all, and input gradients without their weight gradient.
    """

    in_flight: dict[int, int] = field(default_factory=dict)
    passes: int = 0
    waiting_weights: int = 0

    def note(self, kind: int, chunk: int) -> None:
        """Count one more pass."""
        if kind == WEIGHT:
            self.waiting_weights -= 1
            return
        self.passes += 1
        self.waiting_weights += kind == INPUT
        change = 1 if kind == FORWARD else -1
        self.in_flight[chunk] = self.in_flight.get(chunk, 0) + change


def list_schedule(
    paths: Sequence[Path],
    batches: Sequence[Sequence[int]],
    *,
    splits: bool,
    key: Callable[[int, int, int], Key],
    admits: Callable[[int, Action, Counts], bool],
) -> list[Order]:
    """Orders of all devices. ``batches``: the micro-batches of each path, in order.

    Of the passes that are ready, a device runs the one with the least ``key(kind, position on the
    path, micro-batch)`` that it admits (``admits(device, action, counts)``), and waits otherwise.
    """
    run = _Run(paths, batches, splits, key, admits)
    while run.times:
        now, device = heapq.heappop(run.times)
        run.start(device, now)
    missing = [a for own in run.queues for queue in own for a in queue.actions[queue.at :]]
    if missing:
        msg = f"no device admits {len(missing)} passes, {missing[0]} the first"
        raise RuntimeError(msg)
    return run.orders


@dataclass(slots=True, eq=False)
class _Queue:
    """The passes of one kind and chunk of a device, and what each waits for."""

    actions: list[Action]
    position: int
    before: list[int] | None  # ends, by micro-batch, of the passes before
    ends: list[int]
    followers: tuple[int, ...]  # devices that a pass may wake
    at: int = 0
    key: Key | None = None  # of the head, once it was ready


class _Run:
    def __init__(
        self,
        paths: Sequence[Path],
        batches: Sequence[Sequence[int]],
        splits: bool,  # noqa: FBT001 - private
        key: Callable[[int, int, int], Key],
        admits: Callable[[int, Action, Counts], bool],
    ) -> None:
        self.key, self.admits = key, admits
        stages = 1 + max(device for path in paths for device, _ in path)
        self.queues: list[list[_Queue]] = [[] for _ in range(stages)]
        for path, own in zip(paths, batches, strict=True):
            self._line_up(path, own, splits=splits)
        self.orders: list[Order] = [[] for _ in range(stages)]
        self.counts = [Counts() for _ in range(stages)]
        self.free = [0] * stages
        self.times = [(0, device) for device in range(stages)]

    def _line_up(self, path: Path, batches: Sequence[int], *, splits: bool) -> None:
        """Queues of all places of a path."""
        count = 1 + max(batches)
        forwards, backwards, weights = ([[NEVER] * count for _ in path] for _ in range(3))
        backward = INPUT if splits else BACKWARD
        for i, (device, chunk) in enumerate(path):
            last = i + 1 == len(path)
            after = (device,) if last else (device, path[i + 1][0])
            back = (device, path[i - 1][0]) if i else (device,)
            kinds = [
                (FORWARD, forwards[i - 1] if i else None, forwards[i], after),
                (backward, forwards[i] if last else backwards[i + 1], backwards[i], back),
                (WEIGHT, backwards[i], weights[i], (device,)),
            ]
            for kind, before, ends, followers in kinds[: 3 if splits else 2]:
                actions = [(kind, chunk, m) for m in batches]
                woken = tuple(dict.fromkeys(followers))
                self.queues[device].append(_Queue(actions, i, before, ends, woken))

    def start(self, device: int, now: int) -> None:
        """Start the best pass of a device, if it is free and one is ready."""
        if self.free[device] > now:
            return
        least: Key | None = None
        best: _Queue | None = None
        counts = self.counts[device]
        for queue in self.queues[device]:
            action = queue.actions[queue.at]
            if queue.before is not None and queue.before[action[2]] > now:
                continue
            own = queue.key
            if own is None:
                own = queue.key = self.key(action[0], queue.position, action[2])
            if (least is None or own < least) and self.admits(device, action, counts):
                least, best = own, queue
        if best is not None:
            self._run(device, best, now + 1)

    def _run(self, device: int, queue: _Queue, end: int) -> None:
        action = queue.actions[queue.at]
        queue.at += 1
        queue.key = None
        if queue.at == len(queue.actions):
            self.queues[device].remove(queue)
        queue.ends[action[2]] = end
        self.orders[device].append(action)
        self.counts[device].note(action[0], action[1])
        self.free[device] = end
        for follower in queue.followers:
            heapq.heappush(self.times, (end, follower))
