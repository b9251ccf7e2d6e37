"""Setup: the choices of one layout as launchers know them, and the layout that they make.

A layout lists chunks of layers with their strategies; launchers want one number a choice, the
blocks of each chunk and what each block recomputes. Both say the same, and each is made of the
other.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

from costmodel.layout import (
    NO_RECOMPUTE,
    Axis,
    Chunk,
    ContextComm,
    LayerSpan,
    Layout,
    Mesh,
    Strategy,
)
from costmodel.schedules import SCHEDULES, Shape
from profiles.layers import Embedding, Head

if TYPE_CHECKING:
    from costmodel.layout import Recompute
    from profiles.model import ModelSpec

__all__ = ["ORDER", "Setup", "layout_of", "of_blocks", "setup_of"]

ORDER = (Axis.TP, Axis.CP, Axis.EP, Axis.DP, Axis.PP)
DEGREES = ("tp", "cp", "ep", "expert_tp", "dp")  # that a mesh and its strategies both say


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """``blocks``: layers that carry a number in each chunk, in model order. ``recompute`` and
    ``zero`` of each layer of the chain, embedding and head included.
    """

    tp: int = 1
    cp: int = 1
    ep: int = 1
    expert_tp: int = 1
    dp: int = 1
    pp: int = 1
    chunks: int = 1
    schedule: str = "1f1b"
    micro_batch: int
    num_microbatches: int
    shard_group: int = 1
    sequence_parallel: bool = False
    cp_comm: ContextComm = ContextComm.RING
    order: tuple[Axis, ...] = ORDER
    blocks: tuple[int, ...]
    zero: tuple[int, ...]
    recompute: tuple[Recompute, ...]

    @property
    def one_zero(self) -> int:
        """The ZeRO stage of all layers, where they have one."""
        return self.zero[0]

    @property
    def num_ranks(self) -> int:
        """Ranks of the job."""
        return self.tp * self.cp * self.dp * self.pp

    @property
    def global_batch(self) -> int:
        """Sequences of a step."""
        return self.dp * self.micro_batch * self.num_microbatches


def setup_of(model: ModelSpec, layout: Layout) -> Setup:
    """The choices of a layout."""
    mesh, layers = layout.mesh, model.layers
    strategies = [
        span.strategy
        for chunk in layout.chunks
        for span in chunk.spans
        for _ in range(span.first, span.stop)
    ]
    return Setup(
        tp=mesh.tp,
        cp=mesh.cp,
        ep=mesh.ep,
        expert_tp=mesh.expert_tp,
        dp=mesh.dp,
        pp=mesh.pp,
        chunks=layout.num_chunks,
        schedule=layout.schedule,
        micro_batch=layout.micro_batch,
        num_microbatches=layout.num_microbatches,
        shard_group=strategies[0].shard_group,
        sequence_parallel=strategies[0].sequence_parallel,
        cp_comm=strategies[0].cp_comm,
        order=mesh.order,
        blocks=tuple(
            sum(not isinstance(layers[i], Embedding | Head) for i in range(chunk.first, chunk.stop))
            for chunk in layout.chunks
        ),
        zero=tuple(strategy.zero for strategy in strategies),
        recompute=tuple(strategy.recompute for strategy in strategies),
    )


def layout_of(model: ModelSpec, setup: Setup) -> Layout:
    """The layout of choices that fit the model: ``sum(blocks)`` layers carry a number."""
    degrees = {name: getattr(setup, name) for name in DEGREES}
    mesh = Mesh(**degrees, pp=setup.pp, order=setup.order)
    strategies = [
        Strategy(
            **degrees,
            zero=zero,
            shard_group=setup.shard_group,
            sequence_parallel=setup.sequence_parallel,
            cp_comm=setup.cp_comm if setup.cp > 1 else ContextComm.RING,
            recompute=recompute,
        )
        for zero, recompute in zip(setup.zero, setup.recompute, strict=True)
    ]
    shape = Shape(setup.pp, setup.chunks, setup.num_microbatches)
    path, *_ = SCHEDULES[setup.schedule].paths(shape)
    lead = int(isinstance(model.layers[0], Embedding))
    chunks, first = [], 0
    for virtual, size in enumerate(setup.blocks):
        last = virtual == len(setup.blocks) - 1
        stop = model.num_layers if last else first + size + (lead if virtual == 0 else 0)
        spans, start = [], first
        for strategy, equal in groupby(strategies[first:stop]):
            end = start + len(list(equal))
            spans.append(LayerSpan(start, end, strategy))
            start = end
        chunks.append(Chunk(*path[virtual], tuple(spans)))
        first = stop
    return Layout(
        mesh=mesh,
        schedule=setup.schedule,
        num_chunks=setup.chunks,
        micro_batch=setup.micro_batch,
        num_microbatches=setup.num_microbatches,
        chunks=tuple(chunks),
    )


def of_blocks(model: ModelSpec, blocks: tuple[Recompute, ...]) -> tuple[Recompute, ...]:
    """What every layer of the chain recomputes, from what each block does: the ends nothing."""
    following = iter(blocks)
    return tuple(
        NO_RECOMPUTE if isinstance(layer, Embedding | Head) else next(following)
        for layer in model.layers
    )
