"""Layout: the value that is costed, planned, exported and executed.

A *strategy* says how one layer is split, a *chunk* which consecutive layers one stage holds under
which strategies, a *mesh* how ranks are numbered. A layout is all of these, without any cost.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from costmodel.schedules.core import Shape

if TYPE_CHECKING:
    from collections.abc import Iterable

    from profiles.topology import Dims

__all__ = [
    "MODULES",
    "NO_RECOMPUTE",
    "Axis",
    "Chunk",
    "LayerSpan",
    "Layout",
    "Mesh",
    "Recompute",
    "RecomputeKind",
    "Strategy",
    "describe_ranks",
    "mixing_problems",
]


class Axis(StrEnum):
    """An axis of the mesh of ranks."""

    TP = "tp"
    CP = "cp"
    EP = "ep"
    DP = "dp"
    PP = "pp"


class RecomputeKind(StrEnum):
    """What the backward pass computes anew instead of keeping."""

    NONE = "none"
    SELECTIVE = "selective"
    FULL = "full"


class Recompute(NamedTuple):
    """Recomputation of one layer; ``modules`` only for the selective kind, sorted.

    Modules are those of ``MODULES`` (``core_attn``: scores to context), or ``operators`` alone:
    everything but attention and every second GEMM (torchtitan's "op").
    """

    kind: RecomputeKind
    modules: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"selective({'+'.join(self.modules)})" if self.modules else self.kind.value


NO_RECOMPUTE = Recompute(RecomputeKind.NONE)
MODULES = ("core_attn", "layernorm", "mlp", "moe_act")


class ContextComm(StrEnum):
    """How context parallel ranks get one another's keys and values: ``ring``, block by block while
    they attend to the one before; ``gather``, all of them before attention.
    """

    RING = "ring"
    GATHER = "gather"


@dataclass(frozen=True, slots=True, kw_only=True)
class Strategy:
    """How one layer is split over the ranks of its stage.

    Attention and dense layers use tp x cp x dp ranks; experts divide the same ranks into
    expert_tp x ep x (the rest). ``zero`` is the ZeRO stage of the layer; its states are sharded
    over ``shard_group`` of the dp x cp ranks and replicated beyond (HSDP). Stage 3 gathers a
    layer's weights for every pass of every micro-batch and frees them after it. ``cp_comm`` says
    nothing where cp is 1.
    """

    tp: int = 1
    cp: int = 1
    ep: int = 1
    expert_tp: int = 1
    dp: int = 1
    zero: int = 0
    shard_group: int = 1
    sequence_parallel: bool = False
    recompute: Recompute = NO_RECOMPUTE
    cp_comm: ContextComm = ContextComm.RING


@dataclass(frozen=True, slots=True)
class LayerSpan:
    """Layers ``first`` .. ``stop - 1`` (positions in the model's chain) under one strategy."""

    first: int
    stop: int
    strategy: Strategy


@dataclass(frozen=True, slots=True)
class Chunk:
    """The consecutive layers that ``stage`` holds as its ``chunk``-th share."""

    stage: int
    chunk: int
    spans: tuple[LayerSpan, ...]

    @property
    def first(self) -> int:
        """Position of the first layer."""
        return self.spans[0].first

    @property
    def stop(self) -> int:
        """Position after the last layer."""
        return self.spans[-1].stop


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """How ranks are numbered: sizes of the axes and their order, fastest first.

    Experts divide the ranks of a stage anew, in the order expert_tp, ep, the rest (as in
    Megatron), so ``ep`` in ``order`` only marks that place.
    """

    tp: int = 1
    cp: int = 1
    dp: int = 1
    pp: int = 1
    ep: int = 1
    expert_tp: int = 1
    order: tuple[Axis, ...] = (Axis.TP, Axis.CP, Axis.EP, Axis.DP, Axis.PP)

    def __hash__(self) -> int:
        """Of the degrees alone: a search asks for it all the time."""
        return hash((self.tp, self.cp, self.dp, self.pp, self.ep, self.expert_tp))

    @property
    def stage_size(self) -> int:
        """Ranks of one stage."""
        return self.tp * self.cp * self.dp

    @property
    def num_ranks(self) -> int:
        """Ranks of the whole mesh."""
        return self.stage_size * self.pp

    @property
    def expert_dp(self) -> int:
        """Replicas of each expert shard."""
        return self.stage_size // (self.ep * self.expert_tp)

    @cached_property
    def _strides(self) -> dict[Axis, int]:
        strides: dict[Axis, int] = {}
        stride = 1
        for axis in self.order:
            if axis is Axis.EP:
                continue
            strides[axis] = stride
            stride *= self._size(axis)
        return strides

    def _size(self, axis: Axis) -> int:
        return {Axis.TP: self.tp, Axis.CP: self.cp, Axis.DP: self.dp, Axis.PP: self.pp}[axis]

    @property
    def regroups(self) -> bool:
        """Whether layers may divide the ranks of a stage into tp and dp otherwise: dp follows tp,
        but for axes of one rank, so that the tp ranks of any layer are neighbours.
        """
        inner = (Axis.TP, Axis.DP)
        walked = [a for a in self.order if a in inner or (a is not Axis.EP and self._size(a) > 1)]
        return walked.index(Axis.DP) == walked.index(Axis.TP) + 1

    def dims(self, *axes: Axis) -> Dims:
        """(size, stride) of the groups over ``axes`` together, fastest first, ones left out."""
        pairs = [(self._strides[axis], self._size(axis)) for axis in axes]
        return tuple((size, stride) for stride, size in sorted(pairs) if size > 1)

    @property
    def gradient_dims(self) -> Dims:
        """Groups that hold the same dense weights: dp x cp."""
        return self.dims(Axis.CP, Axis.DP)

    def shard_dims(self, shard_group: int) -> Dims:
        """The first ``shard_group`` ranks of each gradient group, fastest axes first."""
        return _inner(self.gradient_dims, shard_group)

    def replica_dims(self, shard_group: int) -> Dims:
        """Ranks that hold the same shard when states are sharded over ``shard_group``."""
        return _outer(self.gradient_dims, shard_group)

    @property
    def _local_dims(self) -> Dims:
        return self.dims(Axis.TP, Axis.CP, Axis.DP)

    @property
    def expert_tp_dims(self) -> Dims:
        """Groups that split one expert."""
        return _inner(self._local_dims, self.expert_tp)

    @property
    def ep_dims(self) -> Dims:
        """Groups that exchange tokens."""
        return _inner(_outer(self._local_dims, self.expert_tp), self.ep)

    @property
    def divides_experts(self) -> bool:
        """Whether the expert groups tile the ranks of a stage."""
        groups = (self.expert_tp_dims, self.ep_dims, self.expert_gradient_dims)
        sizes = [math.prod(size for size, _ in dims) for dims in groups]
        return sizes == [self.expert_tp, self.ep, self.expert_dp] and (
            self.expert_dp * self.ep * self.expert_tp == self.stage_size
        )

    @property
    def expert_gradient_dims(self) -> Dims:
        """Groups that hold the same expert weights."""
        return _outer(self._local_dims, self.expert_tp * self.ep)

    def stage_ranks(self, stage: int) -> tuple[range, ...]:
        """Ranks of a stage as ranges of consecutive ranks."""
        block = self._strides[Axis.PP]
        starts = range(stage * block, self.num_ranks, block * self.pp)
        return tuple(range(start, start + block) for start in starts)

    def first_rank(self, stage: int) -> int:
        """The lowest rank of a stage."""
        return stage * self._strides[Axis.PP]


def describe_ranks(ranges: tuple[range, ...]) -> str:
    """``0-7,32-39`` for two ranges."""
    return ",".join(
        f"{ranks.start}-{ranks.stop - 1}" if len(ranks) > 1 else str(ranks.start)
        for ranks in ranges
    )


def _merged(dims: Dims) -> Dims:
    """Dims that continue one another as one: 4 neighbours, then 3 at stride 4, are 12."""
    merged: list[tuple[int, int]] = []
    for size, stride in dims:
        if merged and merged[-1][0] * merged[-1][1] == stride:
            merged[-1] = (merged[-1][0] * size, merged[-1][1])
        else:
            merged.append((size, stride))
    return tuple(merged)


def _inner(dims: Dims, count: int) -> Dims:
    """The fastest part of ``dims`` that holds ``count`` ranks."""
    taken: list[tuple[int, int]] = []
    for size, stride in _merged(dims):
        part = min(size, count)
        if part > 1:
            taken.append((part, stride))
        count //= part
    return tuple(taken)


def _outer(dims: Dims, count: int) -> Dims:
    """What ``dims`` spans beyond its fastest ``count`` ranks."""
    rest: list[tuple[int, int]] = []
    for size, stride in _merged(dims):
        skipped = min(size, count)
        if size // skipped > 1:
            rest.append((size // skipped, stride * skipped))
        count //= skipped
    return tuple(rest)


@dataclass(frozen=True, kw_only=True)
class Layout:
    """All choices. ``chunks`` stand in model order; chunk c of stage s is number c * stages + s
    for every schedule but the V-shaped ones.
    """

    mesh: Mesh
    schedule: str
    num_chunks: int
    micro_batch: int
    num_microbatches: int
    chunks: tuple[Chunk, ...]

    @property
    def shape(self) -> Shape:
        """Size of the pipeline."""
        return Shape(self.num_stages, self.num_chunks, self.num_microbatches)

    @property
    def num_stages(self) -> int:
        """Pipeline stages."""
        return self.mesh.pp

    @cached_property
    def strategies(self) -> tuple[Strategy, ...]:
        """Distinct strategies in model order."""
        spans = (span for chunk in self.chunks for span in chunk.spans)
        return tuple(dict.fromkeys(span.strategy for span in spans))

    def stage_chunks(self, stage: int) -> tuple[Chunk, ...]:
        """The chunks of a stage in chunk order."""
        return tuple(chunk for chunk in self.chunks if chunk.stage == stage)

    @property
    def ends(self) -> tuple[Strategy, Strategy]:
        """The strategies of the first layer and of the last."""
        return self.chunks[0].spans[0].strategy, self.chunks[-1].spans[-1].strategy

    def strategy_before(self, chunk: Chunk) -> Strategy | None:
        """The strategy of the layer that a chunk follows, None for the first chunk."""
        number = self.chunks.index(chunk)
        return self.chunks[number - 1].spans[-1].strategy if number else None

    def mesh_of(self, strategy: Strategy) -> Mesh:
        """The mesh as a layer of ``strategy`` divides it: the same ranks of each stage under its
        own tp and dp.
        """
        if (strategy.tp, strategy.dp) == (self.mesh.tp, self.mesh.dp):
            return self.mesh
        return replace(self.mesh, tp=strategy.tp, dp=strategy.dp)

    def micro_batch_of(self, strategy: Strategy) -> int:
        """Sequences of one micro-batch on each replica of a layer of ``strategy``."""
        return self.micro_batch * self.mesh.dp // strategy.dp

    def problems(self, num_layers: int) -> list[str]:
        """What is inconsistent in this layout for a model of ``num_layers``; empty if sound."""
        found = []
        spans = [span for chunk in self.chunks for span in chunk.spans]
        if [span.first for span in spans[:1]] != [0] or spans[-1].stop != num_layers:
            found.append(f"chunks must cover all {num_layers} layers of the model")
        found += [
            f"layers {before.stop} to {after.first} are missing or twice"
            for before, after in pairwise(spans)
            if before.stop != after.first
        ]
        places = sorted((chunk.stage, chunk.chunk) for chunk in self.chunks)
        wanted = [(s, c) for s in range(self.num_stages) for c in range(self.num_chunks)]
        if places != wanted:
            found.append(f"every one of {len(wanted)} (stage, chunk) places needs its layers")
        if not self.mesh.divides_experts:
            found.append(
                f"ep {self.mesh.ep} x expert_tp {self.mesh.expert_tp} does not divide the "
                f"{self.mesh.stage_size} ranks of a stage in this rank order"
            )
        for strategy in self.strategies:
            for name in ("cp", "ep", "expert_tp"):
                if getattr(strategy, name) != getattr(self.mesh, name):
                    got, want = getattr(strategy, name), getattr(self.mesh, name)
                    found.append(f"{name} {got} of a strategy differs from the mesh's {want}")
            found += mixing_problems(strategy, self.mesh, self.micro_batch, self.strategies)
        return found


def mixing_problems(
    strategy: Strategy, mesh: Mesh, micro_batch: int, others: Iterable[Strategy] = ()
) -> list[str]:
    """Why a layer cannot divide the ranks of a stage of ``mesh`` as ``strategy`` says beside
    ``others`` of the same job, while ``micro_batch`` sequences belong to each of the mesh's
    replicas.
    """
    own, sequences = f"tp {strategy.tp} of a strategy", micro_batch * mesh.dp
    degrees = (mesh.tp, *(other.tp for other in others))
    apart = [tp for tp in degrees if max(tp, strategy.tp) % min(tp, strategy.tp)]
    found = []
    if strategy.tp * strategy.dp != mesh.tp * mesh.dp:
        found.append(
            f"tp {strategy.tp} x dp {strategy.dp} of a strategy are not the mesh's "
            f"{mesh.tp} x {mesh.dp} ranks"
        )
    elif apart:
        found.append(f"{own} does not nest with tp {apart[0]} of another")
    elif strategy.tp != mesh.tp and not mesh.regroups:
        found.append(f"{own} beside tp {mesh.tp}, in a rank order in which dp does not follow tp")
    elif sequences % strategy.dp:
        found.append(
            f"the {sequences} sequences of a micro-batch do not divide by dp {strategy.dp} of a "
            "strategy"
        )
    return found
