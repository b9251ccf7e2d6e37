"""The closed form over counts: equal layers of a stage differ only in how many take each strategy.

For n equal layers, strategies with times t_j and memories c_j, and a memory C:

    minimise sum_j x_j t_j   subject to   sum_j x_j = n,  sum_j x_j c_j <= C,  x_j >= 0 integer

At the optimum of the relaxation two strategies mix, i and k, with
x_k = (n c_i - C) / (c_i - c_k); rounded up this is feasible, and exact when only two strategies
are undominated. With more, the count of the last one is fixed to each whole number in turn, from
its relaxed value outwards: the relaxation is convex in it, so each direction ends at the first
count that cannot beat the best answer found. The result is always exact, and its cost does not
depend on n unless rounding leaves a gap.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

__all__ = ["Choices", "Counts", "Option", "best_counts", "undominated"]

INFINITE = float("inf")


class Option(NamedTuple):
    """What one layer costs under one strategy."""

    time: int
    memory: int
    strategy: int


class Counts(NamedTuple):
    """An answer: total time and ((strategy, how many), ...)."""

    time: int
    mix: tuple[tuple[int, int], ...]


def undominated(options: Iterable[Option]) -> list[Option]:
    """Options of which no other is as fast and as small, in order of time."""
    kept: list[Option] = []
    for option in sorted(options):
        if not kept or option.memory < kept[-1].memory:
            kept.append(option)
    return kept


class Choices:
    """The undominated options of one class of layers, and what their relaxation needs.

    ``hulls[k]`` is the lower convex hull of the first k + 1 options, as positions.
    """

    def __init__(self, options: Iterable[Option]) -> None:
        """Keep the undominated ones."""
        self.options = undominated(options)
        self.hulls: list[list[int]] = []
        hull: list[int] = []
        for position in range(len(self.options)):
            while len(hull) > 1 and not self._turns(hull[-2], hull[-1], position):
                hull.pop()
            hull.append(position)
            self.hulls.append(hull.copy())

    @property
    def savings(self) -> Iterator[tuple[float, int]]:
        """(time for each byte, bytes) that a layer saves from one option to the next."""
        for fast, small in pairwise(self.hulls[-1] if self.hulls else ()):
            a, b = self.options[fast], self.options[small]
            yield (b.time - a.time) / (a.memory - b.memory), a.memory - b.memory

    def _turns(self, first: int, middle: int, last: int) -> bool:
        """Whether time rises more steeply for each byte saved behind ``middle`` than before it."""
        a, b, c = (self.options[position] for position in (first, middle, last))
        return (b.time - a.time) * (b.memory - c.memory) < (c.time - b.time) * (a.memory - b.memory)

    def relaxed(self, count: int, memory: int, last: int) -> tuple[float, float]:
        """Least time of ``count`` layers with fractional counts of the options up to ``last``,
        and how many take ``last``; infinite if even that does not fit.
        """
        options, hull = self.options, self.hulls[last]
        if count * options[0].memory <= memory:
            return count * options[0].time, count if last == 0 else 0
        if count * options[last].memory > memory:
            return INFINITE, 0
        behind = bisect_left(hull, -memory, key=lambda each: -count * options[each].memory)
        fast, small = options[hull[behind - 1]], options[hull[behind]]
        moved = (count * fast.memory - memory) / (fast.memory - small.memory)
        time = count * fast.time + moved * (small.time - fast.time)
        return time, moved if hull[behind] == last else 0


def best_counts(
    choices: Choices, count: int, memory: int, worth: float = INFINITE
) -> Counts | None:
    """Least time below ``worth`` of ``count`` layers in ``memory``; None if there is none."""
    return _best(choices, len(choices.options) - 1, count, memory, worth)


def _best(choices: Choices, last: int, count: int, memory: int, worth: float) -> Counts | None:
    """As ``best_counts``, with the options up to ``last`` only."""
    fastest, slowest = choices.options[0], choices.options[last]
    if count * fastest.time >= worth or count * slowest.memory > memory:
        return None
    over = count * fastest.memory - memory
    if over <= 0:
        return Counts(count * fastest.time, ((fastest.strategy, count),) if count else ())
    if last == 1:  # a pair is solved exactly
        moved = -(-over // (fastest.memory - slowest.memory))
        time = count * fastest.time + moved * (slowest.time - fastest.time)
        mix = _mix((fastest.strategy, count - moved), (slowest.strategy, moved))
        return Counts(time, mix) if time < worth else None
    _, wanted = choices.relaxed(count, memory, last)
    start = math.floor(wanted)
    found = None
    for direction in (range(start, -1, -1), range(start + 1, count + 1)):
        for taken in direction:
            rest, left = count - taken, memory - taken * slowest.memory
            own = taken * slowest.time
            if own + choices.relaxed(rest, left, last - 1)[0] >= worth:
                break
            others = _best(choices, last - 1, rest, left, worth - own)
            if others is not None:
                worth = own + others.time
                found = Counts(worth, _mix(*others.mix, (slowest.strategy, taken)))
    return found


def _mix(*counts: tuple[int, int]) -> tuple[tuple[int, int], ...]:
    return tuple(pair for pair in counts if pair[1])
