"""The outer loop: bound every candidate, visit the best bound first, solve, simulate, stop.

1. Every legal combination of degrees gets a lower bound from its compute alone.
2. The best one is opened into candidates (ZeRO, shard groups, rank order, recomputation), each
   with a sharper bound and a first check of memory.
3. The best candidate is solved: strategies by counts, cuts by dynamic programming, under the
   memory limit and under the best step time so far. The undominated cuts are simulated exactly.
4. When the next bound is no better than the worst plan that is still wanted, nothing that was not
   visited can be better.
5. Candidates that were solved but whose bound lies below the best plan are enumerated in full if
   they have at most 100,000 layouts together: then the plan is proven.

The bounds are relaxations, so ``bound_s`` holds for the whole space: no layout of it is faster.
"""

from __future__ import annotations

import heapq
from collections import Counter
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING, Final

from costmodel.estimate import LayoutCost
from planner.bounds import CandidateBounds
from planner.build import CandidateProblem, build_layout
from planner.closed_form import CountingStages
from planner.cuts import best_cuts
from planner.dp import LayerwiseStages
from planner.exhaust import every_better_cut, num_layouts
from planner.space import Candidate, Degrees, SearchSpace

if TYPE_CHECKING:
    from collections.abc import Callable

    from costmodel.context import CostContext
    from costmodel.estimate import Estimate
    from costmodel.layout import Layout
    from planner.cuts import StageSolver
    from planner.problem import SearchProblem, Solution

__all__ = ["SOLVERS", "Finalist", "SearchResult", "search"]

