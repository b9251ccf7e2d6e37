"""All solvers on the published joint problems, and on many small ones against brute force.

    python -m benchmarks.solvers [--problems 1000] [--instances FOLDER]

The instances (24 and 96 unequal layers, 24 strategies; two MILP solvers found nothing for the
greater one in 71 and 124 s) lie beside the checkout; without them only the small problems run.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "planner")]

from jointcut import INSTANCES, joint_problem  # noqa: E402 - the problems of the tests
from test_solvers import KINDS, SOLVE  # noqa: E402 - as above

from planner import brute  # noqa: E402
from planner.problem import Bounded, SearchProblem  # noqa: E402
from planner.solvers import Solved, solve  # noqa: E402

LIMITS_S = (1.0, 5.0, None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--problems", type=int, default=1000)
    parser.add_argument("--instances", type=Path, default=INSTANCES)
    asked = parser.parse_args()
    print(f"{'problem':16} {'solver':8} {'limit':>6} {'CPU s':>7} {'objective':>12} {'gap':>9}")
    for path in sorted(asked.instances.glob("*.json")):
        _instance(path.stem, joint_problem(path))
    if not asked.instances.is_dir():
        print(f"no instances in {asked.instances}")
    _small(asked.problems)


def _instance(name: str, problem: SearchProblem) -> None:
    for limit_s in LIMITS_S:
        found = solve(problem, solver="nested", time_limit_s=limit_s)
        _row(name, found, limit_s)
    if len(problem.chain) * problem.num_stages <= 200:
        known = found.solution
        _row(name, solve(problem, solver="ilp", known=known), None)


def _row(name: str, found: Solved, limit_s: float | None) -> None:
    limit = "none" if limit_s is None else f"{limit_s:g} s"
    objective = "none" if found.solution is None else f"{found.solution.objective_ns:,}"
    print(
        f"{name:16} {found.solver:8} {limit:>6} {found.cpu_s:7.2f} {objective:>12} "
        f"{100 * found.gap:8.4f}%"
    )


def _small(count: int) -> None:
    rng = random.Random(20261130)  # noqa: S311 - problems, not secrets
    spent: dict[str, float] = {}
    differ = solvable = 0
    for number in range(count):
        kind = list(KINDS)[number % len(KINDS)]
        problem = KINDS[kind](rng)
        best = brute.solve(problem)
        solvable += best is not None
        for solver in SOLVE[kind]:
            started = time.process_time()
            answer = solver.solve(replace(problem))
            name = solver.__name__.removeprefix("planner.")
            spent[name] = spent.get(name, 0.0) + time.process_time() - started
            own = answer.solution if isinstance(answer, Bounded) else answer
            differ += (own and own.objective_ns) != (best and best.objective_ns)
    times = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in spent.items())
    print(f"{count:,} small problems ({solvable:,} solvable): {differ} differ from brute force")
    print(f"CPU: {times}")


if __name__ == "__main__":
    main()
