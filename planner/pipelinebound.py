"""The least time of a pipeline whatever the division of its work over the stages."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from costmodel.schedules import SCHEDULES

if TYPE_CHECKING:
    from collections.abc import Callable

    from costmodel.schedules import Schedule

__all__ = ["BlockTimes", "PipelineBound"]

ALL = 1 - 1e-9


@dataclass(frozen=True, slots=True)
class PipelineBound:
    """Least time of the passes of a pipeline with flush, from the time of one micro-batch on its
    stages: W over all of them, T on the busiest.

    The busiest stage works m times: m T. The pipeline also fills and drains: ``fill`` * W.

    For one chunk and m > p (or m = 1): stage k waits for the stages before it once, works m
    times, and waits at least S_k - w_k F_k and S_k - w_k B_k for the stages behind it, where S_k
    is their sum and w_k = p - 1 - k. The mean of these paths over k is (m + p - 1) W / p whatever
    the division of W, so the greatest is no less. For 1F1B with 1 < m <= p only "the stages
    before it once, then m times" is certain; its least value over all divisions is
    W / (1 - (1 - 1/m)^p). Where weight gradients are put off into the drain, only the forwards of
    the stages before it are certain, of which ``forward_part`` f of a stage's time are: then it
    is f W / (1 - (1 - f/m)^p). With several chunks only the mean stage's work, m W / p, is certain
    for any division: a light first chunk lets the next stage start early. The same holds where
    two directions share the devices, each of which then works for half of the micro-batches on
    its own stage and the opposite one.
    """

    schedule: str
    stages: int
    chunks: int
    microbatches: int
    forward_part: float = 0.0

    @property
    def _kind(self) -> Schedule:
        return SCHEDULES[self.schedule]

    @property
    def fill(self) -> float:
        """Factor of the sum of stage times."""
        p, m = self.stages, self.microbatches
        if self.chunks == 1 and self._kind.splits and self.forward_part:
            part = min(self.forward_part, ALL)
            return part / -math.expm1(p * math.log1p(-part / m))
        if self.chunks > 1 or not self._kind.returns_whole:
            return m / p
        if self.schedule == "1f1b" and 1 < m <= p:
            return 1 / (1 - (1 - 1 / m) ** p)
        return (m + p - 1) / p

    def least(self, sums: float, greatest: float) -> float:
        """Least time of all passes."""
        return max(self.fill * sums, self.microbatches / self._kind.copies * greatest)

    def whole_blocks(self, blocks: int, share: BlockTimes) -> float:
        """Least time when ``blocks`` blocks stay whole, in the time unit of ``share``.

        Say the fullest stage holds K blocks, and the stages lack D = p K - blocks of being equal.
        At most D stages stand behind the last full one, so at least blocks - K - D (K - 1) blocks
        stand before it: their forwards come before its first pass, their backwards (or its own
        work once a step) after its last one, unless weight gradients end its step. Of several
        chunks only the first is certain, which holds K / v blocks on each of the p - D - 1 other
        full stages, and none where the chunks fold. The last stage holds at least
        blocks - (p - 1) K, and the head. The bound is the least over all K.
        """
        p, m = self.stages, self.microbatches
        if self._kind.copies > 1:
            return m / 2 * (share.of(-(-2 * blocks // p)) + 2 * share.fixed)
        drains = 1.0 if self._kind.returns_whole else share.forward_part
        best, most = float("inf"), -(-blocks // p)
        while m * (share.of(most) + share.fixed) < best:
            lacking = p * most - blocks
            before = max(0, blocks - most - lacking * (most - 1))
            rest = max(0, blocks - (p - 1) * most)
            before_last = blocks - rest
            if self.chunks > 1:
                full = 0 if self._kind.folds else max(0, p - lacking - 1)
                before = before_last = full * (most // self.chunks)
            wait = share.of(before)
            waits = max(wait * drains, wait * share.forward_part + most * share.once)
            full_stage = m * (share.of(most) + share.fixed) + waits
            wait = share.of(before_last) * drains
            last_stage = m * (share.of(rest) + share.head + share.fixed) + wait
            best = min(best, max(full_stage, last_stage))
            most += 1
        return best


class BlockTimes(NamedTuple):
    """Least times of one micro-batch: a block's passes and the part of them that is forward, what
    a block adds once a step, the model's last layer, and a stage's own (host) time. ``run``: least
    time of so many blocks, where they are not equal.
    """

    block: float
    forward_part: float
    once: float = 0.0
    head: float = 0.0
    fixed: float = 0.0
    run: Callable[[int], float] | None = None

    def of(self, count: int) -> float:
        """Least time of ``count`` blocks."""
        return count * self.block if self.run is None else self.run(count)
