"""What the stages of a candidate add to a path through its schedule, by the blocks they hold."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from costmodel.criticalpath import critical_path
from costmodel.schedules import BACKWARD, FORWARD, INPUT, WEIGHT
from costmodel.simulate import PassTimes, send_seconds
from planner.bounds import NEVER_S
from planner.closed_form import CountingStages
from planner.layouts import growing_chunks
from profiles.layers import Block

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from costmodel.criticalpath import CriticalPath
    from planner.bounds import CandidateBounds
    from planner.build import CandidateProblem

__all__ = ["PathStages", "least_cut"]

NANO = 10**9
INFINITE = float("inf")
PREFERRED = 1.25  # of the longest stage's time


class PathStages:
    """The stages of a candidate whose blocks are alike: what one block takes, and what a stage
    takes beside its blocks. Stages whose own work takes a step of ``worth_s`` are left out.
    """

    def __init__(
        self, problem: CandidateProblem, bounds: CandidateBounds, worth_s: float = INFINITE
    ) -> None:
        """Bind a candidate."""
        self.problem, self.bounds = problem, bounds
        self.limit_s = problem.context.passes_s(worth_s, problem.candidate.num_ranks)
        self.shape = problem.shape
        blocks = [c for c in problem.chain if isinstance(problem.classes[c], Block)]
        self.block, self.num_blocks = blocks[0], len(blocks)
        self.ends = len(problem.chain) - len(blocks)
        self.even = -(-len(blocks) // self.shape.stages)
        self._known_held: dict[int, tuple[NDArray[Any], ...]] = {}
        self._known_again: dict[int, NDArray[np.float64]] = {}
        self._known_works: dict[int, NDArray[np.float64]] = {}
        self.num_kinds = len(set(blocks))
        self._solver = CountingStages(problem.problem)
        self.paths = problem.schedule.paths(self.shape)
        self.num_chunks = self.shape.chunks * problem.schedule.copies
        self.block_s = self._block_s()
        self.fixed_s = self._fixed_s()
        self.delays_s = np.array(problem.link_s) * problem.context.own.p2p_overlap

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

    @cached_property
    def once_s(self) -> float:
        """Least seconds a step that a block adds to its stage."""
        if self.problem.schedule.copies > 1:
            return 0.0
        own = zip(self.problem.once_ns, self.problem.classes, strict=True)
        least = min(once for once, layer in own if isinstance(layer, Block))
        return least * self.shape.microbatches / NANO

    @cached_property
    def ends_once_s(self) -> NDArray[np.float64]:
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

    def again_s(self, count: int) -> NDArray[np.float64]:
        """Least seconds of recomputation for one micro-batch of ``count`` blocks, ``[stage]``;
        ``NEVER_S`` where so many cannot be there.
        """
        if count not in self._known_again:
            candidate, stages = self.problem.candidate, range(self.shape.stages)
            if self.problem.schedule.copies > 1:
                found = [0.0] * self.shape.stages
            elif self.num_kinds > 1:
                found = self.bounds.recomputing_s(candidate, count)
            else:
                above = self._known_again.get(count + 1, np.ones(self.shape.stages))
                found = [above[s] and self._again_of_s(s, count) for s in stages]
            self._known_again[count] = np.minimum(found, NEVER_S)
        return self._known_again[count]

    def _again_of_s(self, stage: int, count: int) -> float:
        """The same of one stage, as the solvers' closed form of memory has it."""
        array, last = self.problem.problem, self.shape.stages - 1
        ahead, behind = self.beside
        first = len(array.chain) - behind - count if stage == last else ahead if stage else 0
        stop = len(array.chain) if stage == last else ahead + count
        if first >= stop:
            return 0.0
        time = self._solver.time_ns(stage, first, stop)
        if time is None:
            return NEVER_S
        return (time - array.least_stage_ns(stage, first, stop)) / NANO

    @cached_property
    def beside(self) -> tuple[int, int]:
        """Layers of the chain ahead of the first block, and behind the last one."""
        blocks = [isinstance(self.problem.classes[c], Block) for c in self.problem.chain]
        return blocks.index(True), blocks[::-1].index(True)

    @cached_property
    def fewest(self) -> NDArray[np.int64]:
        """Blocks that each stage holds at least: every chunk holds a layer. Of two directions
        nothing is said here.
        """
        if self.problem.schedule.copies > 1:
            return np.zeros(self.shape.stages, dtype=np.int64)
        ahead, behind = self.beside
        least = np.full(self.shape.stages, self.shape.chunks)
        if max(ahead, behind) > least[0] or ahead + behind < self.ends:
            least -= self.ends  # they may stand on any stage
        else:
            least[0] -= ahead
            least[-1] -= behind
        return least.clip(0)

    def _sizes(self, most: int) -> NDArray[np.int64]:
        """Blocks of each chunk of a stage by how many it holds, ``[stage, blocks, chunk]``."""
        if self.shape.chunks == 1:
            return np.broadcast_to(np.arange(most + 1)[:, None], (self.shape.stages, most + 1, 1))
        times = [self.problem.time_ns[self.block][0]] * most
        ends = {0, 1, self.shape.stages - 1}  # all that are not at an end are alike
        known = {
            stage: np.array(list(growing_chunks(self.problem.ends_ns(stage), times)))
            for stage in ends
        }
        return np.array([known.get(stage, known[1]) for stage in range(self.shape.stages)])

    def _held(self, counts: NDArray[np.int64]) -> NDArray[np.int64]:
        """Blocks of each chunk, ``[device, chunk]``, where stages hold ``counts``."""
        own = self._sizes(int(counts.max()))[np.arange(self.shape.stages), counts]
        # the other direction's copy is that of the opposite stage
        return (
            own if self.problem.schedule.copies == 1 else np.concatenate([own, own[::-1]], axis=1)
        )

    def path(self, counts: NDArray[np.int64], through: int | None = None) -> CriticalPath:
        """The longest path where stages hold ``counts`` blocks; with passes of stage ``through``
        longer than they are, it prefers that one.
        """
        times = self.block_s[:, None, None] * self._held(counts) + self.fixed_s
        again = [self.again_s(int(count))[stage] for stage, count in enumerate(counts)]
        times[BACKWARD : INPUT + 1] += np.array(again)[:, None] / self.num_chunks
        if through is not None:
            own = times[FORWARD : BACKWARD + 1].sum(axis=(0, 2))
            times[:, through] *= PREFERRED * own.max() / own[through]
        forward, _, inputs, weight = (table.tolist() for table in times)
        if not self.problem.schedule.splits:
            inputs, weight = times[BACKWARD].tolist(), (times[WEIGHT] * 0).tolist()
        return critical_path(
            self.problem.schedule,
            self.shape,
            PassTimes(forward_s=forward, input_s=inputs, weight_s=weight),
            self.delays_s.tolist(),
        )

    def spread(self, fullest: int, most: int) -> NDArray[np.int64]:
        """Blocks of each stage where ``fullest`` holds ``most`` and the others share the rest."""
        others = self.shape.stages - 1
        share, rest = divmod(self.num_blocks - most, others)
        counts = np.full(self.shape.stages, share)
        counts[[stage for stage in range(others + 1) if stage != fullest][:rest]] += 1
        counts[fullest] = most
        return counts

    def works_s(self, count: int) -> NDArray[np.float64]:
        """Least seconds of all passes of each stage that holds ``count`` blocks, and of its work
        once a step; infinite where so many cannot be there. ``[stage]``.
        """
        if count not in self._known_works:
            kinds = (
                [FORWARD, INPUT, WEIGHT] if self.problem.schedule.splits else [FORWARD, BACKWARD]
            )
            copies, again = self.problem.schedule.copies, self.again_s(count)
            passes = self.fixed_s[kinds].sum(axis=(0, 2)) / copies + again
            passes += count * self.block_s[kinds].sum()
            found = self.shape.microbatches / copies * passes
            found += count * self.once_s + self.ends_once_s
            found[again >= NEVER_S] = INFINITE
            self._known_works[count] = found
        return self._known_works[count]

    def fixed_of(self, path: CriticalPath) -> float:
        """Seconds of a path that no blocks change."""
        fixed = (path.passes * self.fixed_s).sum() + (path.hops * self.delays_s).sum()
        return float(fixed + self.ends_once_s[path.last])

    def table(self, path: CriticalPath, most: int) -> NDArray[np.float64]:
        """Seconds that the blocks of each stage add to a path, ``[stage, blocks]`` up to ``most``:
        their passes, what its memory asks them to recompute, and their work once a step where the
        path ends; ``NEVER_S`` for what a stage cannot hold in the wanted time.
        """
        by_chunk = (self.block_s[:, None, None] * path.passes).sum(axis=0)
        own = self.shape.chunks
        if self.num_chunks > own:  # a stage's chunks of the other direction
            by_chunk = by_chunk[:, :own] + by_chunk[::-1, own:]
        backwards = (path.passes[BACKWARD] + path.passes[INPUT]).min(axis=1)
        if most not in self._known_held:
            self._known_held[most] = self._sizes(most), self._again(most), self._never(most)
        sizes, again, never = self._known_held[most]
        found: NDArray[np.float64] = np.einsum("sc,skc->sk", by_chunk, sizes)
        found += backwards[:, None] * again
        found[path.last] += self.once_s * np.arange(most + 1)
        found[never] = NEVER_S
        return found

    def _again(self, most: int) -> NDArray[np.float64]:
        """Seconds of recomputation up to ``most`` blocks, ``[stage, blocks]``."""
        counts = range(most, -1, -1)  # where many recompute nothing, fewer do not
        found = np.array([self.again_s(count) for count in counts])
        return found[::-1].T

    def _never(self, most: int) -> NDArray[np.bool_]:
        """Where a stage cannot hold so many blocks in the wanted time, ``[stage, blocks]``."""
        works = np.array([self.works_s(count) for count in range(most, -1, -1)])[::-1].T
        return (works >= self.limit_s) | (np.arange(most + 1) < self.fewest[:, None])


def least_cut(table: NDArray[np.float64], blocks: int) -> tuple[float, NDArray[np.int64]]:
    """Least sum over stages of ``table[stage, blocks held]`` where they hold ``blocks`` together,
    and what each of them holds then: a dynamic programme over the stages.
    """
    stages, most = table.shape[0], table.shape[1] - 1
    sums, chosen = np.full(blocks + 1, NEVER_S), []
    sums[0] = 0.0
    for own in table:
        padded = np.concatenate([np.full(most, NEVER_S), sums])
        before = np.lib.stride_tricks.sliding_window_view(padded, most + 1)[:, ::-1]
        ways = before + own
        best = ways.argmin(axis=1)
        sums = ways[np.arange(blocks + 1), best]
        chosen.append(best)
    counts, left = np.zeros(stages, dtype=np.int64), blocks
    for stage in reversed(range(stages)):
        counts[stage] = chosen[stage][left]
        left -= counts[stage]
    return float(sums[blocks]), counts
