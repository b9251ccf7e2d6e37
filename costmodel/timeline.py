"""A schedule with durations and traffic -> every event, and idle time by cause.

Devices have four streams: compute, tensor-parallel traffic behind a pass (which the next pass
waits for), hand-over to a neighbour, and data-parallel traffic (gathered parameters, reduced
gradients). ``costmodel.simulate`` gives the ends of the same passes much faster.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

from costmodel.events import Task, run_tasks
from costmodel.schedules import BACKWARD, FORWARD, GATHER, INPUT, LETTERS, PASSES, REDUCE, WEIGHT
from costmodel.schedules.check import describe, inputs, with_transfers
from costmodel.schedules.core import SEND_BACKWARD, SEND_FORWARD
from costmodel.simulate import hop

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from costmodel.schedules import Action, Schedule, Shape
    from costmodel.schedules.check import Node
    from costmodel.simulate import PassTimes

__all__ = [
    "CAUSES",
    "COMPUTE",
    "DATA",
    "HANDOVER",
    "TENSOR",
    "Event",
    "Timeline",
    "Traffic",
    "play",
]

COMPUTE, TENSOR, HANDOVER, DATA = "compute", "tp", "pp", "dp"
# Why a device's compute stream is idle: before its first pass, for another device's pass, for
# traffic that is under way, after its last pass.
WARM_UP, DEPENDENCY, DRAIN = "warm-up", "dependency", "drain"
CAUSES: Final = (WARM_UP, DEPENDENCY, TENSOR, HANDOVER, DATA, DRAIN)


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """What moves beside the passes; all seconds, none by default.

    ``link_s[s]``: one micro-batch between devices s and s + 1 (the last: p - 1 and 0) at the
    link's bandwidth, ``latency_s`` more before it arrives. ``overlaps``: links carry it while
    devices compute; else it blocks the sender. ``tensor_s[device][chunk]``: behind each forward,
    and behind each backward (input gradient) unless ``tensor_back_s`` says otherwise. ``gather_s``
    and ``reduce_s[device][chunk]``: one gather of parameters, one reduction of gradients.
    """

    link_s: Sequence[float] = ()
    latency_s: float = 0.0
    overlaps: bool = True
    tensor_s: Sequence[Sequence[float]] = ()
    tensor_back_s: Sequence[Sequence[float]] = ()
    gather_s: Sequence[Sequence[float]] = ()
    reduce_s: Sequence[Sequence[float]] = ()


class Event(NamedTuple):
    """One piece of work on a stream of a device: a pass, or traffic of one. ``microbatch`` is a
    unit of them for gathers and reductions.
    """

    device: int
    stream: str
    kind: int
    chunk: int
    microbatch: int
    start_s: float
    end_s: float

    @property
    def name(self) -> str:
        """``F3``; ``F3.1`` on the device's second chunk."""
        return f"{LETTERS[self.kind]}{self.microbatch}" + (f".{self.chunk}" * bool(self.chunk))


@dataclass(frozen=True, slots=True)
class Timeline:
    """``events`` in the order of each device's list, with the positions of those that each one
    waits for in ``waits``. ``idle_s[device][cause]`` is time of its compute stream.
    """

    events: tuple[Event, ...]
    waits: tuple[tuple[int, ...], ...]
    idle_s: tuple[dict[str, float], ...]

    @property
    def makespan_s(self) -> float:
        """End of the last event."""
        return max(event.end_s for event in self.events)

    @property
    def spans_s(self) -> tuple[float, ...]:
        """First start to last end of each device's passes."""
        own: list[list[Event]] = [[] for _ in self.idle_s]
        for event in self.events:
            if event.stream == COMPUTE:
                own[event.device].append(event)
        return tuple(each[-1].end_s - each[0].start_s for each in own)

    @property
    def exposed_s(self) -> tuple[float, ...]:
        """Seconds for which each device waits for traffic that is under way."""
        return tuple(sum(idle[c] for c in (TENSOR, HANDOVER, DATA)) for idle in self.idle_s)


def play(
    schedule: Schedule, shape: Shape, times: PassTimes, traffic: Traffic | None = None
) -> Timeline:
    """Run every event of a schedule. Raises CycleError if passes wait for one another."""
    score = _Score(schedule, shape, times, traffic or Traffic())
    tasks = score.tasks()
    starts, ends = run_tasks(tasks, label=score.label)
    events = tuple(
        Event(*where, start, end)
        for where, start, end in zip(score.wheres, starts, ends, strict=True)
    )
    waits = tuple(task.waits for task in tasks)
    own: list[list[int]] = [[] for _ in range(shape.stages)]
    for number, event in enumerate(events):
        own[event.device].append(number)
    makespan = max(ends)
    idle = tuple(_idle(numbers, events, waits, makespan) for numbers in own)
    return Timeline(events, waits, idle)


