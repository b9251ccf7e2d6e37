"""The least work of a candidate's devices together, over all cuts that keep the closed form of memory.

Unequal blocks in several chunks do not stay where the cut puts them: chunks take as many blocks as
the cut's stages hold, in the order of the model. So a stage's time is not that of its cut. What is
certain is the work of all stages together: the fastest passes of every layer, and what recomputing
adds to whichever block it adds least to, for as many blocks as the cut's stages must recompute to
fit. A stage with so many blocks takes at least that many of the fastest ones, which limits how many
it may hold.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from planner.closed_form import CountingStages
from planner.cuts import Stages
from profiles.layers import Block

if TYPE_CHECKING:
    from planner.build import CandidateProblem
    from planner.problem import SearchProblem

__all__ = ["least_sum_ns"]

INFINITE = float("inf")
ROUNDING = 1  # nanosecond, of the difference of two whole numbers of them


class _Few(CountingStages):
    """Stages of at most ``most`` blocks."""

    def __init__(self, problem: SearchProblem, is_block: list[bool], most: int) -> None:
        super().__init__(problem)
        self.most = most
        self._before = [0]
        for block in is_block:
            self._before.append(self._before[-1] + block)

    def time_ns(self, stage: int, first: int, stop: int) -> int | None:
        full = self._before[stop] - self._before[first] > self.most
        return None if full else super().time_ns(stage, first, stop)

    def least_ns(self, stage: int, first: int, stop: int) -> float:
        full = self._before[stop] - self._before[first] > self.most
        return INFINITE if full else super().least_ns(stage, first, stop)


def least_sum_ns(candidate: CandidateProblem, worth_s: float, holding: list[bool]) -> float:
    """Least nanoseconds of one micro-batch on all stages together, in layouts that may take less
    than ``worth_s``; infinite if there are none. ``holding``: as ``planner.cuts.Stages`` has it.
    """
    problem, fastest = _least_added(candidate)
    share = candidate.passes_ns(worth_s) * candidate.schedule.copies / candidate.microbatches
    solver = _Few(problem, _is_block(candidate), int(share / fastest))
    stages = Stages(problem, solver, INFINITE, holding)
    states = {0: 0}
    for stage in range(problem.num_stages):
        reached: dict[int, int] = {}
        for first, stop, time in stages.of(stage, states):
            total = states[first] + time
            reached[stop] = min(total, reached.get(stop, total))
        states = reached
    return states.get(len(problem.chain), INFINITE)


def _least_added(candidate: CandidateProblem) -> tuple[SearchProblem, float]:
    """The solver's problem in which recomputing adds to every block what it adds to the one to
    which it adds least, and the passes of the fastest block.
    """
    problem = candidate.problem
    blocks = [c for c, layer in enumerate(candidate.classes) if isinstance(layer, Block)]
    plain = [min(own) for own in problem.time_ns]
    added = [
        max(0, min(problem.time_ns[c][j] - plain[c] for c in blocks) - ROUNDING)
        for j in range(len(candidate.candidate.recomputes))
    ]
    times = tuple(
        tuple(plain[c] + more for more in added) if c in blocks else own
        for c, own in enumerate(problem.time_ns)
    )
    fastest = min(plain[c] - candidate.once_ns[c] for c in blocks)
    return replace(problem, time_ns=times), fastest


def _is_block(candidate: CandidateProblem) -> list[bool]:
    return [isinstance(candidate.classes[c], Block) for c in candidate.problem.chain]
