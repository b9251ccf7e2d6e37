"""Where to cut the chain: a dynamic programme over stages and positions that keeps, for every
position, the undominated pairs (sum of stage times, greatest stage time).

Both terms of the objective grow with both numbers, so the front of the last position holds the
optimum. A state is dropped when even the fastest layers for the rest cannot keep its sum or its
greatest time below the limits that the caller derives from the best layout it already has, or when
the stages left cannot hold so many layers.
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

    def least_ns(self, stage: int, first: int, stop: int) -> float:
        """What that time cannot be below, known at little cost. Fewer layers have no more."""
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
    earliest = _earliest_starts(problem, solver, greatest_limit_ns)
    if earliest is None:
        return []
    for stage in range(stages):
        left = stages - stage - 1
        reached: dict[int, list[State]] = {}
        for first, here in states.items():
            most, handover = layers - left * problem.least_layers, problem.handover(first)
            if handover >= greatest_limit_ns:
                continue
            for stop in range(max(first + problem.least_layers, earliest[stage + 1]), most + 1):
                rest = least[layers] - least[stop]
                if solver.least_ns(stage, first, stop) >= greatest_limit_ns:
                    break
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


def _earliest_starts(
    problem: SearchProblem, solver: StageSolver, greatest_limit_ns: float
) -> list[int] | None:
    """The first layer from which the stages from each on can hold the rest of the chain, all below
    the limit, and the end of the chain; None if all of them cannot.
    """
    least, stop = problem.least_layers, len(problem.chain)
    earliest, held = [stop], least
    for stage in reversed(range(problem.num_stages)):

        def holds(count: int, stage: int = stage, stop: int = stop) -> bool:
            return solver.least_ns(stage, stop - count, stop) < greatest_limit_ns

        most = stop - stage * least
        held = min(held, most)
        while held >= least and not holds(held):
            held -= 1
        if held < least:
            return None
        while held < most and holds(held + 1):
            held += 1
        stop -= held
        earliest.append(stop)
    return None if stop else earliest[::-1]


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
