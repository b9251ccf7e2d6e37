"""The closed form over counts: equal layers of a stage differ only in how many take each strategy.

For n equal layers, strategies with times t_j and memories c_j, and a memory C:

    minimise sum_j x_j t_j   subject to   sum_j x_j = n,  sum_j x_j c_j <= C,  x_j >= 0 integer

At the optimum of the relaxation two strategies mix, i and k, with
x_k = (n c_i - C) / (c_i - c_k); rounded up this is feasible, and exact when only two strategies
are undominated. With more, the counts of the others are enumerated as long as the relaxation of
the rest can still beat the best answer found, so the result is always exact. Cost does not depend
on n unless rounding leaves a gap.
"""

from __future__ import annotations

from itertools import combinations

__all__ = ["best_counts", "undominated"]

Option = tuple[int, int, int]  # time, memory, strategy number


def undominated(options: list[Option]) -> list[Option]:
    """Options of which no other is as fast and as small, in order of time."""
    kept: list[Option] = []
    for option in sorted(options):
        if not kept or option[1] < kept[-1][1]:
            kept.append(option)
    return kept


def best_counts(
    options: list[Option], count: int, memory: int
) -> tuple[int, tuple[tuple[int, int], ...]] | None:
    """Least time of ``count`` layers in ``memory`` and ((strategy, how many), ...); None if
    they do not fit. ``options`` must be undominated, in order of time.
    """
    fastest, smallest = options[0], options[-1]
    if count * smallest[1] > memory:
        return None
    if count * fastest[1] <= memory:
        return count * fastest[0], ((fastest[2], count),)
    return _mixed(options, count, memory, None)


def _mixed(
    options: list[Option], count: int, memory: int, best: int | None
) -> tuple[int, tuple[tuple[int, int], ...]] | None:
    """As ``best_counts``, but only what is faster than ``best``."""
    found = _best_pair(options, count, memory)
    if found is not None and best is not None and found[0] >= best:
        found = None
    limit = best if found is None else found[0]
    if len(options) <= 2:  # noqa: PLR2004 - a pair is solved exactly
        return found
    # Enumerate how many layers take the last option; the others solve the rest.
    *others, last = options
    for taken in range(1, count + 1):
        rest, left = count - taken, memory - taken * last[1]
        if left < 0:
            break
        bound = taken * last[0] + _relaxed(others, rest, left)
        if limit is not None and bound >= limit:
            continue
        remainder = _mixed(others, rest, left, None if limit is None else limit - taken * last[0])
        if remainder is not None:
            limit = taken * last[0] + remainder[0]
            found = (limit, (*remainder[1], (last[2], taken)))
    without = _mixed(others, count, memory, limit)
    return without or found


def _best_pair(
    options: list[Option], count: int, memory: int
) -> tuple[int, tuple[tuple[int, int], ...]] | None:
    """The fastest mix of at most two strategies."""
    best = None
    pairs = combinations(options, 2) if len(options) > 1 else [(options[0], options[0])]
    for fast, small in pairs:
        over = count * fast[1] - memory
        if over <= 0:
            moved = 0
        elif fast[1] == small[1] or count * small[1] > memory:
            continue
        else:
            moved = -(-over // (fast[1] - small[1]))
        time = (count - moved) * fast[0] + moved * small[0]
        if best is None or time < best[0]:
            mix = ((fast[2], count - moved), (small[2], moved))
            best = (time, tuple(pair for pair in mix if pair[1]))
    return best


def _relaxed(options: list[Option], count: int, memory: int) -> float:
    """Least time with fractional counts, infinity if even that does not fit."""
    best = float("inf")
    if count * options[0][1] <= memory:
        return float(count * options[0][0])
    for fast, small in combinations(options, 2):
        if count * fast[1] <= memory:
            best = min(best, count * fast[0])
        elif count * small[1] <= memory:
            moved = (count * fast[1] - memory) / (fast[1] - small[1])
            best = min(best, (count - moved) * fast[0] + moved * small[0])
    return best
