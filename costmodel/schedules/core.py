"""What a schedule is: per device a list of actions, and the paths that micro-batches take.

An action is (kind, chunk, micro-batch). ``chunk`` counts the shares of the model that the device
holds; of ``GATHER`` and ``REDUCE`` the third number is a unit of micro-batches. Plain tuples, since
a long run has half a million of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = [
    "BACKWARD",
    "FORWARD",
    "GATHER",
    "INPUT",
    "LETTERS",
    "PASSES",
    "RECEIVE_BACKWARD",
    "RECEIVE_FORWARD",
    "REDUCE",
    "SEND_BACKWARD",
    "SEND_FORWARD",
    "WEIGHT",
    "Action",
    "Order",
    "Path",
    "Place",
    "Schedule",
    "Shape",
    "both_ways",
    "looped",
    "vee",
]

# BACKWARD is a whole backward pass; INPUT and WEIGHT are its two halves.
FORWARD, BACKWARD, INPUT, WEIGHT, GATHER, REDUCE = range(6)
SEND_FORWARD, RECEIVE_FORWARD, SEND_BACKWARD, RECEIVE_BACKWARD = range(6, 10)
PASSES: Final = (FORWARD, BACKWARD, INPUT, WEIGHT)
LETTERS: Final = ("F", "B", "B", "W", "G", "R", "SF", "RF", "SB", "RB")

Action = tuple[int, int, int]
Order = list[Action]
Place = tuple[int, int]  # device, chunk of that device
Path = tuple[Place, ...]  # places of a micro-batch in the order of the model


@dataclass(frozen=True, slots=True)
class Shape:
    """Size of a pipeline: devices, chunks that a micro-batch crosses on each of them, micro-batches
    of a step, and the micro-batches of a unit where the schedule has units.
    """

    stages: int
    chunks: int
    microbatches: int
    unit: int = 0

    @property
    def unit_size(self) -> int:
        """Micro-batches of a unit, as many as stages unless something else is asked for."""
        return self.unit or self.stages


def looped(shape: Shape) -> tuple[Path, ...]:
    """Chunk 0 of every device, then chunk 1, ...: device p - 1 hands over to device 0."""
    return (tuple((s, c) for c in range(shape.chunks) for s in range(shape.stages)),)


def vee(shape: Shape) -> tuple[Path, ...]:
    """Down the devices and up again: device 0 holds the first and the last part of the model."""
    down, up = range(shape.stages), range(shape.stages)[::-1]
    return (tuple((s, c) for c in range(shape.chunks) for s in (up if c % 2 else down)),)


def both_ways(inner: Callable[[Shape], tuple[Path, ...]]) -> Callable[[Shape], tuple[Path, ...]]:
    """Two copies of the model: half of the micro-batches goes through the devices in order, the
    other half through a second set of chunks in reverse.
    """

    def paths(shape: Shape) -> tuple[Path, ...]:
        (there,) = inner(shape)
        back = tuple((shape.stages - 1 - s, shape.chunks + c) for s, c in there)
        return there, back

    return paths


def _nothing(_shape: Shape) -> None:
    return None


@cache
def _folds(paths: Callable[[Shape], tuple[Path, ...]], chunks: int) -> bool:
    path, *_ = paths(Shape(2, chunks, 2))
    return path[-1][0] == path[0][0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """One schedule.

    ``orders(shape)``: the passes (and gathers, reductions) of every device, one after another.
    ``held(shape)``: micro-batches of its whole share whose activations each device keeps at most,
    from a forward pass to the end of its backward pass (None: read off the orders), and
    ``least_held(shape)`` what every device is sure to hold at its peak (None: what ``held`` says).
    ``late_weights(shape, device)``: weight gradients that a device has left at most when its last
    input gradient is done, where backward passes are split (None: perhaps all of them).
    ``rule(shape)``: why it cannot run so, with the nearest legal value; None if it can.
    ``chunks``: the numbers of chunks that a micro-batch may cross on a device, None: two or more.
    ``splits``: weight gradients are passes of their own. ``fill_speed``: how many times faster than
    a pipeline of as many chunks that does not split it fills and drains, about, where F = B = W;
    searches expect it, nothing is promised. ``steady``: after a warm-up it repeats
    the same passes for every further group of p micro-batches. ``copies``: of the weights.
    ``drains``: gradients of a step are applied after all of its passes; where not, weights change
    under way and training is not equivalent to that on one device. ``gathers_by_unit``: parameters
    that are sharded are gathered once a pass for a unit of micro-batches, not for each.
    """

    name: str
    summary: str
    orders: Callable[[Shape], list[Order]]
    held: Callable[[Shape], tuple[float, ...] | None] = _nothing
    least_held: Callable[[Shape], float] | None = None
    late_weights: Callable[[Shape, int], int] | None = None
    paths: Callable[[Shape], tuple[Path, ...]] = looped
    rule: Callable[[Shape], str | None] = _nothing
    chunks: tuple[int, ...] | None = (1,)
    splits: bool = False
    fill_speed: int = 1
    steady: bool = True
    copies: int = 1
    drains: bool = True
    gathers_by_unit: bool = False

    def microbatches_per_gather(self, stages: int) -> int:
        """Micro-batches that share one gather of sharded parameters: a unit of the usual size."""
        return stages if self.gathers_by_unit else 1

    @property
    def folds(self) -> bool:
        """Whether the model ends on the device where it starts."""
        return _folds(self.paths, self.usual_chunks)

    @property
    def returns_whole(self) -> bool:
        """Whether micro-batches drain by whole backward passes through one copy of the weights, so
        that the bounds of a pipeline with flush hold.
        """
        return not self.splits and self.copies == 1 and self.drains

    @property
    def usual_chunks(self) -> int:
        """Chunks that a micro-batch crosses on a device unless something else is asked for."""
        return self.chunks[0] if self.chunks else 2

    def microbatch_paths(self, shape: Shape) -> list[int]:
        """The path of each micro-batch: with two directions every unit of p is halved."""
        if self.copies == 1:
            return [0] * shape.microbatches
        half = shape.stages // 2
        return [int(m % shape.stages >= half) for m in range(shape.microbatches)]

    def problem(self, shape: Shape) -> str | None:
        """Why the schedule cannot run so, with the nearest legal value; None if it can."""
        if self.chunks is None:
            if shape.chunks == 1:
                return f"{self.name} needs at least 2 chunks a stage"
        elif shape.chunks not in self.chunks:
            many = "one chunk" if self.chunks == (1,) else f"{self.chunks[0]} chunks"
            return f"{self.name} has {many} a stage, not {shape.chunks}; nearest: {self.chunks[0]}"
        if shape.stages == 1 and shape.chunks > 1:
            return f"{self.name} needs at least 2 stages"
        return self.rule(shape)
