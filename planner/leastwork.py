"""What no layout of unequal blocks in several chunks can beat, over all cuts that keep the closed
form of memory.

Such blocks do not stay where the cut puts them: chunks take as many blocks as the cut's stages
hold, in the order of the model. What is certain of a stage: it holds as many blocks as the cut
gives it, those of each chunk neighbours in the model, with at least one layer in every chunk
before and behind; and recomputing adds what it adds to whichever block it adds least to, for as
many blocks as the cut's stage must recompute to fit. Of all stages together also the fastest passes
of every layer are certain.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from planner.closed_form import CountingStages
from planner.cuts import Stages
from profiles.layers import Block

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from planner.build import CandidateProblem

__all__ = ["LeastWork", "least_work"]

INFINITE = float("inf")
ROUNDING = 1  # nanosecond, of the difference of two whole numbers of them


class LeastWork(NamedTuple):
    """Least nanoseconds of one micro-batch on all stages together, and on the busiest one, work
    once a step included; infinite if no layout may take less than the wanted time.
    """

    sums: float
    greatest: float


def least_work(candidate: CandidateProblem, worth_s: float, holding: list[bool]) -> LeastWork:
    """That of all layouts that may take less than ``worth_s``. ``holding``: as
    ``planner.cuts.Stages`` has it.
    """
    repeats = candidate.microbatches / candidate.schedule.copies
    solver = _CertainStages(candidate, candidate.passes_ns(worth_s) / repeats)
    layers = len(solver.problem.chain)
    stages = Stages(solver.problem, solver, INFINITE, holding)
    states = {0: LeastWork(0.0, 0.0)}
    for stage in range(solver.problem.num_stages):
        reached: dict[int, LeastWork] = {}
        for first, stop, time in stages.of(stage, states):
            before, known = states[first], reached.get(stop, LeastWork(INFINITE, INFINITE))
            busiest = max(before.greatest, solver.certain_ns(stage, first, stop))
            reached[stop] = LeastWork(
                min(known.sums, before.sums + time), min(known.greatest, busiest)
            )
        states = reached
    return states.get(layers, LeastWork(INFINITE, INFINITE))


class _CertainStages(CountingStages):
    """Stages that may be part of a layout whose stages all take less than ``limit_ns``, where
    recomputing adds to every block what it adds to the one to which it adds least.
    """

    def __init__(self, candidate: CandidateProblem, limit_ns: float) -> None:
        problem = candidate.problem
        self.candidate, self.limit_ns = candidate, limit_ns
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
        super().__init__(replace(problem, time_ns=times))
        is_block = [c in blocks for c in problem.chain]
        self._blocks = [0, *accumulate(is_block)]
        self._plain = [0, *accumulate(plain[c] * (c in blocks) for c in problem.chain)]
        in_order = [plain[c] for c in candidate.context.chain if c in blocks]
        self._sums = np.array([0, *accumulate(in_order)], dtype=np.float64)
        self._most = int(min(len(in_order), limit_ns / max(1, min(in_order))))
        self._fastest: dict[int, NDArray[np.float64]] = {}

    def time_ns(self, stage: int, first: int, stop: int) -> int | None:
        """As the solver has it; None where the stage takes the limit."""
        if self._blocks_ns(stage, first, stop) >= self.limit_ns:
            return None
        time = super().time_ns(stage, first, stop)
        if time is None or self._certain(time, stage, first, stop) >= self.limit_ns:
            return None
        return time

    def least_ns(self, stage: int, first: int, stop: int) -> float:
        """As the solver has it; infinite where the stage takes the limit."""
        if self._blocks_ns(stage, first, stop) >= self.limit_ns:
            return INFINITE
        return super().least_ns(stage, first, stop)

    def certain_ns(self, stage: int, first: int, stop: int) -> float:
        """What the stage takes at least, whichever blocks it gets for those of the cut."""
        time = self.time_ns(stage, first, stop)
        return INFINITE if time is None else self._certain(time, stage, first, stop)

    def _certain(self, time: int, stage: int, first: int, stop: int) -> float:
        own = self._plain[stop] - self._plain[first]
        return time - own + self._blocks_ns(stage, first, stop)

    def _blocks_ns(self, stage: int, first: int, stop: int) -> float:
        """Least time of as many blocks on a stage."""
        count = self._blocks[stop] - self._blocks[first]
        if stage not in self._fastest:
            self._fastest[stage] = self._of_chunks(stage)
        return INFINITE if count > self._most else float(self._fastest[stage][count])

    def _of_chunks(self, stage: int) -> NDArray[np.float64]:
        """Least time of 0, 1, ... blocks in the chunks of a stage."""
        places = self.candidate.places
        beside = len(self.problem.chain) - self._blocks[-1]  # a chunk may hold one of these alone
        found = np.full(self._most + 1, INFINITE)
        found[0] = 0.0
        for chunk, place in enumerate(places):
            if place[0] == stage:
                ahead, behind = chunk - beside, len(places) - 1 - chunk - beside
                run = self._runs(max(0, ahead), max(0, behind))
                counts = range(len(found))
                found = np.array([(found[: n + 1] + run[n::-1]).min() for n in counts])
        return found

    def _runs(self, ahead: int, behind: int) -> NDArray[np.float64]:
        """Least time of 0, 1, ... neighbours with so many blocks ahead of them and behind."""
        found = np.full(self._most + 1, INFINITE)
        found[0] = 0.0
        last = len(self._sums) - 1 - behind
        for count in range(1, self._most + 1):
            if ahead + count <= last:
                own = self._sums[ahead + count : last + 1] - self._sums[ahead : last + 1 - count]
                found[count] = own.min()
        return found
