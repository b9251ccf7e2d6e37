"""Brute force: every cut and every strategy of every layer. The oracle of the other solvers."""

from __future__ import annotations

from itertools import combinations, product
from typing import TYPE_CHECKING

from planner.problem import SearchProblem, Solution

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["every_solution", "solve"]


def solve(problem: SearchProblem) -> Solution | None:
    """The optimum, or None if nothing fits."""
    return min(
        every_solution(problem),
        key=lambda each: (each.objective_ns, each.starts, each.strategies),
        default=None,
    )


def every_solution(problem: SearchProblem) -> Iterator[Solution]:
    """All assignments that keep every limit."""
    layers = len(problem.chain)
    for inner in combinations(range(1, layers), problem.num_stages - 1):
        starts = (0, *inner)
        stops = (*inner, layers)
        if any(b - a < problem.least_layers for a, b in zip(starts, stops, strict=True)):
            continue
        for strategies in product(*(problem.allowed[c] for c in problem.chain)):
            parts = [strategies[a:b] for a, b in zip(starts, stops, strict=True)]
            if all(problem.stage_fits(s, starts[s], part) for s, part in enumerate(parts)):
                times = [problem.stage_time_ns(s, starts[s], part) for s, part in enumerate(parts)]
                yield Solution(
                    starts=starts,
                    strategies=strategies,
                    stage_times_ns=tuple(times),
                    objective_ns=problem.objective_ns(sum(times), max(times)),
                )