SOLVERS: Final[dict[str, Callable[[SearchProblem], StageSolver]]] = {
    "closed-form": CountingStages,
    "dp": LayerwiseStages,
}
SIMULATED_CUTS = 4
TIGHTENINGS = 3
PROMISING = 1.02  # of the wanted time; what the closed form puts above it is not simulated
EXHAUSTED_LAYOUTS = 100_000
SLACKS = (1.02, 1.08, 1.25, float("inf"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Finalist:
    """A simulated plan and the candidate that it comes from."""

    candidate: Candidate
    layout: Layout
    estimate: Estimate


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult:
    """The best plan, the next best different ones, and the proof.

    ``bound_s``: no layout of the space is faster. ``gap`` is (step - bound) / step. ``proven``:
    the gap is zero. ``pruned`` counts candidates by what excluded them, ``refused`` what the
    space left out, by rule. ``complete`` is False when the search was interrupted.
    """

    finalists: tuple[Finalist, ...]
    bound_s: float
    candidates: int
    visited: int
    simulated: int
    pruned: dict[str, int]
    refused: dict[str, int]
    complete: bool

    @property
    def best(self) -> Finalist | None:
        """The fastest plan that fits, None if there is none."""
        return self.finalists[0] if self.finalists else None

    @property
    def gap(self) -> float:
        """Relative distance of the best plan from the bound."""
        if self.best is None:
            return 1.0
        return max(0.0, 1 - self.bound_s / self.best.estimate.step_s)

    @property
    def proven(self) -> bool:
        """Whether the best plan is shown to be the fastest."""
        return self.best is not None and self.gap == 0.0


def search(
    context: CostContext,
    space: SearchSpace,
    *,
    min_fit: float = 0.9,
    runners_up: int = 3,
    solver: str = "closed-form",
    should_stop: Callable[[], bool] = lambda: False,
    on_progress: Callable[[int, Finalist | None, float], None] | None = None,
) -> SearchResult:
    """Find the fastest layout of ``space`` that fits with probability ``min_fit``.

    ``solver`` names who solves a stage (``SOLVERS``): both are exact, so that one checks the other.
    ``should_stop`` is asked before every visit; ``on_progress(visited, best, bound_s)`` is told
    after it. Ties are broken by the order in which the space names its candidates.
    """
    run = _Run(context, space, min_fit, wanted=runners_up + 1, solver=SOLVERS[solver])
    run.bound_all()
    complete = True
    while run.heap and run.heap[0][0] < run.worth_s:
        if should_stop():
            complete = False
            break
        run.visit()
        if on_progress is not None:
            on_progress(run.visited, run.finalists[0] if run.finalists else None, run.bound_s)
    if complete:
        run.close_gap(should_stop)
    return run.result(complete=complete)


@dataclass
class _Run:
    """The state of one search."""

    context: CostContext
    space: SearchSpace
    min_fit: float
    wanted: int
    solver: Callable[[SearchProblem], StageSolver]
    bounds: CandidateBounds = field(init=False)
    heap: list[tuple[float, int, Degrees | list[Candidate] | Candidate, float]] = field(
        default_factory=list
    )
    finalists: list[Finalist] = field(default_factory=list)
    pruned: Counter[str] = field(default_factory=Counter)
    open: list[tuple[float, CandidateProblem]] = field(default_factory=list)
    least_open_s: float = float("inf")
    candidates: int = 0
    visited: int = 0
    simulated: int = 0

    def __post_init__(self) -> None:
        self.bounds = CandidateBounds(self.context, min_fit=self.min_fit)
        self._order = count()

    @property
    def worth_s(self) -> float:
        """A step time that a new plan must beat to be wanted."""
        if len(self.finalists) < self.wanted:
            return float("inf")
        return self.finalists[-1].estimate.step_s

    @property
    def bound_s(self) -> float:
        """What no layout of the space can beat, visited or not."""
        waiting = self.heap[0][0] if self.heap else float("inf")
        return min(waiting, self.least_open_s, self.best_s)

    @property
    def best_s(self) -> float:
        """Step time of the best plan so far."""
        return self.finalists[0].estimate.step_s if self.finalists else float("inf")

    def bound_all(self) -> None:
        """Give every combination of degrees its bound from compute alone."""
        for degrees in self.space.degrees():
            self.heap.append((self.bounds.of_degrees_s(degrees), next(self._order), degrees, 0.0))
        self.candidates = len(self.heap)
        heapq.heapify(self.heap)

    def visit(self) -> None:
        """Sharpen, open or solve the node with the least bound."""
        bound, _, node, expected = heapq.heappop(self.heap)
        self.visited += 1
        if isinstance(node, Candidate):
            self._solve(node, bound, expected)
        elif isinstance(node, Degrees):
            candidates = list(self.space.candidates(node))
            self.candidates += len(candidates) - 1
            sharper = self.bounds.of_memory_s(node, candidates) if candidates else None
            if sharper is None:
                self.pruned["memory"] += len(candidates)
            else:
                self._push(max(bound, sharper), candidates)
        else:
            for candidate in node:
                relaxed = self.bounds.of_candidate_s(candidate, self.worth_s)
                if relaxed is None:
                    self._prune_full()
                else:
                    self._push(max(bound, relaxed[0]), candidate, relaxed[1])

    def _push(
        self, bound_s: float, node: Degrees | list[Candidate] | Candidate, expected_s: float = 0.0
    ) -> None:
        heapq.heappush(self.heap, (bound_s, next(self._order), node, expected_s))

    def _prune_full(self) -> None:
        """Count a candidate that does not fit, or fits only at more than the wanted time."""
        self.pruned["memory" if self.worth_s == float("inf") else "memory or bound"] += 1

    def _solve(self, candidate: Candidate, bound_s: float, expected_s: float) -> None:
        """Solve one candidate, simulate its undominated cuts, keep the best. Where even the closed
        form of its step is too long, it stays open: its bound counts in the gap.
        """
        problem = CandidateProblem(context=self.context, candidate=candidate, min_fit=self.min_fit)
        if expected_s > self.worth_s * PROMISING:
            self._leave_open(bound_s, problem)
            self.pruned["closed form"] += 1
            return
        found = self._cuts(problem, bound_s)
        if not found and not problem.moves_blocks:
            self._prune_full()
            return
        own = bound_s
        if not problem.moves_blocks:
            own = max(bound_s, min(problem.bound_s(cut) for cut in found))
        self._leave_open(own, problem)
        limit = self.worth_s * PROMISING
        promising = [cut for cut in found[:SIMULATED_CUTS] if problem.expected_s(cut) <= limit]
        if not promising:  # the bound stays open: it counts in the gap
            self.pruned["closed form"] += 1
            return
        best: Finalist | None = None
        for cut in promising:
            if best is not None and problem.bound_s(cut) >= best.estimate.step_s:
                continue
            finalist = self._simulate(problem, cut)
            if best is None or (finalist and finalist.estimate.step_s < best.estimate.step_s):
                best = finalist
        if best is None:
            self.pruned["memory"] += 1
        else:
            self._keep(best)

    def _leave_open(self, bound_s: float, problem: CandidateProblem) -> None:
        self.open.append((bound_s, problem))
        self.least_open_s = min(self.least_open_s, bound_s)

    def _cuts(self, problem: CandidateProblem, bound_s: float) -> list[Solution]:
        """Undominated cuts worth having: first those close to the bound, which are found fast."""
        array = problem.problem
        solver = self.solver(array)
        for slack in SLACKS:
            limit = min(bound_s * slack, self.worth_s)
            sums, greatest = problem.limits_ns(limit)
            found = best_cuts(array, solver, sum_limit_ns=sums, greatest_limit_ns=greatest)
            if found or limit == self.worth_s:
                return found
        return []

    def _simulate(self, problem: CandidateProblem, cut: Solution) -> Finalist | None:
        """The exact estimate of a cut. Where the solver's memory was too hopeful (chunks of
        unequal size), the problem is solved again with as much kept free.
        """
        bound_s = problem.bound_s(cut)
        for _ in range(TIGHTENINGS):
            layout = build_layout(problem, cut, self.space.rules.mixing)
            cost = LayoutCost(self.context, layout)
            if cost.fit_probability >= self.min_fit:
                self.simulated += 1
                own = cost.estimate(min_fit=self.min_fit)
                return Finalist(candidate=problem.candidate, layout=layout, estimate=own)
            problem = problem.with_less(cost.fullest)
            again = self._cuts(problem, bound_s)
            if not again:
                return None
            cut = again[0]
        return None

    def close_gap(self, should_stop: Callable[[], bool]) -> None:
        """Simulate every layout that could still beat the best plan, where they are few."""
        undecided = sorted(
            (each for each in self.open if each[0] < self.best_s), key=lambda each: each[0]
        )
        layouts = 0
        if any(problem.moves_blocks for _, problem in undecided):
            return
        for _, problem in undecided:
            layouts += num_layouts(problem.problem, most=EXHAUSTED_LAYOUTS)
            if layouts > EXHAUSTED_LAYOUTS:
                return
        for bound, problem in undecided:
            for cut in every_better_cut(problem, self.best_s):
                if should_stop():
                    return
                finalist = self._finalist(problem, cut)
                if finalist is not None:
                    self._keep(finalist)
            self.open.remove((bound, problem))
            self.least_open_s = min((each[0] for each in self.open), default=float("inf"))

    def _finalist(self, problem: CandidateProblem, cut: Solution) -> Finalist | None:
        """The simulated plan of a cut, None if it does not fit."""
        layout = build_layout(problem, cut, self.space.rules.mixing)
        cost = LayoutCost(self.context, layout)
        if cost.fit_probability < self.min_fit:
            return None
        self.simulated += 1
        own = cost.estimate(min_fit=self.min_fit)
        return Finalist(candidate=problem.candidate, layout=layout, estimate=own)

    def _keep(self, finalist: Finalist) -> None:
        """Keep the best plan of each combination of degrees and ZeRO stage."""
        key = _identity(finalist)
        rivals = [each for each in self.finalists if _identity(each) == key]
        if rivals and rivals[0].estimate.step_s <= finalist.estimate.step_s:
            return
        others = [each for each in self.finalists if _identity(each) != key]
        self.finalists = sorted([*others, finalist], key=lambda each: each.estimate.step_s)
        del self.finalists[self.wanted :]

    def result(self, *, complete: bool) -> SearchResult:
        """What was found, with the bound over everything that was not visited."""
        pruned = dict(self.pruned)
        if self.heap:
            pruned["bound"] = len(self.heap)
        return SearchResult(
            finalists=tuple(self.finalists),
            bound_s=self.bound_s,
            candidates=self.candidates,
            visited=self.visited,
            simulated=self.simulated,
            pruned=pruned,
            refused=dict(self.space.refused),
            complete=complete,
        )


def _identity(finalist: Finalist) -> tuple[object, ...]:
    """Plans with the same identity are the same plan in all that a user would call different."""
    candidate = finalist.candidate
    return (*candidate.degrees, candidate.zero)
