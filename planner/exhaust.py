"""Closing small gaps by looking at every layout that could still be better.

The solvers optimise a closed form of the step; the simulated step of another cut can be shorter by
the way its stages wait for one another. Where a candidate's bound leaves room for that and it has
few layouts, all of them that keep the bound are enumerated for simulation.
"""

from __future__ import annotations

from itertools import combinations_with_replacement, groupby, product
from math import comb
from typing import TYPE_CHECKING

from planner.cuts import INFINITE
from planner.problem import SearchProblem, Solution

if TYPE_CHECKING:
    from collections.abc import Iterator

    from planner.build import CandidateProblem

__all__ = ["every_better_cut", "num_layouts"]


def num_layouts(problem: SearchProblem, *, most: int) -> int:
    """How many cuts and mixes of strategies a problem has, ``most`` + 1 if more than that."""
    layers, stages = len(problem.chain), problem.num_stages
    if comb(layers - 1, stages - 1) > most:
        return most + 1
    ways = [1] + [0] * layers
    for _ in range(stages):
        reached = [0] * (layers + 1)
        for first in range(layers):
            if ways[first]:
                for stop in range(first + problem.least_layers, layers + 1):
                    reached[stop] += ways[first] * _num_mixes(problem, first, stop)
        ways = reached
        if sum(ways) > most * layers:
            return most + 1
    return min(ways[layers], most + 1)


def _num_mixes(problem: SearchProblem, first: int, stop: int) -> int:
    mixes = 1
    for c, count in _runs(problem, first, stop):
        mixes *= comb(count + len(problem.allowed[c]) - 1, count)
    return mixes


def _runs(problem: SearchProblem, first: int, stop: int) -> list[tuple[int, int]]:
    """(class, length) of the runs of equal layers."""
    return [(c, len(list(run))) for c, run in groupby(problem.chain[first:stop])]


def every_better_cut(candidate: CandidateProblem, worth_s: float) -> Iterator[Solution]:
    """Assignments that keep the closed form of memory, where that is one, and whose bound is below
    ``worth_s``: of a layout whose blocks move that of the sum of its stage times, as a stage may
    become shorter. Two directions on a device may hold less than the closed form counts.
    """
    problem, sure = candidate.problem, candidate.schedule.copies == 1
    sum_limit, greatest_limit = candidate.limits_ns(worth_s)
    if candidate.moves_blocks:
        greatest_limit = INFINITE
    least, layers = problem.least_time_ns, len(problem.chain)

    def extend(
        stage: int, first: int, total: int, parts: tuple[tuple[int, tuple[int, ...]], ...]
    ) -> Iterator[Solution]:
        if stage == problem.num_stages:
            times = tuple(time for time, _ in parts)
            yield Solution(
                starts=tuple(starts[: problem.num_stages]),
                strategies=tuple(j for _, own in parts for j in own),
                stage_times_ns=times,
                objective_ns=problem.objective_ns(sum(times), max(times)),
            )
            return
        starts[stage] = first
        left = problem.num_stages - stage - 1
        lowest = first + problem.least_layers if left else layers
        for stop in range(lowest, layers - left * problem.least_layers + 1):
            for own in _mixes(problem, first, stop):
                time = problem.stage_time_ns(stage, first, own)
                rest = least[layers] - least[stop]
                if time >= greatest_limit or total + time + rest >= sum_limit:
                    continue
                if sure and not problem.stage_fits(stage, first, own):
                    continue
                yield from extend(stage + 1, stop, total + time, (*parts, (time, own)))

    starts = [0] * problem.num_stages
    yield from extend(0, 0, 0, ())


def _mixes(problem: SearchProblem, first: int, stop: int) -> Iterator[tuple[int, ...]]:
    """Strategies of a stage's layers, permutations of equal layers once."""
    options = [
        combinations_with_replacement(problem.allowed[c], count)
        for c, count in _runs(problem, first, stop)
    ]
    for chosen in product(*options):
        yield tuple(j for part in chosen for j in part)
