"""The least time of a pipeline whatever the division of its work over the stages."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from costmodel.schedules import SCHEDULES, Shape

if TYPE_CHECKING:
    from collections.abc import Callable

    from costmodel.schedules import Schedule

__all__ = ["BlockTimes", "PipelineBound"]

ALL = 1 - 1e-9


@dataclass(frozen=True, slots=True)
class PipelineBound:
    """Least time of the passes of a pipeline with flush, from the time of one micro-batch on its
    stages: W over all of them, T on the busiest.

    The busiest stage works m times: m T. One micro-batch goes through all layers and back, only its
    weight gradients can wait: (1 - ``weight_part``) W. The pipeline also fills and drains: ``fill``
    * W.

    For one chunk and m > p (or m = 1): stage k waits for the stages before it once, works m
    times, and waits at least S_k - w_k F_k and S_k - w_k B_k for the stages behind it, where S_k
    is their sum and w_k = p - 1 - k. The greatest of these paths is at least (m + p - 1) W / p
    whatever the division of W. For 1F1B with 1 < m <= p only "the stages before it once, then m
    times" is certain; its least value over all divisions is W / (1 - (1 - 1/m)^p). Where weight
    gradients are put off into the drain, only the forwards of the stages before it are certain, of
    which ``forward_part`` f of a stage's time are: then it is f W / (1 - (1 - f/m)^p). With several
    chunks only the mean stage's work, m W / p, is certain for any division: a light first chunk
    lets the next stage start early. The same holds where two directions share the devices, each of
    which then works for half of the micro-batches on its own stage and the opposite one.
    """

    schedule: str
    stages: int
    chunks: int
    microbatches: int
    forward_part: float = 0.0
    weight_part: float = 1.0

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
        alone = self.microbatches / self._kind.copies * greatest
        through = 1 - self.weight_part if self._kind.splits else 1.0
        return max(self.fill * sums, alone, through * sums if self._kind.drains else 0.0)

    def whole_blocks(self, blocks: int, share: BlockTimes, *, uneven: int = 0) -> float:
        """Least time when ``blocks`` blocks stay whole, in the time unit of ``share``: the least
        over all K, the blocks of the fullest stage, from ``uneven`` more than an even share on.
        """
        if self._kind.copies > 1:
            return float("inf") if uneven else self._both_ways(blocks, share)
        best, most = float("inf"), -(-blocks // self.stages) + uneven
        while self.microbatches * (share.of_stage(most) + share.fixed) < best:
            best = min(best, self._fullest(blocks, most, share))
            most += 1
        return best

    def _fullest(self, blocks: int, most: int, share: BlockTimes) -> float:
        """Least time when the fullest stage holds ``most`` of the blocks.

        The stages lack D = p K - blocks of being equal, so at most D of them stand behind the last
        full one, and at least blocks - K - D (K - 1) blocks before it. Their forwards come before
        its first pass. Behind its last backward pass, or input gradient, come theirs (of the same
        micro-batch); only late weight gradients may be left on the full stage by then. Or it ends
        with its own work once a step. Of several chunks only the first is certain, which a full
        stage gives its even share; of chunks that fold the first stage's is not, since the model
        ends there. The last stage holds at least blocks - (p - 1) K, and the head.
        """
        p, m = self.stages, self.microbatches
        lacking = p * most - blocks
        rest = max(0, blocks - (p - 1) * most)
        if self.chunks == 1:
            before, before_last = max(0, blocks - most - lacking * (most - 1)), blocks - rest
            wait, wait_last = share.of(before), share.of(before_last)
        else:
            full = max(0, p - lacking - 1 - self._kind.folds)
            wait = full * share.in_chunk(most, self.chunks)
            wait_last = 0.0 if self._kind.folds else wait
        stage = max(0, p - 1 - lacking)
        hops = stage * share.hop
        if not self._kind.drains:
            wait = wait_last = hops = 0.0
        drains = share.forward_part if self._kind.splits else 1.0
        drained = wait if drains == 1 else wait * (1 - share.weight_part)
        late = self._late_weights_ns(stage, most, share)
        waits = hops + max(wait * share.forward_part + most * share.once, drained + hops - late)
        return max(
            m * (share.of_stage(most) + share.fixed) + waits,
            m * (share.of(rest) + share.head + share.fixed) + wait_last * drains,
        )

    def _late_weights_ns(self, stage: int, held: int, share: BlockTimes) -> float:
        """Greatest time of the weight gradients that a stage with ``held`` blocks may have left
        when its last input gradient is done.
        """
        kind, shape = self._kind, Shape(self.stages, self.chunks, self.microbatches)
        if not kind.splits:
            return 0.0
        if kind.late_weights is None:
            return math.inf
        even = kind.folds and share.run is None
        return (
            kind.late_weights(shape, stage)
            * share.weight
            * (-(-held // self.chunks) if even else held)
        )

    def _both_ways(self, blocks: int, share: BlockTimes) -> float:
        """Least time where devices s and p - 1 - s hold the same two stages, for half of the
        micro-batches each.

        Say the fullest pair holds K blocks. The pairs lack D = p/2 K - blocks of being equal, so
        the innermost full pair has at least p/2 - 1 - D others outside of it. Whichever direction
        its first pass belongs to, at least the stages of those come before it, and behind its
        last pass. Each of them holds ``least_of_stage`` blocks, its first chunk an even share;
        the outermost is left out, since the model's ends stand there.
        """
        pairs, m = self.stages // 2, self.microbatches
        held = self.least_of_stage(blocks)
        drains = share.forward_part if self._kind.splits else 1.0
        best, most = float("inf"), -(-blocks // pairs)
        while m / 2 * (share.of(most) + 2 * share.fixed) < best:
            outside = max(0, pairs - 1 - (pairs * most - blocks) - 1)
            wait = outside * share.in_chunk(held, self.chunks) * drains
            wait += 2 * outside * share.hop
            best = min(best, m / 2 * (share.of(most) + 2 * share.fixed) + wait)
            most += 1
        return best

    def least_of_stage(self, layers: int) -> int:
        """Layers that a stage holds at least: one for each chunk; where two directions share the
        devices, an even share, so that both take the same time.
        """
        even = layers // self.stages if self._kind.copies > 1 else 0
        return max(self.chunks, even)


class BlockTimes(NamedTuple):
    """Least times of one micro-batch: a block's passes and the part of them that is forward, what
    a block adds once a step, and the model's last layer. ``fixed``: what a stage takes beside its
    blocks, ``hop``: a hand-over and the host's part of a pass. ``run``: least time of so many
    blocks, where they are not equal; ``in_memory``: of so many on one stage, as its memory allows.
    ``weight_part`` and ``weight`` are the most that a block takes for
    weight gradients, of its own passes and as a time. ``alike``: the shortest block over the
    longest where all hold the same weights, else 0.
    """

    block: float
    forward_part: float
    weight_part: float = 1.0
    weight: float = 0.0
    once: float = 0.0
    head: float = 0.0
    alike: float = 1.0
    fixed: float = 0.0
    hop: float = 0.0
    run: Callable[[int], float] | None = None
    in_memory: Callable[[int], float] | None = None

    def of(self, count: int) -> float:
        """Least time of ``count`` blocks."""
        return count * self.block if self.run is None else self.run(count)

    def of_stage(self, count: int) -> float:
        """Least time of ``count`` blocks on one stage."""
        least = self.of(count)
        return least if self.in_memory is None else max(least, self.in_memory(count))

    def in_chunk(self, count: int, chunks: int) -> float:
        """Least time of a chunk, where ``count`` blocks are dealt out to ``chunks`` so that each
        goes to the one with least to do: their times differ by one block at most.
        """
        if self.run is None:
            return count // chunks * self.block
        least = math.ceil((count * self.alike - (chunks - 1)) / chunks)
        return max(1, least) * self.run(1) if count >= chunks else 0.0
