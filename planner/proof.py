"""How far the best plan can be from the optimum: raise the bounds of all that is still open.

1. Nodes of the least bounds that no visit was worth are opened, for a part of the effort so far.
2. Where few are left with a bound below the best plan, all of them become open candidates.
3. The open candidate of the least bound gets a sharper one, from the longest paths of its schedule,
   or is shown to have no cut that could beat the best plan, until that raises the bound no more;
   then nodes are opened again, as long as they hold it down.
4. Where few layouts are left all of them are enumerated: then the plan is proven.
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

from planner.build import CandidateProblem
from planner.choices import Candidate
from planner.cuts import SLACKS, Stages
from planner.exhaust import every_better_cut, num_layouts
from planner.leastcut import INFINITE, least_cut_ns
from planner.leastwork import least_work
from planner.pathbound import PathBounds

if TYPE_CHECKING:
    from collections.abc import Callable

    from planner.searchrun import Node, SearchRun

__all__ = ["close_gap"]

SHARPENED = 4  # one in so many visits more, to raise the bound
FEW_NODES = 500  # of those not worth a visit, so many are opened for the proof
EXHAUSTED_LAYOUTS = 100_000
SIMULATED = 100  # so many of them each layout counts as whose memory only its account tells


def close_gap(run: SearchRun, should_stop: Callable[[], bool]) -> None:
    """Simulate every layout that could still beat the best plan, where they are few."""
    _raise_bound(run, should_stop)
    if run.enough:
        return
    if run.bound_s < min(run.least_open_s, run.best_s):
        return
    undecided = sorted(
        (each for each in run.open if each[0] < run.best_s), key=lambda each: each[0]
    )
    layouts = 0
    for _, problem in undecided:
        effort = 1 if problem.counts_memory else SIMULATED
        layouts += effort * num_layouts(problem.problem, most=EXHAUSTED_LAYOUTS)
        if layouts > EXHAUSTED_LAYOUTS:
            return
    for bound, problem in undecided:
        better = every_better_cut(problem, run.best_s)
        for cut in (each for each in better if run.may_cut(problem, each)):
            if should_stop():
                return
            finalist = run.finalist(problem, cut)
            if finalist is not None:
                run.keep(finalist)
        run.open.remove((bound, problem))
        run.least_open_s = min((each[0] for each in run.open), default=float("inf"))


def _raise_bound(run: SearchRun, should_stop: Callable[[], bool]) -> None:
    """Raise the least bound of all that is left, nodes and open candidates in turn."""
    bounding, effort = _Bounding(run), run.visited // SHARPENED
    effort -= _sharpen(run, effort)
    _open_rest(run)
    while True:
        bounding.raise_open(should_stop)
        opened = _sharpen(run, effort)
        effort -= opened
        if not opened or run.enough or should_stop():
            return


class _Bounding:
    """Sharper bounds of open candidates; those that have one are known."""

    def __init__(self, run: SearchRun) -> None:
        self.run = run
        self.paths = PathBounds()
        self._done: set[Candidate] = set()

    def raise_open(self, should_stop: Callable[[], bool]) -> None:
        """Sharpen the open candidate of the least bound, until that raises it no further."""
        run = self.run
        heap = [(bound_s, number) for number, (bound_s, _) in enumerate(run.open)]
        heapq.heapify(heap)
        while heap and not should_stop():
            bound_s, number = heap[0]
            problem = run.open[number][1]
            if problem.candidate in self._done or bound_s >= run.enough_s:
                break
            self._done.add(problem.candidate)
            least_s = max(bound_s, self._of(problem, bound_s))
            if least_s >= run.best_s:
                heapq.heappop(heap)
            else:
                heapq.heapreplace(heap, (least_s, number))
        run.open = [(bound_s, run.open[number][1]) for bound_s, number in sorted(heap)]
        run.least_open_s = min((each[0] for each in run.open), default=float("inf"))

    def _of(self, problem: CandidateProblem, bound_s: float) -> float:
        """By the longest paths of a candidate's schedule, and by a search for cuts that could beat
        the best plan.
        """
        run = self.run
        if problem.moves_blocks:
            return _least_work_s(run, problem)
        least_s = max(bound_s, self.paths.of(problem, run.bounds, run.best_s))
        if least_s >= run.best_s or not problem.counts_memory:
            return least_s
        return max(least_s, _least_cut_s(run, problem, least_s))


def _least_cut_s(run: SearchRun, problem: CandidateProblem, bound_s: float) -> float:
    """What no cut of a candidate can beat, infinite where none can be faster than the best plan."""
    solver = run.solver(problem.problem)
    found = run.cuts(problem, bound_s, run.best_s, solver)
    if not found:
        return INFINITE
    least_s = run.least_s(problem, found)
    if not run.space.rules.uneven_stages:
        return least_s
    holding = run.holding(problem)
    for slack in SLACKS:
        limit_s = min(bound_s * slack, run.best_s)
        limit_ns = problem.passes_ns(limit_s)
        stages = Stages(problem.problem, solver, problem.limits_ns(limit_s)[1], holding)
        least_ns = least_cut_ns(problem, stages, limit_ns)
        if least_ns < INFINITE or limit_s == run.best_s:
            return max(least_s, problem.step_s(least_ns))
    return least_s


def _least_work_s(run: SearchRun, problem: CandidateProblem) -> float:
    """What no layout of a candidate can beat by the work of its devices, where its blocks do not
    stay where the cut puts them.
    """
    if not run.space.rules.uneven_stages and not run.cuts(problem, 0.0, run.best_s):
        return INFINITE
    sums, greatest = least_work(problem, run.best_s, run.holding(problem))
    if sums == INFINITE:
        return INFINITE
    alone = problem.microbatches / problem.schedule.copies * greatest
    return problem.step_s(max(problem.least_ns(sums, 0.0), alone))


def _sharpen(run: SearchRun, most: int) -> int:
    """Open the nodes of the least bounds that no visit was worth, ``most`` at most: their
    candidates have sharper bounds, or do not fit. The number opened.
    """
    opened = 0
    while opened < most and run.bound_s < min(run.least_open_s, run.best_s):
        bound_s, number = run.waiting[0]
        _open(run, run.nodes[number], number, bound_s)
        opened += 1
    run.heap = [each for each in run.heap if each[1] in run.nodes]
    return opened


def _open_rest(run: SearchRun) -> None:
    """Leave candidates open that no visit was worth, where few have a bound below the best
    plan.
    """
    rest = [each for each in run.heap if each[2] < run.best_s]
    while rest and len(rest) <= FEW_NODES:
        for _, number, bound_s, node in rest:
            _open(run, node, number, bound_s)
        run.heap = [each for each in run.heap if each[1] in run.nodes]
        rest = [each for each in run.heap if each[2] < run.best_s]


def _open(run: SearchRun, node: Node, number: int, bound_s: float) -> None:
    """Open a node of the heap; a candidate is left open."""
    del run.nodes[number]
    if isinstance(node, Candidate):
        problem = CandidateProblem(context=run.context, candidate=node, min_fit=run.min_fit)
        run.leave_open(bound_s, problem)
        run.pruned["closed form"] += 1
    else:
        run.open_node(node, bound_s)
