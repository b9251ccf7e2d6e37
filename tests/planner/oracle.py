"""Every layout of a small space through the full simulation: the oracle of the search.

Written apart from the solvers: it shares with them only the space (which candidates are legal),
the builder of layouts and the estimate.
"""

from __future__ import annotations

from itertools import combinations, combinations_with_replacement, product

from costmodel.estimate import estimate
from planner.build import CandidateProblem
from planner.layouts import build_layout
from planner.problem import Solution


def every_layout(context, space, min_fit):
    """Yield (candidate, layout) for every cut and every mix of recomputations."""
    for degrees in space.degrees():
        for candidate in space.candidates(degrees):
            problem = CandidateProblem(context=context, candidate=candidate, min_fit=min_fit)
            for solution in every_cut_and_mix(context, problem):
                yield candidate, build_layout(problem, solution, space.rules.mixing)


def every_cut_and_mix(context, problem):
    layers, stages = context.model.num_layers, problem.candidate.degrees.pp
    for inner in combinations(range(1, layers), stages - 1):
        starts = (0, *inner)
        parts = [range(a, b) for a, b in zip(starts, (*inner, layers), strict=True)]
        if any(len(part) < problem.problem.least_layers for part in parts):
            continue  # every chunk holds a layer, two directions hold even shares
        options = [
            [
                mix
                for mix in stage_mixes(problem, part)
                if problem.candidate.degrees.chunks == 1
                or problem.problem.stage_fits(stage, part.start, mix)
            ]
            for stage, part in enumerate(parts)
        ]
        for mixes in product(*options):
            yield Solution(
                starts=starts,
                strategies=tuple(j for mix in mixes for j in mix),
                stage_times_ns=(1,) * stages,
                objective_ns=0,
            )


def stage_mixes(problem, part):
    """Assignments of one stage, those that only permute equal layers once."""
    runs: list[tuple[int, int]] = []
    for i in part:
        c = problem.chain[i]
        if runs and runs[-1][0] == c:
            runs[-1] = (c, runs[-1][1] + 1)
        else:
            runs.append((c, 1))
    options = [list(combinations_with_replacement(problem.allowed(c), n)) for c, n in runs]
    for chosen in product(*options):
        yield tuple(j for part in chosen for j in part)


def fastest_of_all(context, space, min_fit):
    """(step time of the fastest layout that fits, how many layouts there were)."""
    best, count = None, 0
    for _, layout in every_layout(context, space, min_fit):
        count += 1
        own = estimate(context, layout, min_fit=min_fit)
        if own.fits and (best is None or own.step_s < best):
            best = own.step_s
    return best, count
