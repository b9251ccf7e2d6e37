"""All solvers on the same problems, brute force as the oracle."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import combinations

import pulp
import pytest

from planner import brute, closed_form, dp, graph, ilp, nested
from planner.counts import Choices, Option, best_counts
from planner.exhaust import num_layouts
from planner.problem import Bounded, Edge, SearchProblem

SOLVERS = (brute, dp, closed_form)


def random_problem(rng: random.Random, *, reshard: bool = False) -> SearchProblem:
    classes, strategies, stages = rng.randint(1, 3), rng.randint(1, 4), rng.randint(1, 3)
    layers = rng.randint(stages, 6 if strategies < 4 else 5)
    has_free_layers = rng.random() < 0.3

    def memory() -> int:
        return 0 if has_free_layers and rng.random() < 0.5 else rng.randint(0, 20)

    return SearchProblem(
        chain=tuple(rng.randrange(classes) for _ in range(layers)),
        num_stages=stages,
        repeats=rng.randint(1, 8),
        time_ns=tuple(tuple(rng.randint(0, 30) for _ in range(strategies)) for _ in range(classes)),
        memory=tuple(
            tuple(tuple(memory() for _ in range(strategies)) for _ in range(classes))
            for _ in range(stages)
        ),
        working=tuple(
            tuple(rng.choice([0, 2, 5]) for _ in range(strategies)) for _ in range(classes)
        ),
        limit=tuple(rng.randint(0, 60) for _ in range(stages)),
        allowed=tuple(
            tuple(sorted(rng.sample(range(strategies), rng.randint(1, strategies))))
            for _ in range(classes)
        ),
        stage_ns=tuple(rng.randint(0, 9) for _ in range(stages)),
        least_layers=rng.choice([1, 1, 2]),
        reshard_ns=tuple(
            tuple(0 if a == b else rng.randint(0, 9) for b in range(strategies))
            for a in range(strategies)
        )
        if reshard
        else (),
    )


def objectives(problem: SearchProblem, solvers=SOLVERS) -> list[int | None]:
    solutions = [solver.solve(problem) for solver in solvers]
    solutions = [s.solution if isinstance(s, Bounded) else s for s in solutions]
    for solution in solutions:
        if solution is not None:
            assert_keeps_its_promises(problem, solution)
    return [None if s is None else s.objective_ns for s in solutions]


def assert_keeps_its_promises(problem, solution):
    stops = (*solution.starts[1:], len(problem.chain))
    times = []
    for stage, (first, stop) in enumerate(zip(solution.starts, stops, strict=True)):
        own = solution.strategies[first:stop]
        assert problem.stage_fits(stage, first, own)
        assert all(
            j in problem.allowed[c] for c, j in zip(problem.chain[first:stop], own, strict=True)
        )
        times.append(problem.stage_time_ns(stage, first, own))
    assert tuple(times) == solution.stage_times_ns
    assert problem.cost(solution.starts, solution.strategies) == solution


def with_edges(rng: random.Random, problem: SearchProblem) -> SearchProblem:
    """The same layers, each fed by any of those before it."""
    layers, strategies = len(problem.chain), range(len(problem.time_ns[0]))
    pairs = [pair for pair in combinations(range(layers), 2) if rng.random() < 0.5]
    table = [tuple(tuple(rng.randint(0, 9) for _ in strategies) for _ in strategies) for _ in pairs]
    edges = tuple(Edge(*pair, costs) for pair, costs in zip(pairs, table, strict=True))
    return replace(problem, edges=edges)


def with_handovers(rng: random.Random, problem: SearchProblem) -> SearchProblem:
    return replace(problem, handover_ns=tuple(rng.randint(0, 40) for _ in problem.chain))


KINDS = {
    "chain": random_problem,
    "resharding": lambda rng: random_problem(rng, reshard=True),
    "graph": lambda rng: with_edges(rng, random_problem(rng)),
    "hand-over": lambda rng: with_handovers(rng, random_problem(rng)),
}
SOLVE = {
    "chain": (dp, graph, nested, ilp, closed_form),
    "resharding": (dp, graph, nested, ilp),
    "graph": (graph, ilp),
    "hand-over": (dp, graph, nested, ilp, closed_form),
}


@pytest.mark.parametrize("kind", KINDS)
def test_all_solvers_equal_brute_force_on_250_random_problems_of_each_kind(kind):
    rng = random.Random(20261130)
    problems = [KINDS[kind](rng) for _ in range(250)]
    answers = [objectives(problem, (brute, *SOLVE[kind])) for problem in problems]
    assert all(len(set(answer)) == 1 for answer in answers)
    assert sum(answer[0] is None for answer in answers) < 160  # the others have a solution
    assert sum(0 in p.memory[0][0] for p in problems) > 25  # zero-memory layers are among them
    assert sum(len(set(p.limit)) > 1 for p in problems) > 100  # and devices of unequal memory


@pytest.mark.parametrize("solver", [nested, ilp])
def test_a_bound_is_never_above_the_optimum(solver):
    rng = random.Random(5)
    for _ in range(100):
        problem = random_problem(rng, reshard=True)
        optimum, answer = brute.solve(problem), solver.solve(problem)
        if optimum is None:
            assert answer == Bounded(None, None)
        else:
            assert optimum.objective_ns * (1 - 1e-5) - 1 <= answer.bound_ns
            assert answer.bound_ns <= optimum.objective_ns


def test_a_known_optimum_is_confirmed_and_a_worse_one_improved():
    rng = random.Random(17)
    improved = 0
    for _ in range(60):
        problem = random_problem(rng, reshard=True)
        known = sorted(brute.every_solution(problem), key=lambda each: each.objective_ns)
        for incumbent in known[:1] + known[-1:]:
            answer = ilp.solve(problem, incumbent=incumbent)
            assert answer.solution.objective_ns == known[0].objective_ns
            improved += incumbent.objective_ns > known[0].objective_ns
    assert improved > 20


def test_a_solver_that_answers_wrongly_is_replaced_by_the_other(monkeypatch, capfd):
    problem = random_problem(random.Random(4))
    right = ilp.solve(problem)
    monkeypatch.setattr(pulp.HiGHS, "callSolver", lambda *_: None)
    assert ilp.solve(problem).solution == right.solution
    assert capfd.readouterr() == ("", "")


def test_two_solvers_that_fail_are_named(monkeypatch):
    def fail(*_):
        raise pulp.PulpSolverError("no licence")

    monkeypatch.setattr(pulp.HiGHS, "actualSolve", fail)
    monkeypatch.setattr(pulp.PULP_CBC_CMD, "actualSolve", fail)
    with pytest.raises(ilp.SolverFailedError, match=r"HiGHS: no licence; CBC: no licence"):
        ilp.solve(random_problem(random.Random(4)))


def test_the_closed_form_refuses_resharding_costs():
    problem = random_problem(random.Random(1), reshard=True)
    with pytest.raises(ValueError, match="resharding"):
        closed_form.solve(problem)


def test_more_memory_never_gives_a_slower_assignment():
    rng = random.Random(11)
    for _ in range(100):
        problem = random_problem(rng)
        roomier = SearchProblem(
            **{
                **{f: getattr(problem, f) for f in problem.__dataclass_fields__},
                "limit": tuple(limit + 7 for limit in problem.limit),
            }
        )
        tight, loose = closed_form.solve(problem), closed_form.solve(roomier)
        if tight is not None:
            assert loose is not None
            assert loose.objective_ns <= tight.objective_ns


def choices(*options: tuple[int, int]) -> Choices:
    return Choices(Option(time, memory, j) for j, (time, memory) in enumerate(options))


def test_counts_cost_the_same_work_for_a_thousand_layers_as_for_ten():
    options = choices((10, 100), (13, 60), (17, 10), (18, 9))
    small, large = best_counts(options, 10, 705), best_counts(options, 1000, 70_505)
    assert small is not None
    assert large is not None
    assert large[0] <= 100 * small[0]
    assert sum(count for _, count in large[1]) == 1000


def test_best_counts_beats_every_pair_where_three_strategies_fit_better():
    # one fast, two middle, two small fill 39 exactly; the best pair takes 37
    options = choices((1, 13), (8, 8), (9, 5))
    assert best_counts(options, 5, 39) == (35, ((0, 1), (1, 2), (2, 2)))


def test_the_number_of_layouts_is_that_of_the_enumeration():
    rng = random.Random(3)
    for _ in range(30):
        problem = random_problem(rng)
        unlimited = SearchProblem(
            **{
                **{f: getattr(problem, f) for f in problem.__dataclass_fields__},
                "limit": (10**9,) * problem.num_stages,
            }
        )
        distinct = {
            (s.starts, tuple(_sorted_runs(problem, s))) for s in brute.every_solution(unlimited)
        }
        assert num_layouts(problem, most=10**6) == len(distinct)


def _sorted_runs(problem, solution):
    stops = (*solution.starts[1:], len(problem.chain))
    for first, stop in zip(solution.starts, stops, strict=True):
        run: list[int] = []
        for i in range(first, stop):
            if run and problem.chain[i] != problem.chain[i - 1]:
                yield tuple(sorted(run))
                run = []
            run.append(solution.strategies[i])
        yield tuple(sorted(run))
