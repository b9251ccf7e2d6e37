"""Closed-form solver: counts inside a stage, a dynamic programme over the cuts.

For problems without resharding costs. All classes of a stage but the most frequent one are
enumerated by their undominated mixes (a stage holds few of them: an embedding, a head, some dense
layers before experts); the most frequent one takes the closed form of ``planner.counts``.
"""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING

from planner.counts import best_counts, undominated
from planner.cuts import best_cuts

if TYPE_CHECKING:
    from planner.problem import SearchProblem, Solution

__all__ = ["CountingStages", "solve"]

Mix = tuple[tuple[int, int], ...]  # (strategy, how many), ...
Answer = tuple[int, tuple[Mix, ...]]  # time, mix of each class


def solve(problem: SearchProblem) -> Solution | None:
    """The optimum, or None if nothing fits. Raises ValueError if resharding has a cost."""
    if problem.reshard_ns:
        msg = "the closed form does not know resharding costs: use the dynamic programme"
        raise ValueError(msg)
    found = best_cuts(problem, CountingStages(problem))
    return found[0] if found else None


class CountingStages:
    """Solves stages by class counts and remembers them: stages that are alike are one."""

    def __init__(self, problem: SearchProblem) -> None:
        """Bind the problem."""
        self.problem = problem
        self._rows = {}  # type: dict[tuple[object, int], int]
        self._row = [
            self._rows.setdefault((problem.memory[s], problem.limit[s]), s)
            for s in range(problem.num_stages)
        ]
        self._answers: dict[tuple[int, tuple[int, ...]], Answer | None] = {}
        self._options: dict[tuple[int, int, int], list[tuple[int, int, int]]] = {}
        self._fronts: dict[tuple[int, int, int, int], list[tuple[int, int, Mix]]] = {}

    def time_ns(self, stage: int, first: int, stop: int) -> int | None:
        """Least time of layers ``first`` .. ``stop - 1`` on ``stage``."""
        answer = self._answer(stage, first, stop)
        return None if answer is None else answer[0] + self.problem.stage_ns[stage]

    def strategies(self, stage: int, first: int, stop: int) -> tuple[int, ...]:
        """Strategies of that answer; equal layers in order of strategy number."""
        answer = self._answer(stage, first, stop)
        assert answer is not None
        pools = [iter([j for j, count in sorted(mix) for _ in range(count)]) for mix in answer[1]]
        return tuple(next(pools[c]) for c in self.problem.chain[first:stop])

    def _answer(self, stage: int, first: int, stop: int) -> Answer | None:
        key = (self._row[stage], self.problem.class_counts(first, stop))
        if key not in self._answers:
            self._answers[key] = self._solve(*key)
        return self._answers[key]

    def _solve(self, stage: int, counts: tuple[int, ...]) -> Answer | None:
        """Try each amount of working memory that may be set aside, the most generous first; a
        smaller one is only worth trying if it leaves options that are fast enough.
        """
        best: Answer | None = None
        for level in reversed(self.problem.working_levels):
            if best is not None and self._fastest(stage, counts, level) >= best[0]:
                continue
            found = self._within(stage, counts, level)
            if found is not None and (best is None or found[0] < best[0]):
                best = found
        return best

    def _fastest(self, stage: int, counts: tuple[int, ...], level: int) -> float:
        """Time of these layers if each took the fastest option within the level."""
        total = 0.0
        for c, count in enumerate(counts):
            options = self._allowed(stage, c, level)
            if count:
                total += count * options[0][0] if options else float("inf")
        return total

    def _within(self, stage: int, counts: tuple[int, ...], level: int) -> Answer | None:
        options = [self._allowed(stage, c, level) for c in range(len(counts))]
        if any(count and not own for count, own in zip(counts, options, strict=True)):
            return None
        room = self.problem.limit[stage] - level
        main = max(
            range(len(counts)), key=lambda c: (counts[c] > 0, len(options[c]) > 1, counts[c])
        )
        others = [
            self._mixes_of(stage, c, level, count) if c != main else [(0, 0, ())]
            for c, count in enumerate(counts)
        ]
        best: Answer | None = None
        for choice in product(*others):
            taken = sum(memory for _, memory, _ in choice)
            found = best_counts(options[main], counts[main], room - taken)
            if found is None:
                continue
            time = found[0] + sum(time for time, _, _ in choice)
            if best is None or time < best[0]:
                mixes = [mix for _, _, mix in choice]
                mixes[main] = found[1]
                best = (time, tuple(mixes))
        return best

    def _mixes_of(self, stage: int, c: int, level: int, count: int) -> list[tuple[int, int, Mix]]:
        key = (stage, c, level, count)
        if key not in self._fronts:
            self._fronts[key] = _mixes(self._allowed(stage, c, level), count)
        return self._fronts[key]

    def _allowed(self, stage: int, c: int, level: int) -> list[tuple[int, int, int]]:
        key = (stage, c, level)
        if key not in self._options:
            problem = self.problem
            self._options[key] = undominated(
                [
                    (problem.time_ns[c][j], problem.memory[stage][c][j], j)
                    for j in problem.allowed[c]
                    if problem.working[c][j] <= level
                ]
            )
        return self._options[key]


def _mixes(options: list[tuple[int, int, int]], count: int) -> list[tuple[int, int, Mix]]:
    """The undominated ways to give ``count`` equal layers one of ``options`` each, as (time,
    memory, mix). Both add up, so a dominated part never belongs to an undominated whole.
    """
    front: list[tuple[int, int, Mix]] = [(0, 0, ())]
    for _ in range(count):
        longer = sorted(
            (time + option[0], memory + option[1], _one_more(mix, option[2]))
            for time, memory, mix in front
            for option in options
        )
        front = []
        for each in longer:
            if not front or each[1] < front[-1][1]:
                front.append(each)
    return front


def _one_more(mix: Mix, strategy: int) -> Mix:
    counts = dict(mix)
    counts[strategy] = counts.get(strategy, 0) + 1
    return tuple(sorted(counts.items()))
