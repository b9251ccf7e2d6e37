"""What the published searches claim, on our solvers: UniAP (CVPR'25), OptCNN (ICML'18)."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from planner import brute, dp, graph, ilp, nested
from planner.problem import Edge, SearchProblem


def chain(rng: random.Random, *, layers=6, stages=2, strategies=3, roomy=False) -> SearchProblem:
    """Unequal layers with resharding and hand-overs, as UniAP states its problem."""
    faster_is_larger = [
        sorted(
            zip(
                sorted(rng.sample(range(10, 60), strategies)),
                sorted(rng.sample(range(5, 60), strategies), reverse=True),
                strict=True,
            )
        )
        for _ in range(layers)
    ]
    memory = tuple(tuple(m for _, m in row) for row in faster_is_larger)
    most = sum(max(row) for row in memory)
    return SearchProblem(
        chain=tuple(range(layers)),
        num_stages=stages,
        repeats=rng.randint(2, 12),
        time_ns=tuple(tuple(t for t, _ in row) for row in faster_is_larger),
        memory=(memory,) * stages,
        working=((0,) * strategies,) * layers,
        limit=(most if roomy else int(0.55 * most / stages),) * stages,
        allowed=(tuple(range(strategies)),) * layers,
        stage_ns=(0,) * stages,
        reshard_ns=tuple(
            tuple(0 if a == b else rng.randint(1, 9) for b in range(strategies))
            for a in range(strategies)
        ),
        handover_ns=tuple(rng.randint(1, 12) for _ in range(layers)),
    )


def two_steps(problem: SearchProblem):
    """First the cut that balances the fastest layers, then the strategies of each stage."""
    free = replace(problem, limit=(10**9,) * problem.num_stages)
    starts = dp.solve(free).starts
    stops = (*starts[1:], len(problem.chain))
    chosen: list[int] = []
    for stage, (first, stop) in enumerate(zip(starts, stops, strict=True)):
        alone = replace(
            problem,
            chain=problem.chain[first:stop],
            num_stages=1,
            memory=problem.memory[stage : stage + 1],
            limit=problem.limit[stage : stage + 1],
            stage_ns=(0,),
            handover_ns=(),
        )
        answer = dp.solve(alone)
        if answer is None:
            return None
        chosen += answer.strategies
    return problem.cost(starts, tuple(chosen))


def test_cut_and_strategies_together_are_never_worse_than_one_after_the_other():
    rng = random.Random(23)
    better = found = 0
    for _ in range(60):
        problem = chain(rng, layers=rng.randint(4, 6), stages=rng.randint(2, 3))
        joint, separate = dp.solve(problem), two_steps(problem)
        optimum = brute.solve(problem)
        assert (joint is None) == (optimum is None)
        if joint is None:
            assert separate is None
            continue
        assert joint.objective_ns == optimum.objective_ns
        if separate is None:
            better += 1  # one after the other finds no plan at all
            continue
        found += 1
        assert joint.objective_ns <= separate.objective_ns
        better += joint.objective_ns < separate.objective_ns
    assert found > 10
    assert better > 5


def test_on_one_stage_the_integer_programme_agrees_with_the_layer_programme():
    rng = random.Random(29)
    for _ in range(25):
        problem = chain(rng, stages=1)
        layerwise = dp.solve(problem)
        joint = ilp.solve(problem).solution
        assert (joint and joint.objective_ns) == (layerwise and layerwise.objective_ns)


@pytest.mark.parametrize(("layers", "strategies"), [(24, 4), (32, 6)])
def test_problems_on_which_the_naive_programme_takes_minutes_are_proven_in_seconds(
    layers, strategies
):
    """24 layers and 4 strategies take HiGHS 23 s, 32 and 6 take 111 s when written naively."""
    problem = chain(random.Random(31), layers=layers, strategies=strategies, stages=4)
    answer = nested.solve(problem, time_limit_s=5.0)
    assert answer.gap == 0.0


GRAPHS = {
    "chain": [(0, 1), (1, 2), (2, 3), (3, 4)],
    # one input, four branches of one to three layers, one concatenation
    "inception": [(0, 1), (0, 2), (2, 3), (0, 4), (4, 5), (0, 6), (1, 7), (3, 7), (5, 7), (6, 7)],
    "residual": [(0, 1), (1, 2), (0, 3), (2, 3), (3, 4), (4, 5), (3, 6), (5, 6)],
    # queries, keys and values of one input, which the sum behind the output needs as well
    "attention": [(0, 1), (0, 2), (0, 3), (1, 4), (2, 4), (3, 5), (4, 5), (5, 6), (0, 6), (3, 6)],
}


def of_graph(rng: random.Random, edges, *, strategies, limited) -> SearchProblem:
    layers = max(target for _, target in edges) + 1

    def table(most):
        return tuple(tuple(rng.randint(0, most) for _ in range(strategies)) for _ in range(layers))

    return SearchProblem(
        chain=tuple(range(layers)),
        num_stages=1,
        repeats=1,
        time_ns=table(50),
        memory=(table(20),),
        working=((0,) * strategies,) * layers,
        limit=(8 * layers if limited else 10**6,),
        allowed=(tuple(range(strategies)),) * layers,
        stage_ns=(0,),
        edges=tuple(
            Edge(
                *pair,
                tuple(
                    tuple(rng.randint(0, 30) for _ in range(strategies)) for _ in range(strategies)
                ),
            )
            for pair in edges
        ),
    )


@pytest.mark.parametrize("limited", [False, True], ids=["roomy", "limited"])
@pytest.mark.parametrize("name", GRAPHS)
def test_elimination_equals_brute_force_on_50_random_tables(name, limited):
    rng = random.Random(name)
    strategies = 3 if len(GRAPHS[name]) < 9 else 2
    for _ in range(50):
        problem = of_graph(rng, GRAPHS[name], strategies=strategies, limited=limited)
        optimum, answer = brute.solve(problem), graph.solve(problem)
        assert (answer and answer.objective_ns) == (optimum and optimum.objective_ns)


def test_elimination_of_a_long_residual_network_costs_no_more_than_its_length():
    rng = random.Random(41)
    edges = []
    for block in range(40):  # two layers beside each shortcut
        first = 3 * block
        edges += [(first, first + 1), (first + 1, first + 2), (first + 2, first + 3)]
        edges += [(first, first + 3)]
    problem = of_graph(rng, edges, strategies=4, limited=False)
    answer = graph.solve(problem)
    assert problem.cost(answer.starts, answer.strategies) == answer
    greedy = problem.cost((0,), tuple(row.index(min(row)) for row in problem.time_ns))
    assert answer.objective_ns < greedy.objective_ns
