"""All solvers under one call: the same problem in, the same kind of answer out."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from planner import brute, closed_form, dp, graph, ilp, nested
from planner.problem import Bounded

if TYPE_CHECKING:
    from collections.abc import Callable

    from planner.problem import SearchProblem, Solution

__all__ = ["SOLVERS", "Solved", "fitting_solver", "solve"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Solved:
    """An answer with its proof: no assignment has an objective below ``bound_ns`` (None: there is
    no assignment). ``note`` says where another solver had to step in.
    """

    solver: str
    solution: Solution | None
    bound_ns: int | None
    cpu_s: float
    note: str = ""

    @property
    def gap(self) -> float:
        """Relative distance of objective and bound."""
        return Bounded(self.solution, self.bound_ns).gap

    @property
    def proven(self) -> bool:
        """Whether the answer is shown to be the best, or that there is none."""
        return self.gap == 0.0


def _exact(
    solver: Callable[[SearchProblem], Solution | None],
) -> Callable[[SearchProblem, Solution | None, float | None], Bounded]:
    """A solver that runs to its end and is right."""

    def run(problem: SearchProblem, _: Solution | None, __: float | None) -> Bounded:
        solution = solver(problem)
        return Bounded(solution, None if solution is None else solution.objective_ns)

    return run


def _nested(problem: SearchProblem, known: Solution | None, limit_s: float | None) -> Bounded:
    return nested.solve(problem, incumbent=known, time_limit_s=limit_s or float("inf"))


def _ilp(problem: SearchProblem, known: Solution | None, limit_s: float | None) -> Bounded:
    return ilp.solve(problem, incumbent=known, time_limit_s=limit_s)


SOLVERS: Final = {
    "closed-form": _exact(closed_form.solve),
    "dp": _exact(dp.solve),
    "graph": _exact(graph.solve),
    "brute-force": _exact(brute.solve),
    "nested": _nested,
    "ilp": _ilp,
}


def fitting_solver(problem: SearchProblem) -> str:
    """The solver made for such a problem: elimination for graphs, the closed form where changing
    strategy is free, the nested programme where it costs something.
    """
    if not problem.is_chain:
        return "graph"
    return "nested" if problem.reshard_ns else "closed-form"


def solve(
    problem: SearchProblem,
    *,
    solver: str | None = None,
    known: Solution | None = None,
    time_limit_s: float | None = None,
) -> Solved:
    """Solve a problem. ``known``: an assignment that the answer must not be worse than.

    The assignment of every solver is costed again by the problem; where the integer programme
    fails, the fitting solver answers and the note says so.
    """
    name = solver or fitting_solver(problem)
    started, note = time.process_time(), ""
    try:
        answer = SOLVERS[name](problem, known, time_limit_s)
    except ilp.SolverFailedError as error:
        name, note = fitting_solver(problem), f"the integer programme failed ({error})"
        answer = SOLVERS[name](problem, known, time_limit_s)
    return Solved(
        solver=name,
        solution=answer.solution,
        bound_ns=answer.bound_ns,
        cpu_s=time.process_time() - started,
        note=note,
    )
