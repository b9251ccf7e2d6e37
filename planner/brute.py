"""Brute force: every cut and every strategy of every layer. The oracle of the other solvers."""

from __future__ import annotations

from itertools import combinations, product
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from planner.problem import SearchProblem, Solution

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
        for strategies in product(*(problem.allowed[c] for c in problem.chain)):
            solution = problem.cost(starts, strategies)
            if solution is not None:
                yield solution
