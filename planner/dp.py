"""Exact dynamic programme over layers, memory and strategy, for chains of any layers.

Inside a stage it keeps, for each strategy of the last layer, the undominated pairs (memory, time);
no rounding, so it is exact, zero-memory layers included. Over the cuts it is the programme of
``planner.cuts``. Written for unequal layers and resharding costs; for long chains of equal layers
the closed form answers the same in less time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from planner.cuts import best_cuts

if TYPE_CHECKING:
    from planner.problem import SearchProblem, Solution

__all__ = ["LayerwiseStages", "solve"]

Point = tuple[int, int, tuple[int, ...]]  # time, memory, strategies so far
Fronts = dict[int, list[Point]]  # by strategy of the last layer


def solve(problem: SearchProblem) -> Solution | None:
    """The optimum, or None if nothing fits."""
    found = best_cuts(problem, LayerwiseStages(problem))
    return found[0] if found else None


class LayerwiseStages:
    """Solves stages layer by layer; all stops of one (stage, first, level) come from one sweep."""

    def __init__(self, problem: SearchProblem) -> None:
        """Bind the problem."""
        self.problem = problem
        self._sweeps: dict[tuple[int, int, int], list[Fronts]] = {}
        self._best: dict[tuple[int, int, int], Point | None] = {}

    def time_ns(self, stage: int, first: int, stop: int) -> int | None:
        """Least time of layers ``first`` .. ``stop - 1`` on ``stage``."""
        best = self._solved(stage, first, stop)
        return None if best is None else best[0] + self.problem.stage_ns[stage]

    def least_ns(self, stage: int, first: int, stop: int) -> float:
        """What that time cannot be below."""
        return self.problem.least_stage_ns(stage, first, stop)

    def strategies(self, stage: int, first: int, stop: int) -> tuple[int, ...]:
        """Strategies of that time, one per layer."""
        best = self._solved(stage, first, stop)
        assert best is not None
        return best[2]

    def _solved(self, stage: int, first: int, stop: int) -> Point | None:
        key = (stage, first, stop)
        if key not in self._best:
            points = [
                point
                for level in self.problem.working_levels
                for front in self._sweep(stage, first, stop, level).values()
                for point in front
            ]
            self._best[key] = min(points, key=lambda p: (p[0], p[2]), default=None)
        return self._best[key]

    def _sweep(self, stage: int, first: int, stop: int, level: int) -> Fronts:
        """Fronts after layer ``stop - 1``, extending what earlier calls have swept."""
        swept = self._sweeps.setdefault((stage, first, level), [])
        while len(swept) < stop - first:
            layer = first + len(swept)
            swept.append(self._extend(swept[-1] if swept else None, stage, layer, level))
        return swept[stop - first - 1]

    def _extend(self, before: Fronts | None, stage: int, layer: int, level: int) -> Fronts:
        problem, c = self.problem, self.problem.chain[layer]
        room = problem.limit[stage] - level
        fronts: Fronts = {}
        for j in problem.allowed[c]:
            if problem.working[c][j] > level:
                continue
            time, memory = problem.time_ns[c][j], problem.memory[stage][c][j]
            points = (
                [(time, memory, (j,))]
                if before is None
                else [
                    (total + time + self._reshard(i, j), held + memory, (*chosen, j))
                    for i, front in before.items()
                    for total, held, chosen in front
                ]
            )
            front = _front([point for point in points if point[1] <= room])
            if front:
                fronts[j] = front
        return fronts

    def _reshard(self, before: int, after: int) -> int:
        return self.problem.reshard_ns[before][after] if self.problem.reshard_ns else 0


def _front(points: list[Point]) -> list[Point]:
    kept: list[Point] = []
    for point in sorted(points):
        if not kept or point[1] < kept[-1][1]:
            kept.append(point)
    return kept
