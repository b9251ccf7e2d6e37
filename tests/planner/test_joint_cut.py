"""The published kind of joint problem: unequal layers, resharding, a memory limit for each stage.

Instances of 24 and 96 layers with 24 strategies lie beside the checkout; two MILP solvers found no
answer to the greater one in 71 and 124 s, the best known is 12,942,633 with a bound of 12,878,679.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from jointcut import INSTANCES, joint_problem

from planner import dp, graph, ilp, nested
from planner.problem import Edge, SearchProblem


def load(name: str) -> SearchProblem:
    path = INSTANCES / f"{name}.json"
    if not path.exists():
        pytest.skip("needs the instances of ../shared/peers/joint_cut")
    return joint_problem(path)


def test_24_layers_on_4_stages_are_proven_and_the_integer_programme_agrees():
    problem = load("chain_24x24_4")
    answer = nested.solve(problem)
    assert answer.gap == 0.0
    independent = ilp.solve(problem, incumbent=answer.solution)
    assert independent.bound_ns >= answer.solution.objective_ns * (1 - 1e-5)
    assert independent.solution.objective_ns == answer.solution.objective_ns


def test_96_layers_on_16_stages_are_proven_in_seconds():
    problem = load("chain_96x24_16")
    answer = nested.solve(problem)
    assert 12_878_679 <= answer.bound_ns == answer.solution.objective_ns <= 12_942_633


def test_five_seconds_are_enough_for_a_thousandth():
    answer = nested.solve(load("chain_96x24_16"), time_limit_s=5.0)
    assert answer.gap <= 0.001


def test_a_limit_of_no_time_still_gives_what_one_round_finds():
    problem = load("chain_96x24_16")
    answer = nested.solve(problem, time_limit_s=0.0)
    assert answer.solution is not None
    assert 0.0 < answer.gap < 0.05


def test_three_solvers_agree_on_8_of_the_layers():
    whole = load("chain_24x24_4")
    problem = replace(
        whole,
        chain=whole.chain[:8],
        num_stages=2,
        memory=whole.memory[:2],
        limit=(60_000, 50_000),
        stage_ns=(0, 0),
    )
    edges = tuple(Edge(i, i + 1, problem.reshard_ns) for i in range(7))
    answers = {
        nested.solve(problem).solution.objective_ns,
        dp.solve(problem).objective_ns,
        graph.solve(replace(problem, edges=edges)).objective_ns,
    }
    assert len(answers) == 1
