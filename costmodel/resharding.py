"""Resharding: what brings an activation from the way one layer holds it to the way the next wants.

Over a group of ranks a tensor is whole on each of them, split along a dim, or a partial sum.
The pair of producer and consumer decides the collective (Lin et al., nnScaler, OSDI 2024; the
algebra of DTensor placements). Layers of different tensor parallel degree divide the same ranks:
where one splits the batch, the other splits the sequence (sequence parallelism) or has all of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from costmodel.collectives import collective_seconds
from costmodel.layout import Axis
from costmodel.work import CollectiveKind

if TYPE_CHECKING:
    from costmodel.context import CostContext
    from costmodel.layout import Layout, Mesh, Strategy
    from profiles.topology import Dims

__all__ = [
    "PARTIAL",
    "REPLICATE",
    "Placement",
    "Split",
    "conversion",
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


def reshard_s(
    context: CostContext, layout: Layout, before: Strategy, after: Strategy
) -> tuple[float, float]:
    """Seconds to hand one micro-batch's activation from a layer to the next on the same ranks, and
    its gradient back; both zero where the two hold it alike.
    """
    if _held(before) == _held(after):
        return 0.0, 0.0
    return _one_way(context, layout, before, after), _one_way(context, layout, after, before)


def _held(strategy: Strategy) -> tuple[int, bool]:
    return strategy.tp, strategy.sequence_parallel


def _one_way(context: CostContext, layout: Layout, have: Strategy, want: Strategy) -> float:
    """First over the ranks that only one of the layers uses for tp (the other splits the batch over
    them), then over those that both do.
    """
    small, large = sorted((have, want), key=lambda each: each.tp)
    inner, outer = layout.mesh_of(small).dims(Axis.TP), _beyond(layout.mesh_of(large), small.tp)
    tokens = layout.micro_batch_of(large) * -(-context.training.seq_len // large.cp)
    whole = tokens * (context.model.hidden or 0) * context.training.param_bytes
    beyond = _outer(have, large), _outer(want, large)
    within = _inner(have), _inner(want)
    slices = 1 if within[0] == REPLICATE else small.tp
    parts = 1 if beyond[1] == REPLICATE else large.tp // small.tp
    return _over(context, layout, outer, beyond, whole // slices) + _over(
        context, layout, inner, within, whole // parts
    )


def _over(
    context: CostContext,
    layout: Layout,
    dims: Dims,
    placements: tuple[Placement | Split, Placement | Split],
    size: int,
) -> float:
    """Seconds of a conversion over ``dims`` of what their ranks hold together, ``size`` bytes."""
    kind = conversion(*placements)
    if kind is None or not dims:
        return 0.0
    link = context.topology.axis(dims, num_ranks=layout.mesh.num_ranks)
    sent = size // link.size if kind is CollectiveKind.ALL_TO_ALL else size
    return collective_seconds(kind, sent, link, context.own)


def _inner(strategy: Strategy) -> Placement | Split:
    """How tp ranks hold what comes out of a layer and goes into it."""
    return SEQUENCE if strategy.sequence_parallel else REPLICATE


def _outer(strategy: Strategy, large: Strategy) -> Placement | Split:
    return _inner(strategy) if strategy.tp == large.tp else BATCH


def _beyond(mesh: Mesh, tp: int) -> Dims:
    """The ranks of a tp group beyond its first ``tp``."""
    dims = mesh.dims(Axis.TP)
    if not dims or dims[0][0] == tp:
        return ()
    ((size, stride),) = dims
    return ((size // tp, stride * tp),)