class _Score:
    """The tasks of all streams, written down device by device."""

    def __init__(
        self, schedule: Schedule, shape: Shape, times: PassTimes, traffic: Traffic
    ) -> None:
        self.shape, self.times, self.traffic = shape, times, traffic
        paths = schedule.paths(shape)
        self.lists = with_transfers(schedule, shape)
        self.inputs = inputs(paths, self.lists)
        self.at = {place: (path, i) for path in paths for i, place in enumerate(path)}
        self.wheres: list[tuple[int, str, int, int, int]] = []
        self.written: list[Task] = []
        self.keys: list[list[tuple[str, Node]]] = []  # what each task waits for, by name
        self.number: dict[tuple[str, Node], int] = {}

    def tasks(self) -> list[Task]:
        """All tasks, those that each waits for by number."""
        for device, actions in enumerate(self.lists):
            self._device(device, actions)
        return [
            task._replace(waits=(*task.waits, *(self.number[key] for key in keys)))
            for task, keys in zip(self.written, self.keys, strict=True)
        ]

    def label(self, number: int) -> str:
        """A task in words."""
        device, _, kind, chunk, batch = self.wheres[number]
        return describe(device, (kind, chunk, batch))

    def _device(self, device: int, actions: Sequence[Action]) -> None:
        seconds = {
            chunk: self.times.of(device, chunk, self.shape.microbatches)
            for own, chunk in self.at
            if own == device
        }
        blocked: tuple[int, ...] = ()  # what the next pass waits for: traffic of the one before
        last: tuple[int, ...] = ()
        gathered: dict[tuple[int, int], int] = {}  # by chunk and unit, the newest
        done = actions[0]
        for action in actions:
            kind, chunk, batch = action
            if kind in PASSES:
                done = action
                needed = gathered.get((chunk, batch // self.shape.unit_size))
                waits = blocked if needed is None or kind == WEIGHT else (*blocked, needed)
                number = self._pass(device, action, seconds[chunk][kind][batch], waits)
                last, blocked = (number,), ()
                if self.traffic.tensor_s and kind in (FORWARD, BACKWARD, INPUT):
                    back = self.traffic.tensor_back_s or self.traffic.tensor_s
                    table = self.traffic.tensor_s if kind == FORWARD else back
                    own = table[device][chunk]
                    blocked = (self._add(device, TENSOR, action, own, waits=last),)
                    self.number["end", (device, action)] = blocked[0]
            elif kind in (SEND_FORWARD, SEND_BACKWARD):
                self._send(device, action, done)
            elif kind == GATHER:
                own = self.traffic.gather_s[device][chunk] if self.traffic.gather_s else 0.0
                gathered[chunk, batch] = self._add(device, DATA, action, own, waits=last)
            elif kind == REDUCE:
                own = self.traffic.reduce_s[device][chunk] if self.traffic.reduce_s else 0.0
                self._add(device, DATA, action, own, waits=last)

    def _pass(self, device: int, action: Action, seconds: float, waits: tuple[int, ...]) -> int:
        source = self.inputs[device, action]
        keys = []
        if source is not None:
            keys.append(("end" if source[0] == device else "sent", source))
        number = self._add(device, COMPUTE, action, seconds, waits=waits, keys=keys)
        self.number["end", (device, action)] = number
        return number

    def _send(self, device: int, action: Action, done: Action) -> None:
        """Hand the result of ``done`` over: on the link, or on the compute stream."""
        path, i = self.at[device, action[1]]
        forward = action[0] == SEND_FORWARD
        peer = path[i + 1 if forward else i - 1][0]
        ends = (device, peer) if forward else (peer, device)
        traffic = self.traffic
        own = traffic.link_s[hop(*ends, self.shape.stages)] if traffic.link_s else 0.0
        keys = [("end", (device, done))]
        if traffic.overlaps:
            number = self._add(device, HANDOVER, action, own, keys=keys, peer=peer)
        else:
            number = self._add(device, COMPUTE, action, own + traffic.latency_s, keys=keys)
        self.number["sent", (device, done)] = number

    def _add(
        self,
        device: int,
        stream: str,
        action: Action,
        seconds: float,
        *,
        waits: tuple[int, ...] = (),
        keys: Sequence[tuple[str, Node]] = (),
        peer: int = -1,
    ) -> int:
        arrives = self.traffic.overlaps and any(what == "sent" for what, _ in keys)
        lag = self.traffic.latency_s if arrives else 0.0
        self.written.append(Task((device, stream, peer), seconds, waits, lag))
        self.keys.append(list(keys))
        self.wheres.append((device, stream, *action))
        return len(self.written) - 1


def _idle(
    numbers: Sequence[int],
    events: Sequence[Event],
    waits: Sequence[tuple[int, ...]],
    makespan: float,
) -> dict[str, float]:
    """Seconds without compute by cause, of the device whose events have ``numbers``. A wait for
    traffic counts as traffic from the moment it starts to move, before that as a dependency.
    """
    idle = dict.fromkeys(CAUSES, 0.0)
    now: float | None = None
    reduced = 0.0
    for number in numbers:
        event = events[number]
        if event.kind == REDUCE:
            reduced = max(reduced, event.end_s)
        if event.stream != COMPUTE:
            continue
        if now is None:
            idle[WARM_UP] += event.start_s
        elif event.start_s > now:
            for cause, seconds in _causes(now, event.start_s, [events[i] for i in waits[number]]):
                idle[cause] += seconds
        now = event.end_s
    end = now or 0.0
    idle[DATA] += max(0.0, reduced - end)
    idle[DRAIN] += makespan - max(end, reduced)
    return idle


def _causes(start: float, end: float, before: list[Event]) -> Iterator[tuple[str, float]]:
    """The parts of a wait from ``start`` to ``end`` for the last of ``before``."""
    binding = max(before, key=lambda event: event.end_s)
    moving = max(start, min(end, binding.start_s))
    if binding.stream == COMPUTE:
        moving = end
    yield DEPENDENCY, moving - start
    if binding.stream != COMPUTE:
        yield binding.stream, end - moving
