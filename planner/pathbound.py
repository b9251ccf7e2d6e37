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

from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from costmodel.criticalpath import critical_path
from costmodel.schedules import BACKWARD, FORWARD, INPUT, WEIGHT, Shape
from costmodel.simulate import PassTimes, send_seconds
from planner.layouts import chunk_sizes
from profiles.layers import Block

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from costmodel.criticalpath import CriticalPath
    from planner.bounds import CandidateBounds
    from planner.build import CandidateProblem

__all__ = ["PathBounds"]

NANO = 10**9
MOST_PATHS = 8
MOST_PASSES = 200_000  # of a run that is traced
MOST_LACKING = 3  # whose recomputation is told apart
PAIR = 2
WORTH = 1e-3  # part by which another path must raise the bound


class PathBounds:
    """Bounds of candidates; the paths of a shape are found once."""

    def __init__(self) -> None:
        """No path is known yet."""
        self._paths: dict[object, list[CriticalPath]] = {}

    def of(self, problem: CandidateProblem, bounds: CandidateBounds, enough_s: float) -> float:
        """Least step of a candidate's layouts whose fullest stage holds an even share, rounded up;
        no more paths are looked for once it is ``enough_s``.
        """
        if problem.moves_blocks or bounds.times.main is None:
            return 0.0
        stages = _Stages(problem, bounds)
        if stages.num_passes > MOST_PASSES:
            return 0.0
        paths = self._paths.setdefault((problem.schedule.name, stages.shape), [])
        found = stages.least_s(paths)
        while len(paths) < MOST_PATHS and found < enough_s:
            paths.append(stages.path(stages.worst(paths)))
            before, found = found, stages.least_s(paths)
            if len(paths) > stages.lacking and found < before * (1 + WORTH):
                break
        return found


