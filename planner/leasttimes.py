"""The least times of a model's layers on one rank, by how they are split: what the bounds are made
of. They are remembered by shard shape, which many candidates share.
"""

from __future__ import annotations

from functools import cache
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

from costmodel.layout import NO_RECOMPUTE, Mesh, Recompute, Strategy
from costmodel.schedules import SCHEDULES
from planner.choices import ORDER_BY_STAGE
from planner.pipelinebound import BlockTimes
from profiles.layers import Block, ExpertFeedForward

if TYPE_CHECKING:
    from collections.abc import Callable

    from costmodel.context import CostContext
    from costmodel.layers import LayerCost
    from planner.choices import Degrees, Grid

__all__ = ["Compute", "LeastTimes", "Option"]

NANO = 10**9
INFINITE = float("inf")


class Option(NamedTuple):
    """Blocks that are alike under one recomputation, as none of them can beat: time of both passes
    and of the forward, bytes held, bytes while one runs, and the longest passes, which traffic can
    hide behind.
    """

    time_ns: float
    forward_ns: float
    saved_bytes: int
    transient_bytes: int
    longest_forward_ns: float
    longest_backward_ns: float


class Compute(NamedTuple):
    """Nanoseconds of all layers and of the longest one for one micro-batch, the least part of a
    layer that is forward, and the greatest that makes weight gradients.
    """

    sums: float
    greatest: float
    forward_part: float
    weight_part: float


