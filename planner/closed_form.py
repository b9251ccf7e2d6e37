"""Closed-form solver: counts inside a stage, a dynamic programme over the cuts.

For problems without resharding costs. The most frequent class of a stage takes the closed form of
``planner.counts``, where the others (an embedding, a head, some dense layers before experts) have
one undominated mix of strategies. Where they have several, as where two kinds of blocks alternate,
the undominated mixes of both sides are merged; with the strategies of a model their number grows
in proportion to the layers.
"""

from __future__ import annotations

from bisect import bisect_right
from itertools import chain
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


class Level(NamedTuple):
    """What each class may take on a stage within some working memory, and the steps from option to
    option: (time for each byte, bytes of a layer, class), cheapest first.
    """

    choices: tuple[Choices, ...]
    savings: list[tuple[float, int, int]]


Key = tuple[int, tuple[int, ...]]  # the first stage with that memory, layers of each class


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
        self._working = [
            sorted({problem.working[c][j] for j in own}) for c, own in enumerate(problem.allowed)
        ]
        self._bounds: dict[Key, float] = {}
        self._answers: dict[Key, Answer | None] = {}
        self._choices: dict[tuple[int, int, int], Choices] = {}
        self._levels: dict[tuple[int, float], Level] = {}
        self._levels_within: dict[tuple[int, tuple[int, ...]], Level] = {}
        self._fronts: dict[tuple[int, int, tuple[int, ...]], Front] = {}

    def time_ns(self, stage: int, first: int, stop: int) -> int | None:
        """Least time of layers ``first`` .. ``stop - 1`` on ``stage``."""
        answer = self._answer(stage, first, stop)
        return None if answer is None else answer.time + self.problem.stage_ns[stage]

    def least_ns(self, stage: int, first: int, stop: int) -> float:
        """What that time cannot be below: the relaxation beside the least working memory."""
        return self._least(self._key(stage, first, stop)) + self.problem.stage_ns[stage]

    def strategies(self, stage: int, first: int, stop: int) -> tuple[int, ...]:
        """Strategies of that answer; equal layers in order of strategy number."""
        answer = self._answer(stage, first, stop)
        assert answer is not None
        pools = {c: iter(own) for c, own in answer.strategies().items()}
        return tuple(next(pools[c]) for c in self.problem.chain[first:stop])

    def _answer(self, stage: int, first: int, stop: int) -> Answer | None:
        key = self._key(stage, first, stop)
        if key not in self._answers:
            self._answers[key] = self._solve(*key)
        return self._answers[key]

    def _key(self, stage: int, first: int, stop: int) -> Key:
        """What decides a stage's answer."""
        return self._row[stage], self.problem.class_counts(first, stop)

    def _least(self, key: Key) -> float:
        """What no answer beats: all options, beside the least working memory of any."""
        if key not in self._bounds:
            stage, counts = key
            least = max(own[0] for own, count in zip(self._working, counts, strict=True) if count)
            room = self.problem.limit[stage] - least
            self._bounds[key] = _relaxed(self._level(stage, INFINITE), counts, room)
        return self._bounds[key]

    def _solve(self, stage: int, counts: tuple[int, ...]) -> Answer | None:
        """Try each amount of working memory that may be set aside, the most generous first; a
        smaller one is only worth trying if its relaxation beats the best answer, and none where
        nothing can.
        """
        best: Answer | None = None
        least = self._least((stage, counts))
        present = (own for own, count in zip(self._working, counts, strict=True) if count)
        for level in sorted(set(chain.from_iterable(present)), reverse=True):
            worth = INFINITE if best is None else best.time
            if worth <= least:
                break
            room = self.problem.limit[stage] - level
            if _relaxed(self._level(stage, level), counts, room) < worth:
                best = self._within(stage, counts, level, worth) or best
        return best

    def _level(self, stage: int, level: float) -> Level:
        found = self._levels.get((stage, level))
        if found is None:
            within = tuple(bisect_right(own, level) for own in self._working)
            if (stage, within) not in self._levels_within:
                self._levels_within[stage, within] = self._level_within(stage, within)
            found = self._levels[stage, level] = self._levels_within[stage, within]
        return found

    def _level_within(self, stage: int, within: tuple[int, ...]) -> Level:
        """What each class may take with so many of its least amounts of working memory."""
        choices = tuple(self._allowed(stage, c, number) for c, number in enumerate(within))
        savings = sorted(
            (slope, saved, c) for c, own in enumerate(choices) for slope, saved in own.savings
        )
        return Level(choices, savings)

    def _allowed(self, stage: int, c: int, number: int) -> Choices:
        """The options of a class with the ``number`` least amounts of working memory."""
        key = (stage, c, number)
        if key not in self._choices:
            problem, within = self.problem, self._working[c][:number]
            self._choices[key] = Choices(
                Option(problem.time_ns[c][j], problem.memory[stage][c][j], j)
                for j in problem.allowed[c]
                if problem.working[c][j] in within
            )
        return self._choices[key]

    def _within(
        self, stage: int, counts: tuple[int, ...], level: int, worth: float
    ) -> Answer | None:
        """The best answer below ``worth`` with working memory up to ``level``; every class must
        have options within it.
        """
        choices = self._level(stage, level).choices
        main = max(
            range(len(counts)),
            key=lambda c: (counts[c] > 0 and len(choices[c].options) > 1, counts[c]),
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
        found = best_counts(choices[main], count, room - memory, worth - time)
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
                        own = self._level(stage, level).choices[c].options
                        self._fronts[shorter] = front.longer(c, own)
                    front = self._fronts[shorter]
            self._fronts[key] = front
        return front


def _relaxed(level: Level, counts: tuple[int, ...], room: int) -> float:
    """Least time in ``room`` with fractional counts: from the fastest options on, bytes are saved
    where each costs least.
    """
    over, time = -room, 0.0
    for count, own in zip(counts, level.choices, strict=True):
        if count:
            if not own.options:
                return INFINITE
            fastest = own.options[0]
            over += count * fastest.memory
            time += count * fastest.time
    for slope, saved, c in level.savings:
        if over <= 0:
            break
        moved = min(over, counts[c] * saved)
        over -= moved
        time += moved * slope
    return time if over <= 0 else INFINITE
