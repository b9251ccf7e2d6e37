"""Sharper bounds from the longest paths of a candidate's schedule.

Say n equal blocks stand on p stages, the fullest of which holds K = n / p, rounded up. Then the
stages lack D = p K - n blocks of being full, and the step takes at least

    min over where they lack  max over paths P  (length of P with full stages
                                                  - what P loses by each block that lacks)

for any set of paths. A path is the longest of one run of the schedule, with blocks lacking where
the paths before it lose most; it counts for all candidates with that schedule and shape. Up to two
blocks, all places where they may lack are tried. For more, the mean of all paths takes the place
of the greatest: it loses most where the blocks lack on the stages with the greatest mean loss.

Where two directions share the devices every stage holds an even share, and no block lacks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from costmodel.criticalpath import critical_path
from costmodel.schedules import BACKWARD, FORWARD, INPUT, WEIGHT, Shape
from costmodel.simulate import PassTimes, send_seconds
from profiles.layers import Block

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from costmodel.criticalpath import CriticalPath
    from planner.build import CandidateProblem

__all__ = ["PathBounds"]

NANO = 10**9
MOST_PATHS = 8
MOST_PASSES = 200_000  # of a run that is traced
WORTH = 1e-3  # part by which another path must raise the bound


class PathBounds:
    """Bounds of candidates; the paths of a shape are found once."""

    def __init__(self) -> None:
        """No path is known yet."""
        self._paths: dict[object, list[CriticalPath]] = {}

    def of(self, problem: CandidateProblem, enough_s: float) -> float:
        """Least step of a candidate's layouts whose fullest stage holds an even share, rounded up;
        no more paths are looked for once it is ``enough_s``.
        """
        stages = _Stages(problem)
        if stages.num_passes > MOST_PASSES:
            return 0.0
        paths = self._paths.setdefault((problem.schedule.name, stages.shape), [])
        found = stages.least_s(paths)
        while len(paths) < MOST_PATHS and found < enough_s:
            paths.append(stages.path(stages.worst(paths)))
            before, found = found, stages.least_s(paths)
            if len(paths) > stages.lacking + 1 and found < before * (1 + WORTH):
                break
        return found


class _Stages:
    """The stages of a candidate, all of them full, and what one block takes."""

    def __init__(self, problem: CandidateProblem) -> None:
        degrees = problem.candidate.degrees
        self.problem = problem
        self.shape = Shape(degrees.pp, degrees.chunks, problem.microbatches)
        blocks = sum(isinstance(problem.classes[c], Block) for c in problem.chain)
        if problem.schedule.copies > 1:
            self.held, self.lacking = problem.problem.least_layers, 0
        else:
            self.held = -(-blocks // degrees.pp)
            self.lacking = degrees.pp * self.held - blocks
        self.paths = problem.schedule.paths(self.shape)
        self.num_chunks = degrees.chunks * problem.schedule.copies
        self.block_s = self._block_s()
        self.once_s = self._once_s()
        self.fixed_s = self._fixed_s()
        self.delays_s = np.array(problem.link_s) * problem.context.own.p2p_overlap

    @property
    def num_passes(self) -> int:
        kinds = 3 if self.problem.schedule.splits else 2
        return kinds * self.shape.stages * self.shape.chunks * self.shape.microbatches

    def _block_s(self) -> NDArray[np.float64]:
        """Least seconds of a block's passes, by kind."""
        rows = [
            row
            for row, layer in zip(self.problem.steps, self.problem.classes, strict=True)
            if isinstance(layer, Block)
        ]
        steps = [step for row in rows for step in row]
        seconds = np.zeros(4)
        seconds[FORWARD] = min(step.forward.total_s for step in steps)
        seconds[BACKWARD] = min(step.backward.total_s for step in steps)
        seconds[INPUT] = min(step.backward.total_s - step.weight_s for step in steps)
        seconds[WEIGHT] = min(step.weight_s for step in steps)
        return seconds

    def _once_s(self) -> float:
        """Least seconds a step that a block adds to its stage."""
        if self.problem.schedule.copies > 1:
            return 0.0
        own = zip(self.problem.once_ns, self.problem.classes, strict=True)
        least = min(once for once, layer in own if isinstance(layer, Block))
        return least * self.shape.microbatches / NANO

    def _fixed_s(self) -> NDArray[np.float64]:
        """What the passes of each chunk take beside blocks: host time, hand-over, and the layers
        at the ends of the model. ``[kind, device, chunk]``.
        """
        problem, own = self.problem, self.problem.context.own
        found = np.zeros((4, self.shape.stages, self.num_chunks))
        blocked = [seconds * (1 - own.p2p_overlap) for seconds in problem.link_s]
        for place, sent in send_seconds(problem.schedule, self.shape, blocked).items():
            found[FORWARD : INPUT + 1, place[0], place[1]] = sent + own.micro_batch_s / 2
        chain = problem.context.chain
        for path in self.paths:
            for (device, chunk), c in ((path[0], chain[0]), (path[-1], chain[-1])):
                if not isinstance(problem.classes[c], Block):
                    step = problem.steps[c][0]
                    found[FORWARD, device, chunk] += step.forward.total_s
                    found[BACKWARD, device, chunk] += step.backward.total_s
                    found[INPUT, device, chunk] += step.backward.total_s - step.weight_s
                    found[WEIGHT, device, chunk] += step.weight_s
        return found

    def _blocks(self, lacking: NDArray[np.float64]) -> NDArray[np.float64]:
        """Blocks of each chunk, ``[device, chunk]``, where stages lack so many."""
        held = np.zeros((self.shape.stages, self.num_chunks))
        by_stage = self.held - lacking
        if self.problem.schedule.copies > 1:  # layers at the ends take the place of blocks
            by_stage = np.floor(self._even() / self.shape.chunks) * self.shape.chunks
        for path in self.paths:
            for device, chunk in path:
                stage = device if chunk < self.shape.chunks else self.shape.stages - 1 - device
                held[device, chunk] = by_stage[stage] / self.shape.chunks
        return held

    def _even(self) -> NDArray[np.float64]:
        """Blocks of each stage where all of them hold an even share of the layers."""
        blocks = np.full(self.shape.stages, float(self.held))
        ends = [c for c in self.problem.chain if not isinstance(self.problem.classes[c], Block)]
        blocks[[0, -1]] -= len(ends)
        return np.maximum(blocks, 0.0)

    def path(self, lacking: NDArray[np.float64]) -> CriticalPath:
        """The longest path where stages lack so many blocks."""
        times = self.block_s[:, None, None] * self._blocks(lacking) + self.fixed_s
        forward, _, inputs, weight = (table.tolist() for table in times)
        if not self.problem.schedule.splits:
            inputs, weight = times[BACKWARD].tolist(), (times[WEIGHT] * 0).tolist()
        return critical_path(
            self.problem.schedule,
            self.shape,
            PassTimes(forward_s=forward, input_s=inputs, weight_s=weight),
            self.delays_s.tolist(),
        )

    def _lengths(self, paths: list[CriticalPath]) -> NDArray[np.float64]:
        """Seconds of each path, all stages full."""
        full = self._blocks(np.zeros(self.shape.stages))
        times = self.block_s[:, None, None] * full + self.fixed_s
        own = self.held * self.once_s
        return np.array([path.seconds(times, self.delays_s) + own for path in paths])

    def _losses(self, paths: list[CriticalPath]) -> NDArray[np.float64]:
        """Seconds that each path loses by each block that a stage lacks, ``[path, stage]``."""
        found = []
        for path in paths:
            by_chunk = (self.block_s[:, None, None] * path.passes).sum(axis=0)
            lost = by_chunk.max(axis=1)
            lost[path.last] += self.once_s
            found.append(lost)
        return np.array(found)

    def least_s(self, paths: list[CriticalPath]) -> float:
        """The bound that these paths give."""
        if not paths:
            return 0.0
        lengths, losses = self._lengths(paths), self._losses(paths)
        match self.lacking:
            case 0:
                passes_s = lengths.max()
            case 1:
                passes_s = (lengths[:, None] - losses).max(axis=0).min()
            case 2:
                both = losses[:, :, None] + losses[:, None, :]
                passes_s = (lengths[:, None, None] - both).max(axis=0).min()
            case _:
                passes_s = lengths.mean() - self.lacking * losses.mean(axis=0).max()
        context = self.problem.context
        return context.whole_step_s(float(passes_s), self.problem.candidate.num_ranks)

    def worst(self, paths: list[CriticalPath]) -> NDArray[np.float64]:
        """Where blocks lack so that these paths lose most."""
        lacking = np.zeros(self.shape.stages)
        if not paths or not self.lacking:
            return lacking
        if len(paths) == 1:
            order = np.argsort(-self._losses(paths)[0], kind="stable")
        else:
            order = np.argsort(-self._losses(paths).mean(axis=0), kind="stable")
        for k in range(self.lacking):
            lacking[order[k % len(order)]] += 1
        return np.minimum(lacking, self.held)
