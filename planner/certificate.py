"""A second opinion on a plan: the integer programme, with the plan as the answer to beat.

The search's own proof rests on its bounds and on the closed form over counts. The certificate is
made by other means: the best plan's candidate as an integer programme (``planner.ilp``), solved
by a general solver that may cut and assign strategies as it likes, with the plan's own assignment
as cutoff. What it says holds for the layouts of this candidate and in the closed form of the
step, which the solvers minimise; the bound of the whole space is the search's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from planner.build import NANO, CandidateProblem
from planner.plan import Certificate
from planner.solvers import solve

if TYPE_CHECKING:
    from costmodel.context import CostContext
    from planner.finalists import Finalist

__all__ = ["certify"]


def certify(
    context: CostContext, finalist: Finalist, *, min_fit: float, time_limit_s: float | None = None
) -> Certificate | None:
    """Run the integer programme on a plan's candidate; None where the candidate's closed form of
    memory holds no assignment.
    """
    own = CandidateProblem(context=context, candidate=finalist.candidate, min_fit=min_fit)
    known = solve(own.problem).solution
    if known is None:
        return None
    answer = solve(own.problem, solver="ilp", known=known, time_limit_s=time_limit_s)
    best = answer.solution or known

    def seconds(objective_ns: int) -> float:
        passes = objective_ns / own.waves / NANO
        return context.whole_step_s(passes, finalist.candidate.num_ranks)

    return Certificate(
        solver="HiGHS" if answer.solver == "ilp" else answer.solver,
        objective_s=seconds(best.objective_ns),
        bound_s=seconds(answer.bound_ns or 0),
        cpu_s=answer.cpu_s,
        note=answer.note,
    )
