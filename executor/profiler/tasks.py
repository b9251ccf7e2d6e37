"""What a session does, one task after another: a point in each of its rounds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from executor.profiler.memory import RECOMPUTES
from executor.profiler.operatortimes import OperatorPoint, operator_points
from executor.profiler.points import Point, WrappingPoint, layer_points, wrapping_points

if TYPE_CHECKING:
    from costmodel.layout import Recompute
    from executor.profiler.points import Request

__all__ = ["HeldPoint", "SessionPlan", "Task", "tasks_of"]

ROUNDS: Final = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionPlan:
    """What a session measures, on what, for how long. ``device_name``: what clusters call it."""

    request: Request
    device: str
    device_name: str
    budget_s: float | None = None
    rounds: int = ROUNDS
    operators: bool = True
    memory: bool = True
    wrapping: bool = True
    date: str | None = None


@dataclass(frozen=True, slots=True)
class HeldPoint:
    """The memory of a layer's point, by what it recomputes."""

    point: Point
    recompute: Recompute

    def __str__(self) -> str:
        return f"memory of {self.point}, recompute {self.recompute}"


@dataclass(frozen=True, slots=True)
class Task:
    """A point in one round."""

    point: Point | OperatorPoint | HeldPoint | WrappingPoint
    round: int

    @property
    def key(self) -> str:
        """By which a journal knows it."""
        return f"{self.round}: {self.point}"


def tasks_of(plan: SessionPlan) -> tuple[list[Task], list[str]]:
    """The tasks of a session in their order, and why points are left out. Raises ``InputError``
    where the executor has no such layers, or no point is left.
    """
    points, notes = layer_points(plan.request)
    order: list[Point | OperatorPoint | WrappingPoint] = [*points]
    if plan.wrapping:
        order += wrapping_points(points)
    if plan.operators:
        order += operator_points(plan.device)
    tasks = [Task(point, number) for number in range(plan.rounds) for point in order]
    if plan.memory:
        tasks[len(order) : len(order)] = [Task(own, 0) for own in _held(points, plan.request)]
    return tasks, notes


def _held(points: list[Point], request: Request) -> list[HeldPoint]:
    """Of each layer and shard the least micro-batch, since bytes grow with it in proportion, and
    what a block may recompute.
    """
    least = min(request.batches)
    return [
        HeldPoint(point, recompute)
        for point in points
        if point.batch == least
        for recompute in (RECOMPUTES if point.layer.startswith("block") else RECOMPUTES[:1])
    ]
