"""Where to cut the chain: a dynamic programme over stages and positions that keeps, for every
position, the undominated pairs (sum of stage times, greatest stage time).

Both terms of the objective grow with both numbers, so the front of the last position holds the
optimum. A state is dropped when even the fastest layers for the rest cannot keep its sum or its
greatest time below the limits that the caller derives from the best layout it already has.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from planner.problem import SearchProblem, Solution

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["StageSolver", "best_cuts", "even_cuts"]

INFINITE = 1 << 62


class StageSolver(Protocol):
    """Solves one stage: the least time of layers first..stop-1 on it, and their strategies."""

    def time_ns(self, stage: int, first: int, stop: int) -> int | None:
        """Least time that keeps the stage's limit, None if nothing does."""
        ...

    def strategies(self, stage: int, first: int, stop: int) -> tuple[int, ...]:
        """The strategies of that time, one per layer."""
        ...


State = tuple[int, int, tuple[int, ...]]  # sum, greatest, starts of the stages so far


def best_cuts(
    problem: SearchProblem,
    solver: StageSolver,
    *,
    sum_limit_ns: float = INFINITE,
    greatest_limit_ns: float = INFINITE,
) -> list[Solution]:
    """The front of (sum, greatest) below the limits as solutions, best objective first; empty if
    nothing fits.
    """
    layers, stages, least = len(problem.chain), problem.num_stages, problem.least_time_ns
    states: dict[int, list[State]] = {0: [(0, 0, ())]}
    if layers < stages * problem.least_layers:
        return []
    for stage in range(stages):
        left = stages - stage - 1
        reached: dict[int, list[State]] = {}
        for first, here in states.items():
            most, handover = layers - left * problem.least_layers, problem.handover(first)
            if handover >= greatest_limit_ns:
                continue
            stops = range(first + problem.least_layers if left else layers, most + 1)
            for stop in stops:
                rest = least[layers] - least[stop]
                if left and rest >= greatest_limit_ns * left:
                    continue
                time = solver.time_ns(stage, first, stop)
                if time is None or time >= greatest_limit_ns:
                    break
                room = sum_limit_ns - rest - time
                slower = max(time, handover)
                reached.setdefault(stop, []).extend(
                    (total + handover + time, max(greatest, slower), (*starts, first))
                    for total, greatest, starts in here
                    if total + handover < room
                )
        states = {stop: _front(found) for stop, found in reached.items() if found}
    solutions = [_solution(problem, solver, starts) for _, _, starts in states.get(layers, [])]
    return sorted(solutions, key=lambda each: (each.objective_ns, each.starts))


def even_cuts(
    problem: SearchProblem, solver: StageSolver, is_block: Sequence[bool]
) -> list[Solution]:
    """The cut into stages of equally many blocks as a list of one; empty if it does not fit.

    ``is_block`` tells of each layer of the chain whether it is one; the others stay at its ends.
    """
    blocks = [position for position, block in enumerate(is_block) if block]
    share = len(blocks) // problem.num_stages
    starts = (0, *(blocks[stage * share] for stage in range(1, problem.num_stages)))
    stops = (*starts[1:], len(problem.chain))
    for stage, (first, stop) in enumerate(zip(starts, stops, strict=True)):
        if solver.time_ns(stage, first, stop) is None:
            return []
    return [_solution(problem, solver, starts)]


def _front(states: list[State]) -> list[State]:
    kept: list[State] = []
    for state in sorted(states):
        if not kept or state[1] < kept[-1][1]:
            kept.append(state)
    return kept


def _solution(problem: SearchProblem, solver: StageSolver, starts: tuple[int, ...]) -> Solution:
    stops = (*starts[1:], len(problem.chain))
    strategies: list[int] = []
    for stage, (first, stop) in enumerate(zip(starts, stops, strict=True)):
        strategies += solver.strategies(stage, first, stop)
    solution = problem.cost(starts, tuple(strategies))
    assert solution is not None, "a stage solver broke a rule of the problem"
    return solution
