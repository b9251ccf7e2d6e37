"""How far the best plan can be from the optimum: raise the bounds of all that is still open.

1. Nodes of the least bounds that no visit was worth are opened, for a part of the effort so far.
2. Where few are left with a bound below the best plan, all of them become open candidates.
3. The open candidate of the least bound gets a sharper one, from the longest paths of its schedule,
   or is shown to have no cut that could beat the best plan, until that raises the bound no more.
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
from planner.pathbound import PathBounds

if TYPE_CHECKING:
    from collections.abc import Callable

    from planner.searchrun import SearchRun

__all__ = ["close_gap"]

SHARPENED = 4  # one in so many visits more, to raise the bound
FEW_NODES = 500  # of those not worth a visit, so many are opened for the proof
EXHAUSTED_LAYOUTS = 100_000


def close_gap(run: SearchRun, should_stop: Callable[[], bool]) -> None:
    """Simulate every layout that could still beat the best plan, where they are few."""
    _sharpen(run)
    _open_rest(run)
    _trace(run, should_stop)
    if run.enough:
        return
    if run.bound_s < min(run.least_open_s, run.best_s):
        return
    undecided = sorted(
        (each for each in run.open if each[0] < run.best_s), key=lambda each: each[0]
    )
    layouts = 0
    if any(problem.moves_blocks for _, problem in undecided):
        return
    for _, problem in undecided:
        layouts += num_layouts(problem.problem, most=EXHAUSTED_LAYOUTS)
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


def _trace(run: SearchRun, should_stop: Callable[[], bool]) -> None:
    """Raise the least bound of an open candidate, by the longest paths of its schedule and by
    a search for cuts that could beat the best plan, until none of them raises it further.
    """
    paths = PathBounds()
    heap = [(bound_s, number, False) for number, (bound_s, _) in enumerate(run.open)]
    heapq.heapify(heap)
    while heap and not should_stop():
        bound_s, number, traced = heap[0]
        if traced or bound_s >= run.enough_s:
            break
        problem = run.open[number][1]
        rest_s = run.bounds.of_fuller(problem.candidate)
        least_s = max(bound_s, min(rest_s, paths.of(problem, run.bounds, run.best_s)))
        if least_s < run.best_s and not problem.moves_blocks:
            least_s = max(least_s, _least_cut_s(run, problem, least_s))
        if least_s >= run.best_s:
            heapq.heappop(heap)
        else:
            heapq.heapreplace(heap, (least_s, number, True))
    run.open = [(bound_s, run.open[number][1]) for bound_s, number, _ in sorted(heap)]
    run.least_open_s = min((each[0] for each in run.open), default=float("inf"))


def _least_cut_s(run: SearchRun, problem: CandidateProblem, bound_s: float) -> float:
    """What no cut of a candidate can beat, infinite where none can be faster than the best plan."""
    solver = run.solver(problem.problem)
    found = run.cuts(problem, bound_s, run.best_s, solver)
    if not found:
        return INFINITE
    least_s = run.least_s(problem, found)
    if problem.schedule.copies > 1 or not run.space.rules.uneven_stages:
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


def _sharpen(run: SearchRun) -> None:
    """Open the nodes of the least bounds that no visit was worth, for a part of the effort so
    far: their candidates have sharper bounds, or do not fit.
    """
    for _ in range(run.visited // SHARPENED):
        if run.bound_s >= min(run.least_open_s, run.best_s):
            break
        bound_s, number = run.waiting[0]
        node = run.nodes[number]
        if isinstance(node, Candidate):
            break
        del run.nodes[number]
        run.open_node(node, bound_s)
    run.heap = [each for each in run.heap if each[1] in run.nodes]


def _open_rest(run: SearchRun) -> None:
    """Leave candidates open that no visit was worth, where few have a bound below the best
    plan.
    """
    rest = [each for each in run.heap if each[2] < run.best_s]
    while rest and len(rest) <= FEW_NODES:
        for _, number, bound_s, node in rest:
            del run.nodes[number]
            if isinstance(node, Candidate):
                problem = CandidateProblem(context=run.context, candidate=node, min_fit=run.min_fit)
                run.leave_open(bound_s, problem)
                run.pruned["closed form"] += 1
            else:
                run.open_node(node, bound_s)
        run.heap = [each for each in run.heap if each[1] in run.nodes]
        rest = [each for each in run.heap if each[2] < run.best_s]
