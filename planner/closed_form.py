"""Closed-form solver: counts inside a stage, a dynamic programme over the cuts.

For problems without resharding costs. The most frequent class of a stage takes the closed form of
``planner.counts``, where the others (an embedding, a head, some dense layers before experts) have
one undominated mix of strategies. Where they have several, as where two kinds of blocks alternate,
the undominated mixes of both sides are merged; with the strategies of a model their number grows
in proportion to the layers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from planner.counts import Choices, Option, best_counts
from planner.cuts import best_cuts
from planner.fronts import Front

if TYPE_CHECKING:
    from planner.problem import SearchProblem, Solution

__all__ = ["CountingStages", "solve"]

INFINITE = float("inf")
NOTHING = Front.of_nothing()


class Answer(NamedTuple):
    """A solved stage: its time, and how many layers of each class take each strategy, where a
    front's mixes are kept as (front, mix).
    """

    time: int
    counts: tuple[tuple[int, int, int], ...]  # class, strategy, how many
    mixes: tuple[tuple[Front, int], ...]

    def strategies(self) -> dict[int, list[int]]:
        """The strategies of each class, in order."""
        found: dict[int, list[int]] = {}
        for c, j, count in self.counts:
            found.setdefault(c, []).extend([j] * count)
        for front, point in self.mixes:
            for c, j in front.layers(point):
                found.setdefault(c, []).append(j)
        return {c: sorted(own) for c, own in found.items()}


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
        self._choices: dict[tuple[int, int, int], Choices] = {}
        self._cheapest: dict[tuple[int, int], list[tuple[float, int, int]]] = {}
        self._fronts: dict[tuple[int, int, tuple[int, ...]], Front] = {}

    def time_ns(self, stage: int, first: int, stop: int) -> int | None:
        """Least time of layers ``first`` .. ``stop - 1`` on ``stage``."""
        answer = self._answer(stage, first, stop)
        return None if answer is None else answer.time + self.problem.stage_ns[stage]

    def strategies(self, stage: int, first: int, stop: int) -> tuple[int, ...]:
        """Strategies of that answer; equal layers in order of strategy number."""
        answer = self._answer(stage, first, stop)
        assert answer is not None
        pools = {c: iter(own) for c, own in answer.strategies().items()}
        return tuple(next(pools[c]) for c in self.problem.chain[first:stop])

    def _answer(self, stage: int, first: int, stop: int) -> Answer | None:
        key = (self._row[stage], self.problem.class_counts(first, stop))
        if key not in self._answers:
            self._answers[key] = self._solve(*key)
        return self._answers[key]

    def _solve(self, stage: int, counts: tuple[int, ...]) -> Answer | None:
        """Try each amount of working memory that may be set aside, the most generous first; a
        smaller one is only worth trying if its relaxation beats the best answer.
        """
        best: Answer | None = None
        for level in reversed(self.problem.working_levels):
            worth = INFINITE if best is None else best.time
            if self._relaxed(stage, counts, level) < worth:
                best = self._within(stage, counts, level, worth) or best
        return best

    def _relaxed(self, stage: int, counts: tuple[int, ...], level: int) -> float:
        """Least time with fractional counts: from the fastest options on, bytes are saved where
        each costs least.
        """
        over, time = level - self.problem.limit[stage], 0.0
        for c, count in enumerate(counts):
            if count:
                options = self._allowed(stage, c, level).options
                if not options:
                    return INFINITE
                over += count * options[0].memory
                time += count * options[0].time
        for slope, saved, c in self._savings(stage, level):
            if over <= 0:
                break
            moved = min(over, counts[c] * saved)
            over -= moved
            time += moved * slope
        return time if over <= 0 else INFINITE

    def _savings(self, stage: int, level: int) -> list[tuple[float, int, int]]:
        """(time for each byte, bytes of a layer, class) of the steps between options, cheapest
        first.
        """
        key = (stage, level)
        if key not in self._cheapest:
            self._cheapest[key] = sorted(
                (slope, saved, c)
                for c in range(len(self.problem.allowed))
                for slope, saved in self._allowed(stage, c, level).savings
            )
        return self._cheapest[key]

    def _within(
        self, stage: int, counts: tuple[int, ...], level: int, worth: float
    ) -> Answer | None:
        """The best answer below ``worth`` with working memory up to ``level``; every class must
        have options within it.
        """
        main = max(
            range(len(counts)),
            key=lambda c: (
                counts[c] > 0 and len(self._allowed(stage, c, level).options) > 1,
                counts[c],
            ),
        )
        count, room = counts[main], self.problem.limit[stage] - level
        others = self._front(stage, level, (*counts[:main], 0, *counts[main + 1 :]))
        if len(others.times) > 1:
            own = self._front(stage, level, (*(0 for _ in counts[:main]), count))
            pair = others.best_with(own, room)
            if pair is None or pair[0] >= worth:
                return None
            return Answer(pair[0], (), ((others, pair[1]), (own, pair[2])))
        time, memory = int(others.times[0]), int(others.memories[0])
        found = best_counts(self._allowed(stage, main, level), count, room - memory, worth - time)
        if found is None:
            return None
        mix = tuple((main, j, number) for j, number in found.mix)
        return Answer(time + found.time, mix, ((others, 0),))

    def _front(self, stage: int, level: int, counts: tuple[int, ...]) -> Front:
        """The undominated mixes of ``counts`` layers of each class."""
        key = (stage, level, counts)
        front = self._fronts.get(key)
        if front is None:
            front = NOTHING
            for c, count in enumerate(counts):
                for number in range(1, count + 1):
                    shorter = (stage, level, (*counts[:c], number))
                    if shorter not in self._fronts:
                        own = self._allowed(stage, c, level).options
                        self._fronts[shorter] = front.longer(c, own)
                    front = self._fronts[shorter]
            self._fronts[key] = front
        return front

    def _allowed(self, stage: int, c: int, level: int) -> Choices:
        key = (stage, c, level)
        if key not in self._choices:
            problem = self.problem
            self._choices[key] = Choices(
                Option(problem.time_ns[c][j], problem.memory[stage][c][j], j)
                for j in problem.allowed[c]
                if problem.working[c][j] <= level
            )
        return self._choices[key]
