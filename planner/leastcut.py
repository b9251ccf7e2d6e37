"""The least bound of any cut of a candidate.

Every stage k bounds the step by the way through it (``CandidateProblem.way_ns``): what the stages
before it do first and last, and its own passes in between. The way depends on where the stage
stands, so the cuts that the solvers keep by (sum, greatest stage time) need not hold the one whose
bound is least: a cut with a greater sum and a busier stage has a lower bound if that stage stands
further ahead. Here (time of the stages before, longest way so far) is kept instead. Both only grow
from stage to stage, and what the next stage makes of them grows with both; so where one cut of the
layers up to a position has no more of either than another, so it has after any stages behind it,
and the undominated pairs hold the least bound. So do each stage's fastest strategies, since a way
grows with the time of its stage.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from planner.cuts import undominated_pairs

if TYPE_CHECKING:
    from planner.build import CandidateProblem
    from planner.cuts import Stages

__all__ = ["least_cut_ns"]

INFINITE = float("inf")


def least_cut_ns(candidate: CandidateProblem, stages: Stages, limit_ns: float) -> float:
    """Least time of the passes of any cut into ``stages``, as the longest way through a stage has
    it; infinite if no cut has one below ``limit_ns``. For candidates of one direction whose stages
    hold what the cut gives them.
    """
    once, least = candidate.once_before_ns, candidate.problem.least_time_ns
    # Of several chunks only the first ones are summed: then the sum of all does not count.
    fill = candidate.pipeline.fill if candidate.candidate.degrees.chunks == 1 else 0.0
    states: dict[int, list[tuple[float, float]]] = {0: [(0.0, 0.0)]}
    for stage in range(candidate.problem.num_stages):
        reached: dict[int, list[tuple[float, float]]] = {}
        for first, stop, time in stages.of(stage, states):
            passes = time - once[stop] + once[first]
            rest = least[-1] - least[stop] - once[-1] + once[stop]
            lead = candidate.lead_ns(passes, first, stop)
            for before, longest in states[first]:
                way = candidate.way_ns(before, passes, first, stop)
                longer = max(longest, way, fill * (before + passes + rest))
                if longer < limit_ns:
                    reached.setdefault(stop, []).append((before + lead, longer))
        states = {stop: undominated_pairs(found) for stop, found in reached.items()}
    return min((longest for _, longest in states.get(len(once) - 1, ())), default=INFINITE)
