"""Two chunks a device, placed as a V: device 0 holds the first and the last part of the model."""

from __future__ import annotations

from functools import lru_cache
from itertools import product
from typing import TYPE_CHECKING

from costmodel.schedules.core import (
    BACKWARD,
    FORWARD,
    INPUT,
    WEIGHT,
    Action,
    Order,
    Schedule,
    Shape,
    vee,
)
from costmodel.schedules.greedy import CACHED, list_schedule

if TYPE_CHECKING:
    from collections.abc import Callable

    from costmodel.schedules.greedy import Counts

__all__ = ["DUALPIPE_V", "V_HALF", "V_MIN", "ZBV"]

PERIOD = 6  # passes of one micro-batch on a device: two chunks, three passes each
Slopes = tuple[int, int, int, int]


def _zbv(shape: Shape) -> list[Order]:
    """Qi et al. 2023, section 6, as torch.distributed.pipelining has it: built for at least
    2 p - 1 micro-batches, those beyond the real ones left out.
    """
    orders = []
    for stage in range(shape.stages):
        order = _zbv_order(shape.stages, stage, max(2 * shape.stages - 1, shape.microbatches))
        orders.append([action for action in order if action[2] < shape.microbatches])
    return orders


def _zbv_order(stages: int, stage: int, count: int) -> Order:
    ahead = 2 * (stages - stage) - 1  # forwards of chunk 0 before the first of chunk 1
    turn = stages - stage
    order: Order = [(FORWARD, 0, m) for m in range(ahead)]
    for m in range(stage):
        order += [(FORWARD, 1, m), (FORWARD, 0, ahead + m)]
    for m in range(turn):
        order += [(FORWARD, 1, stage + m), (INPUT, 1, m), (WEIGHT, 1, m)]
    steady = count - stages
    for m in range(steady):
        first = ahead + stage + m
        if first < count:
            order.append((FORWARD, 0, first))
        order += [(INPUT, 0, m), (WEIGHT, 0, m)]
        order += [(FORWARD, 1, stages + m), (INPUT, 1, turn + m), (WEIGHT, 1, turn + m)]
    for m in range(stage):
        order += [(INPUT, 0, steady + m), (INPUT, 1, turn + steady + m)]
    for m in range(turn):
        order += [(INPUT, 0, steady + stage + m), (WEIGHT, 0, steady + m)]
    order += [(WEIGHT, 1, m) for m in range(turn + steady, count)]
    return order + [(WEIGHT, 0, m) for m in range(steady + turn, count)]


def _dualpipe_v(shape: Shape) -> list[Order]:
    """DeepSeek's DualPipeV, as torch.distributed.pipelining has it; a forward and a backward that
    it overlaps stand one behind the other.
    """
    return [_Dual(shape, stage).order() for stage in range(shape.stages)]


class _Dual:
    """One device's list: passes of a kind and chunk come in the order of micro-batches."""

    def __init__(self, shape: Shape, stage: int) -> None:
        self.shape, self.stage = shape, stage
        self.found: Order = []
        self.next = {(kind, chunk): 0 for kind in (FORWARD, BACKWARD) for chunk in (0, 1)}
        self.waiting: list[Action] = []

    def forward(self, chunk: int) -> None:
        self._add(FORWARD, FORWARD, chunk)

    def backward(self, chunk: int, *, split: bool = False) -> None:
        """A backward pass; split, its weight gradient is put off."""
        batch = self._add(INPUT if split else BACKWARD, BACKWARD, chunk)
        if split:
            self.waiting.append((WEIGHT, chunk, batch))

    def weight(self) -> None:
        """The oldest weight gradient that was put off, if any."""
        if self.waiting:
            self.found.append(self.waiting.pop(0))

    def _add(self, kind: int, counter: int, chunk: int) -> int:
        batch = self.next[counter, chunk]
        self.next[counter, chunk] += 1
        self.found.append((kind, chunk, batch))
        return batch

    def order(self) -> Order:
        behind = self.shape.stages - self.stage - 1
        here = self.stage + 1
        for _ in range(2 * behind):
            self.forward(0)
        for _ in range(here):
            self.forward(0)
            self.forward(1)
        for _ in range(behind):
            self.backward(1, split=True)
            self.weight()
            self.forward(1)
        for _ in range(self.shape.microbatches - 2 * self.shape.stages + here):
            self.forward(0)
            self.backward(1)
            self.forward(1)
            self.backward(0)
        for _ in range(behind):
            self.backward(1)
            self.forward(1)
            self.backward(0)
        split = self._turn(here)
        for _ in range(behind):
            self.weight()
            self.backward(0, split=split)
        for _ in range(here):
            self.weight()
        return self.found

    def _turn(self, count: int) -> bool:
        """Backwards of both chunks, split from the middle on: at an odd device one pass earlier."""
        split = False
        for i in range(count):
            middle = i == count // 2
            split = split or (middle and self.stage % 2 == 1)
            self.backward(1, split=split)
            split = split or (middle and self.stage % 2 == 0)
            self.backward(0, split=split)
        return split


