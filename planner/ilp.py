r"""Integer linear programme for the joint choice of stage cut and strategies, in PuLP.

Sets: stages s, *runs* r (equal layers in a row, n_r of them; single layers where edges cost
something), strategies j allowed for the run's class.

Variables:

- x[s,r,j] >= 0 integer: layers of run r on stage s with strategy j
- d[s,r] in {0, 1}: run r lies on stages up to s as a whole
- f[e,s,a,b] >= 0: both ends of edge e lie on stage s, in layout classes a and b (strategies that
  reshard alike). Flow between the classes, so that no product of binaries is needed; it is whole
  at whole x.
- w[s] >= 0: working memory of stage s;  T[s] >= 0: its time;  t >= 0: the greatest time

minimise    sum_s T[s] + sum_s o[s] + (repeats - 1) t

subject to

- sum_{s,j} x[s,r,j] = n_r                                     every layer is somewhere
- n_r d[s,r] <= sum_{k<=s,j} x[k,r,j]                          d says what it means
- sum_{k<=s,j} x[k,r+1,j] <= n_{r+1} d[s,r]                    layers stand in order
- sum_{r,j} x[s,r,j] >= least_layers                           no stage is empty
- sum_{r,j} memory[s,r,j] x[s,r,j] + w[s] <= limit[s]
- w[s] >= working[r,j] y[s,r,j],  x[s,r,j] <= n_r y[s,r,j]     y[s,r,j] in {0, 1}, runs of one: x
- T[s] = fixed[s] + sum time[r,j] x[s,r,j] + sum cost[e,a,b] f[e,s,a,b]
- t >= T[s], t >= o[s]
- sum_b f[e,s,a,b] <= sum_{j in a} x[s,source,j], sum_a f[e,s,a,b] <= sum_{j in b} x[s,target,j],
  sum_{a,b} f[e,s,a,b] >= sum_j x[s,source,j] + sum_j x[s,target,j] - 1
- o[s] = sum_i handover[i] h[s,i], where h[s,i] >= 0 marks stage s + 1 as starting with run i

A known assignment gives upper bounds to T and t and a cutoff to the objective: what is then
infeasible is proven not to exist. HiGHS solves it, CBC where HiGHS fails; the answer is costed
again by the problem itself, and the reported bound is that of the solver, less its tolerance.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any, Final

from planner.problem import Bounded

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from planner.problem import Edge, SearchProblem, Solution

__all__ = ["SolverFailedError", "solve"]

LARGEST: Final = 2.0**20  # numbers are halved until the largest of their kind is below
TOLERANCE: Final = 1e-6  # relative, of the solvers' feasibility and optimality


class SolverFailedError(Exception):
    """No solver gave an answer that the problem accepts."""


@dataclass(frozen=True, slots=True)
class _Answer:
    solution: Solution | None
    bound: float | None  # scaled; None where the solver states none
    infeasible: bool


def solve(
    problem: SearchProblem,
    *,
    incumbent: Solution | None = None,
    time_limit_s: float | None = None,
) -> Bounded:
    """The best assignment, at least as good as ``incumbent``, and the solver's proof for it.

    Raises SolverFailedError where HiGHS and CBC both fail or answer with what the problem refuses.
    """
    model = _Model(problem, incumbent)
    failures = []
    for name in ("HiGHS", "CBC"):
        try:
            answer = model.answer(name, time_limit_s)
        except _RefusedError as error:
            failures.append(f"{name}: {error}")
            continue
        return model.bounded(answer)
    raise SolverFailedError("; ".join(failures))


class _RefusedError(Exception):
    """An answer that cannot be used, and why."""


@dataclass(frozen=True)
class _Run:
    """Equal neighbours in the row of layers: how many, and their class."""

    count: int
    c: int


class _Model:
    """The programme of one problem."""

    def __init__(self, problem: SearchProblem, incumbent: Solution | None) -> None:
        import pulp as lp  # noqa: PLC0415 - slow to load, and only needed here

        self.lp, self.problem, self.incumbent = lp, problem, incumbent
        self.runs = list(_runs(problem))
        self.stages = range(problem.num_stages)
        longest = sum(max(problem.time_ns[c]) for c in problem.chain) + max(problem.stage_ns)
        self.second = _scale(longest * problem.repeats)
        self.byte = _scale(max(problem.limit))
        self.programme = lp.LpProblem("parplan", lp.LpMinimize)
        self.x: dict[tuple[int, int, int], Any] = {}
        self._assign()
        self._order()
        self._remember()
        self._time()

    # --- constraints ------------------------------------------------------------------------

    def _add(self, constraint: Any) -> None:
        self.programme += constraint

    def _variable(self, name: str, *, most: int | None = None, whole: bool = False) -> Any:
        """A variable of at least 0."""
        kind = self.lp.LpInteger if whole else self.lp.LpContinuous
        return self.programme.add_variable(name, 0, most, cat=kind)

    def _allowed(self, r: int) -> tuple[int, ...]:
        return self.problem.allowed[self.runs[r].c]

    def _held(self, s: int, r: int, strategies: Iterable[int] | None = None) -> Any:
        """Layers of a run on a stage, under some strategies."""
        own = self._allowed(r) if strategies is None else strategies
        return self.lp.lpSum(self.x[s, r, j] for j in own)

    def _until(self, s: int, r: int) -> Any:
        return self.lp.lpSum(self._held(k, r) for k in range(s + 1))

    def _assign(self) -> None:
        for s in self.stages:
            for r, run in enumerate(self.runs):
                for j in self._allowed(r):
                    name = f"x_{s}_{r}_{j}"
                    self.x[s, r, j] = self._variable(name, most=run.count, whole=True)
        for r, run in enumerate(self.runs):
            self._add(self._until(self.stages[-1], r) == run.count)
        for s in self.stages:
            total = self.lp.lpSum(self._held(s, r) for r in range(len(self.runs)))
            self._add(total >= self.problem.least_layers)

    def _order(self) -> None:
        """A run goes on to a stage only when the run before it is complete."""
        for s in self.stages[:-1]:
            for r, (run, following) in enumerate(zip(self.runs, self.runs[1:], strict=False)):
                if run.count == 1:
                    done = self._until(s, r)
                else:
                    done = self._variable(f"d_{s}_{r}", most=1, whole=True)
                    self._add(run.count * done <= self._until(s, r))
                self._add(self._until(s, r + 1) <= following.count * done)

    def _remember(self) -> None:
        problem = self.problem
        for s in self.stages:
            working = self._variable(f"w_{s}")
            held: list[Any] = [working]
            for r, run in enumerate(self.runs):
                for j in self._allowed(r):
                    held.append(self.x[s, r, j] * (problem.memory[s][run.c][j] / self.byte))
                    if problem.working[run.c][j]:
                        size = problem.working[run.c][j] / self.byte
                        self._add(working >= size * self._used(s, r, j))
            self._add(self.lp.lpSum(held) <= problem.limit[s] / self.byte)

    def _used(self, s: int, r: int, j: int) -> Any:
        """Whether any layer of the run on the stage takes the strategy."""
        if self.runs[r].count == 1:
            return self.x[s, r, j]
        used = self._variable(f"y_{s}_{r}_{j}", most=1, whole=True)
        self._add(self.x[s, r, j] <= self.runs[r].count * used)
        return used

    def _time(self) -> None:
        problem = self.problem
        greatest = self._variable("t")
        terms: list[Any] = [(problem.repeats - 1) * greatest]
        for s in self.stages:
            own: list[Any] = [problem.stage_ns[s] / self.second]
            own += [
                self.x[s, r, j] * (problem.time_ns[run.c][j] / self.second)
                for r, run in enumerate(self.runs)
                for j in self._allowed(r)
            ]
            for number, edge in enumerate(problem.links):
                own += self._resharding(s, number, edge)
            time = self._variable(f"T_{s}")
            self._add(time == self.lp.lpSum(own))
            self._add(greatest >= time)
            terms.append(time)
        for s in self.stages[:-1]:
            if problem.handover_ns:
                handed = self._handed(s)
                self._add(greatest >= handed)
                terms.append(handed)
        self.programme += self.lp.lpSum(terms)
        if self.incumbent is not None:
            least = self.incumbent.objective_ns / self.second
            self._add(self.lp.lpSum(terms) <= least)

    def _resharding(self, s: int, number: int, edge: Edge) -> list[Any]:
        """Flow along an edge whose ends both lie on the stage, times its cost."""
        sources = _alike(edge.cost_ns, self._allowed(edge.source))
        columns = tuple(zip(*edge.cost_ns, strict=True))
        targets = _alike(columns, self._allowed(edge.target))
        flow = {
            (a, b): self._variable(f"f_{s}_{number}_{a}_{b}")
            for a in range(len(sources))
            for b in range(len(targets))
        }
        for a, own in enumerate(sources):
            out = self.lp.lpSum(flow[a, b] for b in range(len(targets)))
            self._add(out <= self._held(s, edge.source, own))
        for b, own in enumerate(targets):
            into = self.lp.lpSum(flow[a, b] for a in range(len(sources)))
            self._add(into <= self._held(s, edge.target, own))
        both = self._held(s, edge.source) + self._held(s, edge.target) - 1
        self._add(self.lp.lpSum(flow.values()) >= both)
        return [
            flow[a, b] * (edge.cost_ns[sources[a][0]][targets[b][0]] / self.second) for a, b in flow
        ]

    def _handed(self, s: int) -> Any:
        """Time of the hand-over from a stage to the next, by the layer that comes first there."""
        starts = []
        for i in range(1, len(self.runs)):
            start = self._variable(f"h_{s}_{i}")
            self._add(start >= self._until(s, i - 1) + self._held(s + 1, i) - 1)
            starts.append(start * (self.problem.handover(i) / self.second))
        return self.lp.lpSum(starts)

    # --- answers ----------------------------------------------------------------------------

    def answer(self, name: str, time_limit_s: float | None) -> _Answer:
        """Run one solver; raises _RefusedError where it fails or its answer breaks a rule."""
        lp = self.lp
        solver = (
            lp.HiGHS(msg=False, timeLimit=time_limit_s, gapRel=0.0, threads=1)
            if name == "HiGHS"
            else lp.PULP_CBC_CMD(msg=False, timeLimit=time_limit_s, gapRel=0.0, threads=1)
        )
        try:
            self.programme.solve(solver)
        except lp.PulpSolverError as error:
            raise _RefusedError(str(error)) from error
        if self.programme.status == lp.LpStatusInfeasible:
            return _Answer(self.incumbent, None, infeasible=True)
        if self.programme.status != lp.LpStatusOptimal and time_limit_s is None:
            raise _RefusedError(f"it ended as {lp.LpStatus[self.programme.status]}")
        return _Answer(self._solution(), self._stated_bound(name), infeasible=False)

    def _solution(self) -> Solution | None:
        if self.programme.sol_status not in (
            self.lp.LpSolutionOptimal,
            self.lp.LpSolutionIntegerFeasible,
        ):
            return self.incumbent
        starts: list[int] = []
        strategies: list[int] = []
        for s in self.stages:
            starts.append(len(strategies))
            for r in range(len(self.runs)):
                for j in self._allowed(r):
                    strategies += [j] * round(self.x[s, r, j].value() or 0)
        if len(strategies) != len(self.problem.chain):
            raise _RefusedError("its numbers are not whole")
        solution = self.problem.cost(tuple(starts), tuple(strategies))
        if solution is None:
            raise _RefusedError("its assignment breaks a rule of the problem")
        stated = self.lp.value(self.programme.objective) * self.second
        if not math.isclose(stated, solution.objective_ns, rel_tol=100 * TOLERANCE, abs_tol=1):
            raise _RefusedError(
                f"it states an objective of {stated:.0f}, which is {solution.objective_ns}"
            )
        if self.incumbent and self.incumbent.objective_ns < solution.objective_ns:
            return self.incumbent
        return solution

    def _stated_bound(self, name: str) -> float | None:
        """What the solver says no assignment is below, scaled."""
        if name == "HiGHS":
            return float(self.programme.solverModel.getInfo().mip_dual_bound)
        if self.programme.sol_status == self.lp.LpSolutionOptimal:
            return float(self.lp.value(self.programme.objective))
        return None

    def bounded(self, answer: _Answer) -> Bounded:
        """The answer in the problem's units, its bound lowered by the solvers' tolerance."""
        if answer.infeasible:
            if self.incumbent is None:
                return Bounded(None, None)
            return Bounded(self.incumbent, self._lowered(self.incumbent.objective_ns))
        bound = 0
        if answer.bound is not None and math.isfinite(answer.bound):
            bound = self._lowered(answer.bound * self.second)
        if answer.solution is not None:
            bound = min(bound, answer.solution.objective_ns)
        return Bounded(answer.solution, bound)

    @staticmethod
    def _lowered(value: float) -> int:
        return max(0, math.ceil(value * (1 - TOLERANCE) - TOLERANCE))


def _runs(problem: SearchProblem) -> Iterator[_Run]:
    apart = bool(problem.links or problem.handover_ns)
    for c, group in groupby(problem.chain):
        count = len(list(group))
        if apart:
            yield from (_Run(1, c) for _ in range(count))
        else:
            yield _Run(count, c)


def _alike(costs: Sequence[Sequence[int]], strategies: Iterable[int]) -> list[list[int]]:
    """Strategies whose rows of costs are the same."""
    groups: dict[object, list[int]] = {}
    for j in strategies:
        groups.setdefault(tuple(costs[j]), []).append(j)
    return list(groups.values())


def _scale(largest: int) -> float:
    """A power of two, so that numbers stay exact."""
    return 2.0 ** max(0, math.ceil(math.log2(max(1, largest) / LARGEST)))
