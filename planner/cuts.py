"""Where to cut the chain: a dynamic programme over stages and positions that keeps, for every
position, the undominated pairs (sum of stage times, greatest stage time).

Both terms of the objective grow with both numbers, so the front of the last position holds the
optimum. A state is dropped when even the fastest layers for the rest cannot keep its sum or its
greatest time below the limits that the caller derives from the best layout it already has, or when
the stages left cannot hold so many layers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from planner.problem import SearchProblem, Solution

__all__ = [
    "SLACKS",
    "StageSolver",
    "Stages",
    "best_cuts",
    "even_cuts",
    "stages_hold",
    "undominated_pairs",
]

INFINITE = 1 << 62
SLACKS = (1.02, 1.08, 1.25, float("inf"))  # parts of a bound below which cuts are looked for


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


Pair = TypeVar("Pair", bound=tuple[float, float, *tuple[object, ...]])
State = tuple[int, int, tuple[int, ...]]  # sum, greatest, starts of the stages so far


class Stages:
    """The stages that a cut may have, each below ``limit_ns`` and with one or more of the layers
    that ``holding`` marks, if any are marked.
    """

    def __init__(
        self,
        problem: SearchProblem,
        solver: StageSolver,
        limit_ns: float,
        holding: Sequence[bool] = (),
    ) -> None:
        """Find out how early each stage may start."""
        self.problem = problem
        self.solver = solver
        self.limit_ns = limit_ns
        self._earliest = _earliest_starts(problem, solver, limit_ns)
        layers = len(problem.chain)
        self._least_stop = [layers + 1] * layers if holding else list(range(1, layers + 1))
        for first in reversed(range(len(holding))):
            behind = self._least_stop[first + 1] if first + 1 < layers else layers + 1
            self._least_stop[first] = first + 1 if holding[first] else behind

    def of(self, stage: int, starts: Iterable[int]) -> Iterator[tuple[int, int, int]]:
        """(first layer, stop, least time) of what ``stage`` may be where it starts with any of
        ``starts``.
        """
        problem, solver, limit = self.problem, self.solver, self.limit_ns
        if self._earliest is None:
            return
        most = len(problem.chain) - (problem.num_stages - stage - 1) * problem.least_layers
        for first in starts:
            fewest = max(first + problem.least_layers, self._least_stop[first])
            for stop in range(max(fewest, self._earliest[stage + 1]), most + 1):
                if solver.least_ns(stage, first, stop) >= limit:
                    break
                time = solver.time_ns(stage, first, stop)
                if time is None or time >= limit:
                    break
                yield first, stop, time


def best_cuts(
    problem: SearchProblem,
    solver: StageSolver,
    *,
    sum_limit_ns: float = INFINITE,
    greatest_limit_ns: float = INFINITE,
    holding: Sequence[bool] = (),
) -> list[Solution]:
    """The front of (sum, greatest) below the limits as solutions, best objective first; empty if
    nothing fits. ``holding``: as ``Stages`` has it.
    """
    layers, least = len(problem.chain), problem.least_time_ns
    states: dict[int, list[State]] = {0: [(0, 0, ())]}
    stages = Stages(problem, solver, greatest_limit_ns, holding)
    for stage in range(problem.num_stages):
        reached: dict[int, list[State]] = {}
        starts = [first for first in states if problem.handover(first) < greatest_limit_ns]
        for first, stop, time in stages.of(stage, starts):
            handover = problem.handover(first)
            room = sum_limit_ns - (least[layers] - least[stop]) - time
            slower = max(time, handover)
            reached.setdefault(stop, []).extend(
                (total + handover + time, max(greatest, slower), (*before, first))
                for total, greatest, before in states[first]
                if total + handover < room
            )
        states = {stop: undominated_pairs(found) for stop, found in reached.items() if found}
    solutions = [_solution(problem, solver, starts) for _, _, starts in states.get(layers, [])]
    return sorted(solutions, key=lambda each: (each.objective_ns, each.starts))


def stages_hold(problem: SearchProblem, solver: StageSolver, limit_ns: float) -> bool:
    """Whether stages below ``limit_ns`` can hold the whole chain, as far as their relaxation
    tells.
    """
    return _earliest_starts(problem, solver, limit_ns) is not None


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


def undominated_pairs(states: list[Pair]) -> list[Pair]:
    """Those of which no other has as small a first and second number."""
    kept: list[Pair] = []
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