@lru_cache(maxsize=64)
def _building_block(stages: int, slopes: Slopes) -> tuple[tuple[int, ...], ...]:
    """Start slots of a micro-batch on each device: forward of chunk 0 and 1, input gradient of
    chunk 1 and 0. ``slopes`` are the slots between neighbours on these four legs. The waits at the
    three turns are the shortest with which no device runs two passes of the repeated block at once.
    """
    down, up = range(stages), range(stages)[::-1]

    def placed(waits: tuple[int, ...]) -> list[tuple[int, ...]]:
        legs, at = [], 0
        for devices, slope, wait in zip((down, up, down, up), slopes, (0, *waits), strict=True):
            at += wait
            starts = {device: at + slope * n for n, device in enumerate(devices)}
            at = max(starts.values())
            legs.append(starts)
        return [tuple(leg[device] for leg in legs) for device in down]

    for waits in sorted(
        product(range(1, PERIOD + 1), repeat=3), key=lambda each: (sum(each), each)
    ):
        found = placed(waits)
        if all(len({start % PERIOD for start in starts}) == len(starts) for starts in found):
            return tuple(found)
    raise AssertionError(slopes)


def _repeated(slopes: Slopes, late_weights: int) -> Callable[[Shape], list[Order]]:
    """A building block repeated every six slots (Qi et al. 2024, "Pipeline Parallelism with
    Controllable Memory"): forwards and input gradients in its order, weight gradients in the gaps,
    or when more than ``late_weights`` of them wait.
    """

    @lru_cache(maxsize=CACHED)
    def orders(shape: Shape) -> list[Order]:
        block = _building_block(shape.stages, slopes)
        passes = ((FORWARD, 0), (FORWARD, 1), (INPUT, 1), (INPUT, 0))
        turn: list[dict[Action, int]] = []
        for starts in block:
            slots = [
                (start + PERIOD * m, (*each, m))
                for start, each in zip(starts, passes, strict=True)
                for m in range(shape.microbatches)
            ]
            turn.append({action: n for n, (_, action) in enumerate(sorted(slots))})

        def key(kind: int, _position: int, batch: int) -> tuple[int, ...]:
            return int(kind == WEIGHT), batch

        def admits(device: int, action: Action, counts: Counts) -> bool:
            if action[0] == WEIGHT:
                return True
            in_turn = turn[device][action] == counts.passes
            return in_turn and counts.waiting_weights <= late_weights

        batches = [range(shape.microbatches)]
        return list_schedule(vee(shape), batches, splits=True, key=key, admits=admits)

    return orders


def _enough(shape: Shape) -> str | None:
    least = 2 * shape.stages
    if shape.microbatches >= least:
        return None
    return (
        f"dualpipe-v needs at least 2 x stages = {least} micro-batches, not "
        f"{shape.microbatches}; nearest: {least}"
    )


def _half_held(shape: Shape) -> tuple[float, ...] | None:
    """Half of a pipeline and one, where that is even and filled."""
    p = shape.stages
    return None if p % 2 or shape.microbatches < 2 * p else (p / 2 + 1,) * p


ZBV = Schedule(
    name="zbv",
    summary="no bubble where F = B = W, at 1F1B's memory",
    orders=_zbv,
    late_weights=lambda _shape, stage: 2 * stage + 1,
    paths=vee,
    chunks=(2,),
    splits=True,
    fill_speed=6,
)
DUALPIPE_V = Schedule(
    name="dualpipe-v",
    summary="forwards and backwards of a V side by side",
    orders=_dualpipe_v,
    late_weights=lambda _shape, stage: stage + 1,
    paths=vee,
    rule=_enough,
    chunks=(2,),
    splits=True,
    fill_speed=3,
)
V_HALF = Schedule(
    name="v-half",
    summary="half of 1F1B's activations, half of its bubble",
    orders=_repeated((2, 1, 2, 1), 1),
    held=_half_held,
    least_held=lambda shape: (min(shape.stages, shape.microbatches) + 1) / 2,
    late_weights=lambda _shape, _stage: 2,
    paths=vee,
    chunks=(2,),
    splits=True,
)
V_MIN = Schedule(
    name="v-min",
    summary="a third of 1F1B's activations, two thirds of its bubble",
    orders=_repeated((1, 1, 1, 1), 2),
    late_weights=lambda _shape, _stage: 3,
    paths=vee,
    chunks=(2,),
    splits=True,
)
