"""Sharper bounds from the longest paths of a candidate's schedule.

Whatever the cut, the step takes at least the length of any path through the schedule, and the mean
of any paths. The length is a sum over stages of what each adds by the blocks it holds
(``planner.pathstages``), so a dynamic programme finds the cut that makes it least.

Say n equal blocks stand on p stages, the fullest of which holds K.

K is an even share, n / p rounded up: then the stages lack D = p K - n blocks of being full. For up
to two, all places where they may lack are tried, and the greatest of all paths counts. For more,
the mean of all paths takes its place. A path is the longest of one run of the schedule, with the
cut that makes the paths before it shortest.

K is more: one of the stages holds K, no other holds more. For each stage that may be the one, the
longest path of a run that prefers it.

A path counts for all candidates with its schedule and shape. Where two directions share the devices
every stage holds an even share, and no block lacks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from costmodel.criticalpath import num_traced
from planner.bounds import NEVER_S
from planner.pathstages import PathStages, least_cut

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from costmodel.criticalpath import CriticalPath
    from planner.bounds import CandidateBounds
    from planner.build import CandidateProblem

__all__ = ["PathBounds"]

MOST_PATHS = 8
MOST_THROUGH = 3  # paths through one fullest stage
MOST_PASSES = 200_000  # of a run that is traced
PAIR = 2
WORTH = 1e-3  # part by which another path must raise the bound


class PathBounds:
    """Bounds of candidates; the paths of a shape are found once."""

    def __init__(self) -> None:
        """No path is known yet."""
        self._paths: dict[object, list[CriticalPath]] = {}

    def of(self, problem: CandidateProblem, bounds: CandidateBounds, enough_s: float) -> float:
        """Least step of a candidate's layouts; no more paths are looked for once it is
        ``enough_s``.
        """
        if problem.moves_blocks or bounds.times.main is None or not problem.schedule.drains:
            return 0.0
        fuller_s = bounds.of_fuller(problem.candidate)
        stages = PathStages(problem, bounds, enough_s)
        if num_traced(problem.schedule, problem.shape) > MOST_PASSES:
            return 0.0
        even_s = self._even(stages, enough_s)
        if fuller_s < min(even_s, enough_s):
            fuller_s = max(fuller_s, self._fuller(stages, min(even_s, enough_s)))
        return min(even_s, fuller_s)

    def _known(self, stages: PathStages, fullest: int | None) -> list[CriticalPath]:
        """The paths of a shape where that stage is the fullest one (None: where all may be)."""
        return self._paths.setdefault((stages.problem.schedule.name, stages.shape, fullest), [])

    def _even(self, stages: PathStages, enough_s: float) -> float:
        """Least step where the fullest stage holds an even share, rounded up."""
        own = _Even(stages)
        paths = self._known(stages, None)
        for path in paths:
            own.add(path)
        found, counts = own.least()
        while len(paths) < MOST_PATHS and _step_s(stages, found) < enough_s:
            paths.append(stages.path(counts))
            own.add(paths[-1])
            before = found
            found, counts = own.least()
            if len(paths) > own.lacking and found < before * (1 + WORTH):
                break
        return _step_s(stages, found)

    def _fuller(self, stages: PathStages, enough_s: float) -> float:
        """Least step where a stage holds more blocks than that, ``enough_s`` if it is no less."""
        least_s = enough_s
        for most in range(stages.even + 1, stages.num_blocks + 1):
            works = stages.works_s(most)
            if _step_s(stages, works.min()) >= enough_s:
                break
            for stage in np.flatnonzero(works < stages.limit_s):
                own = self._fullest(stages, int(stage), most, least_s)
                least_s = min(least_s, max(own, _step_s(stages, works[stage])))
        return least_s

    def _fullest(self, stages: PathStages, stage: int, most: int, enough_s: float) -> float:
        """Least step where that stage holds ``most`` blocks and no other more."""
        paths = self._known(stages, stage)
        best, counts = 0.0, stages.spread(stage, most)
        for number in range(MOST_THROUGH):
            if number == len(paths):
                paths.append(stages.path(counts, stage))
            table = stages.table(paths[number], most)
            table[stage, :most] = NEVER_S
            passes_s, counts = least_cut(table, stages.num_blocks)
            before, best = best, max(best, passes_s + stages.fixed_of(paths[number]))
            if _step_s(stages, best) >= enough_s or best < before * (1 + WORTH):
                break
        return _step_s(stages, best)


def _step_s(stages: PathStages, passes_s: float) -> float:
    """The step that takes at least ``passes_s`` for its passes."""
    problem = stages.problem
    return problem.context.whole_step_s(passes_s, problem.candidate.num_ranks)


class _Even:
    """The paths of a candidate whose stages hold an even share, rounded up, or less."""

    def __init__(self, stages: PathStages) -> None:
        self.stages = stages
        self.full = np.full(stages.shape.stages, stages.even)
        self.lacking = int(self.full.sum()) - stages.num_blocks
        if stages.problem.schedule.copies > 1:  # an even share of all layers, the ends included
            self.full[:], self.lacking = stages.problem.problem.least_layers, 0
            self.full[[0, -1]] -= min(self.full[0], stages.ends)
        self.fixed: list[float] = []
        self.tables: list[NDArray[np.float64]] = []

    def add(self, path: CriticalPath) -> None:
        """One path more."""
        self.fixed.append(self.stages.fixed_of(path))
        self.tables.append(self.stages.table(path, int(self.full.max())))

    def least(self) -> tuple[float, NDArray[np.int64]]:
        """Least seconds of the passes, and how many blocks the stages hold then."""
        if not self.tables:
            return 0.0, self._counts(())
        tables, fixed = np.array(self.tables), np.array(self.fixed)
        if self.lacking > PAIR:
            passes_s, counts = least_cut(tables.mean(axis=0), self.stages.num_blocks)
            return passes_s + float(fixed.mean()), counts
        stages = np.arange(len(self.full))
        lengths = fixed + tables[:, stages, self.full].sum(axis=1)
        if not self.lacking:
            return float(lengths.max()), self.full
        less = tables[:, stages, self.full - 1] - tables[:, stages, self.full]
        if self.lacking == 1:
            longest = (lengths[:, None] + less).max(axis=0)
            return float(longest.min()), self._counts((longest.argmin(),))
        both = less[:, :, None] + less[:, None, :]
        if self.full.min() >= PAIR:
            twice = tables[:, stages, self.full - PAIR] - tables[:, stages, self.full]
        else:
            twice = np.full(less.shape, NEVER_S)
        both[:, stages, stages] = twice
        longest = (lengths[:, None, None] + both).max(axis=0)
        return float(longest.min()), self._counts(np.unravel_index(longest.argmin(), longest.shape))

    def _counts(self, places: tuple[np.int64, ...] | tuple[()]) -> NDArray[np.int64]:
        """What the stages hold where one block lacks at each of ``places``."""
        counts = self.full.copy()
        for place in places:
            counts[place] -= 1
        return counts