class _Stages:
    """The stages of a candidate, all of them full, and what one block takes."""

    def __init__(self, problem: CandidateProblem, bounds: CandidateBounds) -> None:
        degrees = problem.candidate.degrees
        self.problem = problem
        self.shape = Shape(degrees.pp, degrees.chunks, problem.microbatches)
        blocks = [c for c in problem.chain if isinstance(problem.classes[c], Block)]
        self.block = blocks[0]
        self.most = -(-len(blocks) // degrees.pp)
        self.held = np.full(degrees.pp, self.most)
        self.lacking = degrees.pp * self.most - len(blocks)
        if problem.schedule.copies > 1:  # an even share of all layers, those at the ends included
            self.held[:], self.lacking = problem.problem.least_layers, 0
            self.held[[0, -1]] -= min(self.held[0], len(problem.chain) - len(blocks))
        self._known_sizes: dict[object, list[int]] = {}
        self.paths = problem.schedule.paths(self.shape)
        self.num_chunks = degrees.chunks * problem.schedule.copies
        self.block_s = self._block_s()
        self.once_s = self._once_s()
        self.ends_once_s = self._ends_once_s()
        self.fixed_s = self._fixed_s()
        self.again_s = self._again_s(bounds)
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

    def _ends_once_s(self) -> NDArray[np.float64]:
        """Least seconds a step that layers beside the blocks add, or hide of the blocks' traffic,
        ``[device]``: at the ends of the model, or anywhere.
        """
        problem, found = self.problem, np.zeros(self.shape.stages)
        if problem.schedule.copies > 1:
            return found
        chain, scale = problem.context.chain, self.shape.microbatches / NANO
        path, last = self.paths[0], len(chain) - 1
        for i, c in enumerate(chain):
            if not isinstance(problem.classes[c], Block):
                if i in (0, last):
                    found[path[0 if i == 0 else -1][0]] += problem.once_ns[c] * scale
                else:
                    found += min(0, problem.once_ns[c]) * scale
        return found

    def _again_s(self, bounds: CandidateBounds) -> NDArray[np.float64]:
        """Least seconds of recomputation for one micro-batch, ``[blocks that lack, stage]``."""
        if self.problem.schedule.copies > 1:
            return np.zeros((1, self.shape.stages))
        most = min(self.lacking, MOST_LACKING, self.most)
        candidate = self.problem.candidate
        counts = range(self.most, self.most - most - 1, -1)
        return np.array([bounds.recomputing_s(candidate, count) for count in counts])

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

    def _sizes(self, stage: int, count: int) -> list[int]:
        """Blocks of each chunk of a stage that holds ``count``."""
        if self.shape.chunks == 1:
            return [count]
        key = (stage in (0, self.shape.stages - 1) and stage, count)
        if key not in self._known_sizes:
            self._known_sizes[key] = chunk_sizes(self.problem, stage, [self.block] * count)
        return self._known_sizes[key]

    def _blocks(self, lacking: NDArray[np.float64]) -> NDArray[np.float64]:
        """Blocks of each chunk, ``[device, chunk]``, where stages lack so many."""
        held = np.zeros((self.shape.stages, self.num_chunks))
        for stage, less in enumerate(lacking):
            own = self._sizes(stage, int(self.held[stage] - less))
            held[stage, : len(own)] = own
            if self.num_chunks > len(own):  # the other direction's copy
                held[self.shape.stages - 1 - stage, len(own) :] = own
        return held

    def path(self, lacking: NDArray[np.float64]) -> CriticalPath:
        """The longest path where stages lack so many blocks."""
        times = self.block_s[:, None, None] * self._blocks(lacking) + self.fixed_s
        less = np.minimum(lacking, len(self.again_s) - 1).astype(int)
        again = self.again_s[less, np.arange(self.shape.stages)] / self.num_chunks
        times[BACKWARD : INPUT + 1] += again[:, None]
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
        own = self.most * self.once_s + self.ends_once_s
        again = self.again_s[0]
        return np.array(
            [
                path.seconds(times, self.delays_s) + own[path.last] + _backwards(path) @ again
                for path in paths
            ]
        )

    def _losses(self, paths: list[CriticalPath]) -> NDArray[np.float64]:
        """Seconds that each path loses at most by the next block that a stage lacks, ``[path,
        blocks that lack before, stage]``.
        """
        num_less = len(self.again_s) - 1
        less = [self._blocks(np.full(self.shape.stages, k)) for k in range(num_less + 1)]
        found = []
        for path in paths:
            by_chunk = (self.block_s[:, None, None] * path.passes).sum(axis=0)
            lost = np.array([(by_chunk * (a - b)).sum(axis=1) for a, b in pairwise(less)])
            if self.lacking > num_less:
                lost[-1] = np.maximum(lost[-1], by_chunk.max(axis=1))
            lost[:, path.last] += self.once_s
            found.append(lost - _backwards(path) * np.diff(self.again_s, axis=0))
        return np.array(found)

    def least_s(self, paths: list[CriticalPath]) -> float:
        """The bound that these paths give."""
        if not paths:
            return 0.0
        passes_s, _ = self._least(paths)
        return self.problem.context.whole_step_s(passes_s, self.problem.candidate.num_ranks)

    def worst(self, paths: list[CriticalPath]) -> NDArray[np.float64]:
        """Where blocks lack so that these paths lose most, ``[stage]``."""
        if not paths or not self.lacking:
            return np.zeros(self.shape.stages)
        return np.minimum(self._least(paths)[1], self.most)

    def _least(self, paths: list[CriticalPath]) -> tuple[float, NDArray[np.float64]]:
        """Least seconds of the passes, and how many blocks the stages lack then."""
        lengths = self._lengths(paths)
        lacking = np.zeros(self.shape.stages)
        if not self.lacking:
            return float(lengths.max()), lacking
        losses = self._losses(paths)
        if self.lacking == 1:
            longest = (lengths[:, None] - losses[:, 0]).max(axis=0)
            lacking[longest.argmin()] = 1
            return float(longest.min()), lacking
        if self.lacking == PAIR:
            lost = losses[:, 0, :, None] + losses[:, 0, None, :]
            stages = np.arange(self.shape.stages)
            lost[:, stages, stages] = losses.sum(axis=1)
            longest = (lengths[:, None, None] - lost).max(axis=0)
            for stage in np.unravel_index(longest.argmin(), longest.shape):
                lacking[stage] += 1
            return float(longest.min()), lacking
        return self._mean_least(float(lengths.mean()), losses.mean(axis=0))

    def _mean_least(
        self, length: float, losses: NDArray[np.float64]
    ) -> tuple[float, NDArray[np.float64]]:
        """As ``_least``, of the mean path: the blocks lack where it loses most by each."""
        more = self.lacking - len(losses)
        each = np.concatenate([losses, np.repeat(losses[-1:], max(0, more), axis=0)])
        each = np.maximum.accumulate(each[::-1])[::-1]  # the sum of the greatest is no less
        worst = np.argsort(-each, axis=None, kind="stable")[: self.lacking]
        lacking = np.bincount(worst % self.shape.stages, minlength=self.shape.stages)
        return length - float(each.ravel()[worst].sum()), lacking.astype(np.float64)


def _backwards(path: CriticalPath) -> NDArray[np.int64]:
    """Backward passes that a path takes of whichever chunk of each stage."""
    least: NDArray[np.int64] = (path.passes[BACKWARD] + path.passes[INPUT]).min(axis=1)
    return least
