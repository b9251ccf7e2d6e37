"""The outer loop: bound every candidate, visit the best bound first, solve, simulate, stop.

1. Every legal combination of degrees gets a lower bound from its compute alone.
2. The best one is opened into candidates (ZeRO, shard groups, rank order, recomputation), each
   with a sharper bound and a first check of memory.
3. The best candidate is solved: strategies by counts, cuts by dynamic programming, under the
   memory limit and under the best step time so far. The undominated cuts are simulated exactly.
4. When the next bound is no better than the worst plan that is still wanted, nothing that was not
   visited can be better.

The bounds are relaxations, so ``bound_s`` holds for the whole space: no layout of it is faster.
"""

from __future__ import annotations

import heapq
from collections import Counter
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING

from costmodel.estimate import estimate
from costmodel.layout import Mesh, Strategy
from planner.build import CandidateProblem, build_layout
from planner.closed_form import CountingStages
from planner.cuts import best_cuts
from planner.space import ORDER_BY_STAGE, Candidate, Degrees, SearchSpace

if TYPE_CHECKING:
    from collections.abc import Callable

    from costmodel.context import CostContext
    from costmodel.estimate import Estimate
    from costmodel.layout import Layout
    from planner.problem import Solution

__all__ = ["Finalist", "SearchResult", "search"]

NANO = 10**9
SIMULATED_CUTS = 4
TIGHTENINGS = 3


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
    tightest: CandidateProblem | None

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
    should_stop: Callable[[], bool] = lambda: False,
    on_progress: Callable[[int, Finalist | None, float], None] | None = None,
) -> SearchResult:
    """Find the fastest layout of ``space`` that fits with probability ``min_fit``.

    ``should_stop`` is asked before every visit; ``on_progress(visited, best, bound_s)`` is told
    after it. Ties are broken by the order in which the space names its candidates.
    """
    run = _Run(context, space, min_fit, wanted=runners_up + 1)
    run.bound_all()
    complete = True
    while run.heap and run.heap[0][0] < run.worth_s:
        if should_stop():
            complete = False
            break
        run.visit()
        if on_progress is not None:
            on_progress(run.visited, run.finalists[0] if run.finalists else None, run.bound_s)
    return run.result(complete=complete)


