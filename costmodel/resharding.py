"""Resharding: what brings an activation from the way one layer holds it to the way the next wants.

Over a group of ranks a tensor is whole on each of them, split along a dim, or a partial sum.
The pair of producer and consumer decides the collective (Lin et al., nnScaler, OSDI 2024; the
algebra of DTensor placements). Layers of different tensor parallel degree divide the same ranks:
where one splits the batch, the other splits the sequence (sequence parallelism) or has all of it.
Which rank has what is counted out here once, for the price and for the executor.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING, NamedTuple

from costmodel.collectives import collective_seconds, exchange_seconds
from costmodel.layout import Axis
from costmodel.work import CollectiveKind

if TYPE_CHECKING:
    from costmodel.context import CostContext
    from costmodel.layout import Layout, Strategy

__all__ = [
    "PARTIAL",
    "REPLICATE",
    "Held",
    "Placement",
    "Split",
    "collective",
    "conversion",
    "held",
    "piece",
    "reshard_s",
]


@dataclass(frozen=True, slots=True)
class Placement:
    """How the ranks of a group hold a tensor: whole, or each a summand of it."""

    name: str


@dataclass(frozen=True, slots=True)
class Split:
    """Each rank of a group holds a part along ``dim``."""

    dim: int


REPLICATE = Placement("replicate")
PARTIAL = Placement("partial")
BATCH, SEQUENCE = Split(0), Split(1)


def conversion(have: Placement | Split, want: Placement | Split) -> CollectiveKind | None:
    """The collective that turns one placement into the other; None where each rank has what it
    needs: a part of a whole tensor, or a summand (its own part, or the whole on one rank).
    """
    if want in (have, PARTIAL):
        return None
    if have == PARTIAL:
        whole = want == REPLICATE
        return CollectiveKind.ALL_REDUCE if whole else CollectiveKind.REDUCE_SCATTER
    if have == REPLICATE:
        return None
    return CollectiveKind.ALL_GATHER if want == REPLICATE else CollectiveKind.ALL_TO_ALL


class Held(NamedTuple):
    """How ``tp`` ranks hold the residual stream of their rows: with ``sequence`` each its part of
    every sequence, in their order, otherwise all of it.
    """

    tp: int
    sequence: bool

    @property
    def parts(self) -> int:
        """Into which sequences are divided."""
        return self.tp if self.sequence else 1

    def part(self, rank: int, ranks: int) -> tuple[range, range]:
        """Rows and positions that one of ``ranks`` consecutive ranks holds of what all of them do,
        each counted in as many parts as there are ranks.
        """
        first, length = rank - rank % self.tp, ranks // self.parts
        start = rank % self.parts * length
        return range(first, first + self.tp), range(start, start + length)


def held(strategy: Strategy) -> Held:
    """How a layer's ranks hold what goes into it and comes out."""
    return Held(strategy.tp, strategy.sequence_parallel and strategy.tp > 1)


def piece(have: Held, want: Held, giver: int, taker: int) -> tuple[range, range]:
    """Rows and positions, counted as in ``Held.part``, that one rank of the larger tp group gives
    another, or keeps; empty where it is nothing. Each rank takes a part from one rank only, from
    itself where it has it.
    """
    size = max(have.tp, want.tp)
    if not have.sequence and giver % have.tp != taker % have.tp:
        return range(0), range(0)
    (rows, positions), (wanted_rows, wanted) = have.part(giver, size), want.part(taker, size)
    shared = _shared(rows, wanted_rows), _shared(positions, wanted)
    return shared if all(shared) else (range(0), range(0))


def _shared(one: range, other: range) -> range:
    return range(max(one.start, other.start), min(one.stop, other.stop))


@cache
def leaving(have: Held, want: Held, members: int) -> float:
    """The most that ``members`` neighbours of the larger tp group give to, or take from, its other
    ranks, as a part of what the group holds.
    """
    size = max(have.tp, want.tp)

    def given(giver: int, taker: int) -> int:
        rows, positions = piece(have, want, giver, taker)
        return len(rows) * len(positions)

    most = 0
    for first in range(0, size, members):
        inside = range(first, min(first + members, size))
        pairs = [(i, o) for i in inside for o in range(size) if o not in inside]
        out, into = sum(given(i, o) for i, o in pairs), sum(given(o, i) for i, o in pairs)
        most = max(most, out, into)
    return most / size**2


def collective(have: Held, want: Held) -> CollectiveKind | None:
    """What the larger tp group runs: an all-gather where each rank has a part of its own and wants
    everything, otherwise an all-to-all of what ranks lack; None where they lack nothing.
    """
    if not leaving(have, want, 1):
        return None
    everything = want == (max(have.tp, want.tp), False)
    alone = REPLICATE if have.tp > have.parts else SEQUENCE if have.sequence else BATCH
    wanted = REPLICATE if everything else SEQUENCE if want.sequence else BATCH
    return conversion(alone, wanted) or CollectiveKind.ALL_TO_ALL


def reshard_s(
    context: CostContext, layout: Layout, before: Strategy, after: Strategy
) -> tuple[float, float]:
    """Seconds to hand one micro-batch's activation from a layer to the next on the same ranks, and
    its gradient back; both zero where the two hold it alike.

    Each way is one collective in the tp group of the layer with the larger one.
    """
    have, want = held(before), held(after)
    if have == want:
        return 0.0, 0.0
    large = max(before, after, key=lambda each: each.tp)
    tokens = layout.micro_batch_of(large) * -(-context.training.seq_len // large.cp)
    whole = tokens * (context.model.hidden or 0) * context.training.param_bytes
    dims = layout.mesh_of(large).dims(Axis.TP)
    link = context.topology.axis(dims, num_ranks=layout.mesh.num_ranks)

    def one_way(have: Held, want: Held) -> float:
        kind = collective(have, want)
        if kind is CollectiveKind.ALL_TO_ALL:
            lacking = partial(leaving, have, want)
            return exchange_seconds(lambda n: whole * lacking(n), link, context.own)
        return collective_seconds(kind, whole, link, context.own) if kind else 0.0

    return one_way(have, want), one_way(want, have)