class LeastTimes:
    """Least times of layers under one context."""

    def __init__(self, context: CostContext) -> None:
        """Sort the layers: which are blocks, and which of them hold the same weights."""
        self.context = context
        chain = context.chain
        self.counts = [chain.count(c) for c in range(len(context.classes))]
        blocks = {c: block for c, block in enumerate(context.classes) if isinstance(block, Block)}
        self.main = max(blocks, key=lambda c: self.counts[c], default=None)
        # Blocks that hold the same weights, as those with and without a window.
        self.alike = [
            c
            for c, block in blocks.items()
            if self.main is not None and block.parameters() == blocks[self.main].parameters()
        ]
        self.num_alike = sum(self.counts[c] for c in self.alike)
        self.block_chain = [c for c in chain if c in blocks]
        self.block_classes = list(blocks)
        self._experts = [
            isinstance(layer, Block) and isinstance(layer.feed_forward, ExpertFeedForward)
            for layer in context.classes
        ]
        self._costs: dict[object, LayerCost] = {}
        self._computed: dict[object, Compute] = {}
        self._options: dict[object, list[Option]] = {}
        self._least_options: dict[object, Option] = {}
        self._blocks: dict[object, BlockTimes] = {}

    def shape(self, degrees: Degrees | Grid) -> tuple[object, ...]:
        """What decides the compute of one layer on one rank."""
        key = (*degrees[:4], degrees.micro_batch, *degrees[-2:])
        if self.context.cluster.is_uniform:
            return key
        return (*key, degrees.pp, degrees.dp)

    def shape_beside_experts(self, grid: Grid) -> tuple[object, ...]:
        """``shape`` without how the experts are divided."""
        shape = self.shape(grid)
        return (*shape[:2], *shape[4:])

    def least_sums_ns(self, grid: Grid) -> float:
        """Nanoseconds of all layers for one micro-batch that no division of the experts can
        beat.
        """
        strategy = Strategy(tp=grid.tp, cp=grid.cp, sequence_parallel=grid.sequence_parallel)
        mesh = Mesh(tp=grid.tp, cp=grid.cp, dp=grid.dp, pp=grid.pp, order=ORDER_BY_STAGE)
        total = 0.0
        for c, (layer, count) in enumerate(zip(self.context.classes, self.counts, strict=True)):
            if isinstance(layer, Block) and self._experts[c]:
                own = self.context.least_s(layer, strategy, grid.micro_batch, mesh)
            else:
                own = self.cost(grid, c, NO_RECOMPUTE).total_s
            total += own * count
        return total * NANO

    def cost(self, degrees: Degrees | Grid, c: int, recompute: Recompute) -> LayerCost:
        """Cost of one layer of class ``c`` before ZeRO."""
        shard = self.shape(degrees)
        if not self._experts[c]:
            shard = (*shard[:2], *shard[4:])  # as in ``shape_beside_experts``
        key = (shard, c, recompute)
        if key not in self._costs:
            shape = dict(zip(("tp", "cp", "ep", "expert_tp"), degrees[:4], strict=True))
            self._costs[key] = self.context.compute(
                self.context.classes[c],
                Strategy(
                    **shape,
                    sequence_parallel=degrees.sequence_parallel,
                    recompute=recompute,
                    cp_comm=degrees.cp_comm,
                ),
                degrees.micro_batch,
                Mesh(**shape, dp=degrees.dp, pp=degrees.pp, order=ORDER_BY_STAGE),
            )
        return self._costs[key]

    def compute(self, degrees: Degrees | Grid) -> Compute:
        """All layers without recomputation."""
        key = self.shape(degrees)
        if key not in self._computed:
            costs = [self.cost(degrees, c, NO_RECOMPUTE) for c in range(len(self.counts))]
            times = [cost.total_s * NANO for cost in costs]
            timed = [cost for cost in costs if cost.total_s]
            self._computed[key] = Compute(
                sums=sum(t * n for t, n in zip(times, self.counts, strict=True)),
                greatest=max(times),
                forward_part=min((c.forward.total_s / c.total_s for c in timed), default=0.0),
                weight_part=max((c.weight_s / c.total_s for c in timed), default=0.0),
            )
        return self._computed[key]

    def options(self, degrees: Degrees, recomputes: tuple[Recompute, ...]) -> list[Option]:
        """Undominated recomputations of the blocks alike, fastest first."""
        key = (self.shape(degrees), recomputes)
        if key not in self._options:
            found: list[Option] = []
            for option in sorted(self.least_option(degrees, each) for each in recomputes):
                if not found or option.saved_bytes < found[-1].saved_bytes:
                    found.append(option)
            self._options[key] = found
        return self._options[key]

    def least_option(self, degrees: Degrees, recompute: Recompute) -> Option:
        """The fastest of the blocks alike, made longer by what ``recompute`` adds to the one to
        which it adds least.
        """
        key = (self.shape(degrees), recompute)
        if key not in self._least_options:
            plain = [self.cost(degrees, c, NO_RECOMPUTE).total_s for c in self.alike]
            own = [self.cost(degrees, c, recompute) for c in self.alike]
            added = min(each.total_s - before for each, before in zip(own, plain, strict=True))
            self._least_options[key] = Option(
                time_ns=(min(plain) + added) * NANO,
                forward_ns=min(each.forward.total_s for each in own) * NANO,
                saved_bytes=min(each.saved_bytes for each in own),
                transient_bytes=min(each.transient_bytes for each in own),
                longest_forward_ns=max(each.forward.total_s for each in own) * NANO,
                longest_backward_ns=max(each.backward.total_s for each in own) * NANO,
            )
        return self._least_options[key]

    def blocks(self, degrees: Degrees, option: Option | None = None) -> BlockTimes:
        """Least times of the blocks, of those alike without recomputation unless ``option`` is
        given.
        """
        plain = self.least_option(degrees, NO_RECOMPUTE)
        option = option or plain
        free = degrees.chunks > 1 or SCHEDULES[degrees.schedule].copies > 1
        key = (self.shape(degrees), free, option)
        if key not in self._blocks:
            added = option.time_ns - plain.time_ns
            self._blocks[key] = self._block_times(degrees, option, added, free=free)
        return self._blocks[key]

    def _block_times(
        self, degrees: Degrees, option: Option, added_ns: float, *, free: bool
    ) -> BlockTimes:
        """Those of blocks of which those alike take ``added_ns`` more than their passes."""
        last = self.context.chain[-1]
        head = 0.0
        if last not in self.block_classes:
            head = self.cost(degrees, last, NO_RECOMPUTE).total_s * NANO
        costs = {c: self.cost(degrees, c, NO_RECOMPUTE) for c in self.block_classes}
        own = {
            c: cost.total_s * NANO + (added_ns if c in self.alike else 0.0)
            for c, cost in costs.items()
        }
        times = BlockTimes(
            block=option.time_ns,
            forward_part=option.forward_ns / option.time_ns,
            weight_part=max(cost.weight_s * NANO / own[c] for c, cost in costs.items()),
            weight=max(cost.weight_s for cost in costs.values()) * NANO,
            head=head,
        )
        if len(own) == 1:
            return times
        part = min(cost.forward.total_s * NANO / own[c] for c, cost in costs.items())
        run = _least_run([own[c] for c in self.block_chain], free=free)
        together = len(self.alike) == len(self.block_classes)
        ratio = min(own.values()) / max(own.values()) if together else 0.0
        return times._replace(forward_part=part, alike=ratio, run=run)


def _least_run(times: list[float], *, free: bool) -> Callable[[int], float]:
    """Least time of so many of the blocks: neighbours, or any of them where they are dealt out
    ``free``ly.
    """
    sums = [0.0, *accumulate(sorted(times) if free else times)]

    @cache
    def least(count: int) -> float:
        if count > len(times):
            return INFINITE
        if free:
            return sums[count]
        return min(sums[i + count] - sums[i] for i in range(len(times) - count + 1))

    return least