@dataclass
class _Run:
    """The state of one search."""

    context: CostContext
    space: SearchSpace
    min_fit: float
    wanted: int
    heap: list[tuple[float, int, Degrees | CandidateProblem]] = field(default_factory=list)
    finalists: list[Finalist] = field(default_factory=list)
    pruned: Counter[str] = field(default_factory=Counter)
    least_visited_s: float = float("inf")
    candidates: int = 0
    visited: int = 0
    simulated: int = 0
    tightest: CandidateProblem | None = None
    tightest_need: float = float("inf")

    def __post_init__(self) -> None:
        self._order = count()
        self._compute: dict[tuple[object, ...], tuple[int, int]] = {}

    @property
    def worth_s(self) -> float:
        """A step time that a new plan must beat to be wanted."""
        if len(self.finalists) < self.wanted:
            return float("inf")
        return self.finalists[-1].estimate.step_s

    @property
    def best_s(self) -> float:
        """Step time of the best plan so far."""
        return self.finalists[0].estimate.step_s if self.finalists else float("inf")

    @property
    def bound_s(self) -> float:
        """What no layout of the space can beat, visited or not."""
        waiting = self.heap[0][0] if self.heap else float("inf")
        return min(waiting, self.least_visited_s, self.best_s)

    def bound_all(self) -> None:
        """Give every combination of degrees its bound from compute alone."""
        for degrees in self.space.degrees():
            self.candidates += 1
            self.heap.append((self._compute_bound_s(degrees), next(self._order), degrees))
        heapq.heapify(self.heap)

    def _compute_bound_s(self, degrees: Degrees) -> float:
        """As ``CandidateProblem.bound_s`` with no memory limit, no hand-over and no ZeRO."""
        total, greatest = self._compute_ns(degrees)
        p, v = degrees.pp, degrees.chunks
        m = self.context.training.global_batch // (degrees.dp * degrees.micro_batch)
        if degrees.schedule == "1f1b" and 1 < m <= p:
            filled = total / (1 - (1 - 1 / m) ** p)
        else:
            filled = (m + (p - 1) / v) * total / p
        ranks = degrees.tp * degrees.cp * degrees.pp * degrees.dp
        return self.context.whole_step_s(max(filled, m * greatest) / NANO, ranks)

    def _compute_ns(self, degrees: Degrees) -> tuple[int, int]:
        """(sum over the model's layers, slowest layer) of one micro-batch, by shard shapes."""
        key = (*degrees[:4], degrees.micro_batch, degrees.sequence_parallel)
        if not self.context.cluster.is_uniform:
            key = (*key, degrees.pp, degrees.dp)
        if key not in self._compute:
            shape = dict(zip(("tp", "cp", "ep", "expert_tp"), degrees[:4], strict=True))
            strategy = Strategy(**shape, sequence_parallel=degrees.sequence_parallel)
            mesh = Mesh(**shape, dp=degrees.dp, pp=degrees.pp, order=ORDER_BY_STAGE)
            times = [
                (
                    int(
                        self.context.compute(
                            run.layer, strategy, degrees.micro_batch, mesh
                        ).total_s
                        * NANO
                    ),
                    run.count,
                )
                for run in self.context.model.runs
            ]
            self._compute[key] = sum(t * n for t, n in times), max(t for t, _ in times)
        return self._compute[key]

    def visit(self) -> None:
        """Open or solve the node with the least bound."""
        bound, _, node = heapq.heappop(self.heap)
        self.visited += 1
        if isinstance(node, CandidateProblem):
            self._solve(node, bound)
            return
        self.candidates -= 1
        for candidate in self.space.candidates(node):
            self.candidates += 1
            problem = CandidateProblem(
                context=self.context, candidate=candidate, min_fit=self.min_fit
            )
            if self._is_too_big(problem):
                self.pruned["memory"] += 1
                continue
            sharper = max(bound, problem.least_bound_s)
            heapq.heappush(self.heap, (sharper, next(self._order), problem))

    def _is_too_big(self, problem: CandidateProblem) -> bool:
        """Whether even the leanest strategies leave the stages too small on average."""
        array = problem.problem
        leanest = [
            min(row[c][j] for row in array.memory for j in array.allowed[c])
            for c in range(len(array.allowed))
        ]
        need = sum(leanest[c] for c in array.chain) / array.num_stages
        room = max(array.limit)
        self._note_tightest(problem, need / room if room > 0 else float("inf"))
        return need > room

    def _note_tightest(self, problem: CandidateProblem, need: float) -> None:
        if not self.finalists and need < self.tightest_need:
            self.tightest, self.tightest_need = problem, need

    def _solve(self, problem: CandidateProblem, bound_s: float) -> None:
        """Solve one candidate, simulate its undominated cuts, keep the best."""
        found = self._cuts(problem)
        if not found:
            reason = "memory" if self.worth_s == float("inf") else "memory or bound"
            self.pruned[reason] += 1
            if self.finalists:
                self.least_visited_s = min(self.least_visited_s, max(bound_s, self.worth_s))
            return
        own = min(
            problem.bound_s(sum(each.stage_times_ns), max(each.stage_times_ns)) for each in found
        )
        self.least_visited_s = min(self.least_visited_s, max(bound_s, own))
        fitting = [
            finalist
            for finalist in (self._simulate(problem, cut) for cut in found[:SIMULATED_CUTS])
            if finalist is not None
        ]
        if fitting:
            self._keep(min(fitting, key=lambda each: each.estimate.step_s))
        else:
            self.pruned["memory"] += 1

    def _cuts(self, problem: CandidateProblem) -> list[Solution]:
        array = problem.problem
        return best_cuts(
            array,
            CountingStages(array),
            value_ns=problem.bound_s,
            worth_ns=self.worth_s,
        )

    def _simulate(self, problem: CandidateProblem, cut: Solution) -> Finalist | None:
        """The exact estimate of a cut. Where the solver's memory was too hopeful (chunks of
        unequal size), the problem is solved again with as much kept free.
        """
        mixing = self.space.rules.mixing
        for _ in range(TIGHTENINGS):
            layout = build_layout(problem, cut, mixing)
            own = estimate(self.context, layout, min_fit=self.min_fit)
            self.simulated += 1
            if own.fits:
                return Finalist(candidate=problem.candidate, layout=layout, estimate=own)
            over = own.allocated_bytes - problem.allocated_limit
            gathered = max(stage.memory.buffers for stage in own.stages)
            problem = CandidateProblem(
                context=self.context,
                candidate=problem.candidate,
                min_fit=self.min_fit,
                spare_bytes=problem.spare_bytes + max(over - gathered, 1 << 20),
            )
            again = self._cuts(problem)
            if not again:
                return None
            cut = again[0]
        return None

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
            tightest=self.tightest,
        )


def _identity(finalist: Finalist) -> tuple[object, ...]:
    """Plans with the same identity are the same plan in all that a user would call different."""
    candidate = finalist.candidate
    return (*candidate.degrees, candidate.zero)
