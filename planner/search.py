"""The outer loop: bound every candidate, visit the most promising first, solve, simulate, stop.

1. Every legal combination of degrees gets a lower bound from its compute alone, and the closed form
   of its step, which is no bound but close to what the simulation will say.
2. The most promising one by the closed form is opened into candidates (ZeRO, shard groups, rank
   order, recomputation), each with sharper figures and a first check of memory.
3. The most promising candidate is solved: strategies by counts, cuts by dynamic programming, under
   the memory limit and under the best step time so far. The undominated cuts are simulated exactly.
4. When the next closed form is longer than the worst plan that is still wanted, by a margin, the
   search ends. What was not visited and what was not simulated keeps its bound, which counts.
5. Where few layouts have a bound below the best plan, at most 100,000 together, all of them are
   enumerated: then the plan is proven.

The bounds are relaxations, so ``bound_s`` holds for the whole space: no layout of it is faster.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from planner.closed_form import CountingStages
from planner.collector import collector_off
from planner.dp import LayerwiseStages
from planner.plan import MIN_FIT
from planner.proof import close_gap
from planner.searchrun import SearchRun

if TYPE_CHECKING:
    from collections.abc import Callable

    from costmodel.context import CostContext
    from planner.cuts import StageSolver
    from planner.finalists import Finalist, SearchResult
    from planner.problem import SearchProblem
    from planner.space import SearchSpace

__all__ = ["SOLVERS", "search"]

SOLVERS: Final[dict[str, Callable[[SearchProblem], StageSolver]]] = {
    "closed-form": CountingStages,
    "dp": LayerwiseStages,
}


def search(
    context: CostContext,
    space: SearchSpace,
    *,
    min_fit: float = MIN_FIT,
    runners_up: int = 3,
    solver: str = "closed-form",
    gap: float = 0.0,
    should_stop: Callable[[], bool] = lambda: False,
    on_progress: Callable[[int, Finalist | None, float], None] | None = None,
) -> SearchResult:
    """Find the fastest layout of ``space`` that fits with probability ``min_fit``.

    ``solver`` names who solves a stage (``SOLVERS``): both are exact, so that one checks the other.
    The search ends as soon as the best plan is shown to be within ``gap`` of the optimum.
    ``should_stop`` is asked before every visit; ``on_progress(visited, best, bound_s)`` is told
    after it. Ties are broken by the order in which the space names its candidates.
    """
    wanted, own = runners_up + 1, SOLVERS[solver]
    with collector_off():  # only this call knows the run, whose nodes are gone once it is back on
        return _result_of(
            SearchRun(context, space, min_fit, wanted=wanted, solver=own, gap=gap),
            should_stop,
            on_progress,
        )


def _result_of(
    run: SearchRun,
    should_stop: Callable[[], bool],
    on_progress: Callable[[int, Finalist | None, float], None] | None,
) -> SearchResult:
    run.bound_all()
    while run.promising and not run.enough:
        if should_stop():
            return run.result(complete=False)
        run.visit()
        if on_progress is not None:
            on_progress(run.visited, run.finalists[0] if run.finalists else None, run.bound_s)
    if not run.enough:
        close_gap(run, should_stop)
    return run.result(complete=not should_stop() or run.enough)
