"""SearchRun: the nodes of one search, what was found, and how a node is opened or solved."""

from __future__ import annotations

import heapq
from collections import Counter
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING, TypeAlias

from costmodel.estimate import LayoutCost
from planner.bounds import CandidateBounds
from planner.build import CandidateProblem
from planner.choices import Candidate, Degrees, Grid, Grids
from planner.cuts import SLACKS, best_cuts, even_cuts, stages_hold
from planner.finalists import Finalist, SearchResult
from planner.layouts import build_layout

if TYPE_CHECKING:
    from collections.abc import Callable

    from costmodel.context import CostContext
    from planner.bounds import Relaxed
    from planner.cuts import StageSolver
    from planner.problem import SearchProblem, Solution
    from planner.space import SearchSpace

__all__ = ["TIGHTENINGS", "SearchRun"]

Node: TypeAlias = "Grids | Grid | Degrees | list[Candidate] | Candidate"
SIMULATED_CUTS = 4
TIGHTENINGS = 3
EARLY = 16  # one in so many visits solves a candidate, until there are plans to prune with
PROMISING = 1.02  # of the wanted time; what the closed form puts above it is not simulated


@dataclass
class SearchRun:
    """The state of one search."""

    context: CostContext
    space: SearchSpace
    min_fit: float
    wanted: int
    solver: Callable[[SearchProblem], StageSolver]
    gap: float = 0.0
    bounds: CandidateBounds = field(init=False)
    heap: list[tuple[float, int, float, Node]] = field(default_factory=list)
    waiting: list[tuple[float, int]] = field(default_factory=list)  # bounds of the heap's nodes
    nodes: dict[int, Node] = field(default_factory=dict)  # those of the heap by number
    ready: list[tuple[float, int, float]] = field(default_factory=list)  # candidates of the heap
    finalists: list[Finalist] = field(default_factory=list)
    pruned: Counter[str] = field(default_factory=Counter)
    open: list[tuple[float, CandidateProblem]] = field(default_factory=list)
    least_open_s: float = float("inf")
    candidates: int = 0
    visited: int = 0
    simulated: int = 0
    tried: list[Finalist] = field(default_factory=list)

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
        while self.waiting and self.waiting[0][1] not in self.nodes:
            heapq.heappop(self.waiting)
        waiting = self.waiting[0][0] if self.waiting else float("inf")
        return min(waiting, self.least_open_s, self.best_s)

    @property
    def promising(self) -> bool:
        """Whether a node is left that may hold a plan that is wanted."""
        return bool(self.heap) and self.heap[0][0] <= self.worth_s * PROMISING

    @property
    def best_s(self) -> float:
        """Step time of the best plan so far."""
        return self.finalists[0].estimate.step_s if self.finalists else float("inf")

    @property
    def enough(self) -> bool:
        """Whether the best plan is shown to be as good as was asked for."""
        return bool(self.finalists) and self.gap > 0 and self.bound_s >= self.enough_s

    @property
    def enough_s(self) -> float:
        """What the bound must reach."""
        return (1 - self.gap) * self.best_s

    def bound_all(self) -> None:
        """Give all grids with the same shard of a layer their least bound, from compute alone."""
        grids = []
        for grid in self.space.grids():
            size = self.space.num_candidates(grid)
            if size:
                self.candidates += size
                grids.append(grid)
        self._push_alike(grids, self.bounds.times.shape_beside_experts, with_experts=False)

    def _push_alike(
        self, grids: list[Grid], shape: Callable[[Grid], object], *, with_experts: bool
    ) -> None:
        """A node for all of some grids that have the same ``shape``."""
        found: dict[object, list[Grid]] = {}
        for grid in grids:
            found.setdefault(shape(grid), []).append(grid)
        for own in found.values():
            node = Grids(own, with_experts)
            self._push(min(self.bounds.of_grids(node)), node)

    def visit(self) -> None:
        """Sharpen, open or solve the most promising node; now and then the most promising
        candidate instead, until there are as many plans as are wanted.
        """
        self.visited += 1
        if self.worth_s == float("inf") and self.visited % EARLY == 0 and self.ready:
            _, number, bound_s = heapq.heappop(self.ready)
            node = self.nodes.pop(number, None)
            if isinstance(node, Candidate):
                self.solve(node, bound_s)
                return
        _, number, bound_s, node = heapq.heappop(self.heap)
        if self.nodes.pop(number, None) is None:
            return  # solved early
        if isinstance(node, Candidate):
            self.solve(node, bound_s)
        else:
            self.open_node(node, bound_s)

    def open_node(self, node: Grids | Grid | Degrees | list[Candidate], bound_s: float) -> None:
        """Put what a node stands for on the heap, with sharper bounds."""
        if isinstance(node, Grids):
            self._open_grids(node)
        elif isinstance(node, Grid):
            for degrees in self.space.degrees_of(node):
                self._push(self.bounds.of_degrees(degrees), degrees, bound_s)
        elif isinstance(node, Degrees):
            candidates = list(self.space.candidates(node))
            sharper = self._of_memory(candidates)
            if sharper is not None:
                self._push(sharper, candidates, bound_s)
        elif self._of_memory(node) is not None:
            for candidate in node:
                relaxed = self.bounds.of_candidate(candidate, self.worth_s)
                if relaxed is None:
                    self._prune_full(1)
                else:
                    self._push(relaxed, candidate, bound_s)

    def _open_grids(self, node: Grids) -> None:
        """First into those that divide the experts alike, then into single ones."""
        if not node.with_experts:
            self._push_alike(node.alike, self.bounds.times.shape, with_experts=True)
            return
        for grid, own in zip(node.alike, self.bounds.of_grids(node), strict=True):
            self._push(own, grid)

    def _of_memory(self, candidates: list[Candidate]) -> Relaxed | None:
        """What none of the candidates of some degrees can beat; None if none of them is wanted."""
        if not candidates:
            return None
        own = self.bounds.of_memory(candidates[0].degrees, candidates, self.worth_s)
        if own is None:
            self._prune_full(len(candidates))
        return own

    def _push(self, own: Relaxed, node: Node, bound_s: float = 0.0) -> None:
        """Put a node on the heap; ``bound_s`` is that of the node it came from."""
        number, bound_s = next(self._order), max(bound_s, own.bound_s)
        heapq.heappush(self.heap, (max(bound_s, own.expected_s), number, bound_s, node))
        heapq.heappush(self.waiting, (bound_s, number))
        self.nodes[number] = node
        if isinstance(node, Candidate) and self.worth_s == float("inf"):
            heapq.heappush(self.ready, (own.expected_s, number, bound_s))

    def _size(self, node: Node) -> int:
        """How many candidates a node stands for."""
        if isinstance(node, Candidate):
            return 1
        if isinstance(node, Grids):
            return sum(map(self.space.num_candidates, node.alike))
        return len(node) if isinstance(node, list) else self.space.num_candidates(node)

    def _prune_full(self, count: int) -> None:
        """Count candidates that do not fit, or fit only at more than the wanted time."""
        self.pruned["memory" if self.worth_s == float("inf") else "memory or bound"] += count

    def solve(self, candidate: Candidate, bound_s: float) -> None:
        """Solve one candidate, simulate its undominated cuts, keep the best."""
        problem = CandidateProblem(context=self.context, candidate=candidate, min_fit=self.min_fit)
        promising = self._promising(problem, bound_s)
        if not promising:
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
            self.keep(best)

    def _promising(self, problem: CandidateProblem, bound_s: float) -> list[Solution]:
        """Cuts of a candidate that are worth simulating; it is left open with their bound. Where
        none is even with the activations that stages are sure to hold, the orders of its schedule
        need not be known.
        """
        lean, limit = problem.with_least_in_flight(), self.worth_s * PROMISING
        found: list[Solution] = []
        for each in [problem] if lean is None else [lean, problem]:
            found, own = self.cuts(each, bound_s, self.worth_s), bound_s
            if problem.counts_memory:
                if not found:
                    self._prune_full(1)
                    return []
                own = max(bound_s, self.least_s(each, found))
            found = [cut for cut in found[:SIMULATED_CUTS] if each.expected_s(cut) <= limit]
            if not found:
                break
        self.leave_open(own, problem)
        if not found:  # the bound stays open: it counts in the gap
            self.pruned["closed form"] += 1
        return found

    def leave_open(self, bound_s: float, problem: CandidateProblem) -> None:
        """Keep a candidate whose cuts are not all known to be slower than the best plan."""
        self.open.append((bound_s, problem))
        self.least_open_s = min(self.least_open_s, bound_s)

    def cuts(
        self,
        problem: CandidateProblem,
        bound_s: float,
        worth_s: float,
        solver: StageSolver | None = None,
    ) -> list[Solution]:
        """Undominated cuts that may take less than ``worth_s``: first those close to the bound,
        which are found fast. ``solver``: one of the problem's own that knows some stages already.
        """
        array = problem.problem
        solver = solver or self.solver(array)
        if not self.space.rules.uneven_stages:
            return even_cuts(array, solver, problem.is_block)
        if not stages_hold(array, solver, problem.limits_ns(worth_s)[1]):
            return []
        for slack in SLACKS:
            limit = min(bound_s * slack, worth_s)
            sums, greatest = problem.limits_ns(limit)
            found = best_cuts(
                array,
                solver,
                sum_limit_ns=sums,
                greatest_limit_ns=greatest,
                holding=self.holding(problem),
            )
            if found or limit == worth_s:
                return found
        return []

    def least_s(self, problem: CandidateProblem, found: list[Solution]) -> float:
        """What no cut of a candidate can beat, of which ``found`` are undominated: neither those
        nor others, whose sum and greatest stage time are no less than those of one of them, or
        than the limits within which they were found.
        """
        if not self.space.rules.uneven_stages:  # there is only one
            return min(problem.bound_s(cut) for cut in found)
        least = (
            problem.least_ns(sum(cut.stage_times_ns), max(cut.stage_times_ns)) for cut in found
        )
        return problem.step_s(min(least))

    def holding(self, problem: CandidateProblem) -> list[bool]:
        """The layers of which every stage must have one: blocks, where the launcher cannot have
        stages without.
        """
        return [] if self.space.rules.empty_stages else problem.is_block

    def may_cut(self, problem: CandidateProblem, cut: Solution) -> bool:
        """Whether the launcher can have stages of these sizes."""
        rules = self.space.rules
        if rules.uneven_stages and rules.empty_stages:
            return True
        blocks = cut.stage_blocks(problem.is_block)
        return min(blocks) > 0 and (rules.uneven_stages or len(set(blocks)) == 1)

    def _simulate(self, problem: CandidateProblem, cut: Solution) -> Finalist | None:
        """The exact estimate of a cut. Where the solver's memory was too hopeful (chunks of
        unequal size), the problem is solved again with as much kept free.
        """
        bound_s = problem.bound_s(cut)
        for _ in range(TIGHTENINGS):
            cost = self._cost(problem, cut)
            if cost is None:
                return None
            if cost.fit_probability >= self.min_fit:
                return self._tried(problem, cost)
            problem = problem.with_less(cost.fullest)
            again = self.cuts(problem, bound_s, self.worth_s)
            if not again:
                return None
            cut = again[0]
        return None

    def finalist(self, problem: CandidateProblem, cut: Solution) -> Finalist | None:
        """The simulated plan of a cut, None if it does not fit."""
        cost = self._cost(problem, cut)
        if cost is None or cost.fit_probability < self.min_fit:
            return None
        return self._tried(problem, cost)

    def _cost(self, problem: CandidateProblem, cut: Solution) -> LayoutCost | None:
        """None where a stage has layers enough for its chunks, but too few blocks among them."""
        layout = build_layout(problem, cut, self.space.rules.mixing)
        if not all(chunk.spans for chunk in layout.chunks):
            return None
        return LayoutCost(self.context, layout)

    def _tried(self, problem: CandidateProblem, cost: LayoutCost) -> Finalist:
        self.simulated += 1
        own = cost.estimate(min_fit=self.min_fit)
        found = Finalist(candidate=problem.candidate, layout=cost.layout, estimate=own)
        self.tried.append(found)
        return found

    def keep(self, finalist: Finalist) -> None:
        """Keep the best plan of each combination of degrees and ZeRO stage."""
        key = finalist.identity
        rivals = [each for each in self.finalists if each.identity == key]
        if rivals and rivals[0].estimate.step_s <= finalist.estimate.step_s:
            return
        others = [each for each in self.finalists if each.identity != key]
        self.finalists = sorted([*others, finalist], key=lambda each: each.estimate.step_s)
        del self.finalists[self.wanted :]

    def result(self, *, complete: bool) -> SearchResult:
        """What was found, with the bound over everything that was not visited."""
        pruned = dict(self.pruned)
        rest = Counter[str]()
        for _, number, bound_s, node in self.heap:
            if number in self.nodes:
                rest["bound" if bound_s >= self.best_s else "closed form"] += self._size(node)
        pruned = {
            cause: count
            for cause in sorted(pruned.keys() | rest.keys())
            if (count := pruned.get(cause, 0) + rest.get(cause, 0))
        }
        return SearchResult(
            finalists=tuple(self.finalists),
            bound_s=self.bound_s,
            candidates=self.candidates,
            visited=self.visited,
            simulated=self.simulated,
            pruned=pruned,
            refused=dict(self.space.refused),
            complete=complete,
            tried=tuple(self.tried),
        )
