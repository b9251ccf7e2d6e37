"""The collectives that a plan means for one rank and step, to hold against those that ran.

They follow from the strategies alone: where activations enter and leave what tp splits, what
ZeRO reduces and gathers, what stages hand over. The cost model prices the same ones.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from torch import nn
from torch.distributed.tensor import DTensor, Shard

from costmodel.layout import ContextComm, RecomputeKind
from costmodel.resharding import collective, piece
from costmodel.schedules import SCHEDULES
from costmodel.work import CollectiveKind
from executor.gradients import local_tensor
from executor.mesh import (
    CONTEXT,
    EXPERT_REPLICAS,
    EXPERT_TENSOR,
    EXPERTS,
    PIPELINE,
    REPLICAS,
    SHARDS,
    TENSOR,
    WORLD,
    replicas,
    shards,
)
from executor.models.block import NativeBlock
from executor.models.ends import NativeEmbedding, NativeHead, are_gathered_twice
from executor.models.experts import NativeExpertFeedForward, NativeExperts
from executor.models.parameters import SplitModule
from executor.traffic import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    OTHER,
    RECEIVE,
    REDUCE_SCATTER,
    SEND,
    Traffic,
)
from profiles.layers import ExpertFeedForward, QKNorm

if TYPE_CHECKING:
    from collections.abc import Iterator

    from costmodel.layout import Layout, Strategy
    from executor.mesh import RankMesh
    from executor.models.chain import Chain
    from executor.models.resharding import Resharding
    from executor.pipeline import Part
    from executor.precision import Numbers
    from profiles.model import ModelSpec
    from profiles.training import TrainingSpec

__all__ = ["planned_traffic"]

GRADIENTS_SHARDED, WEIGHTS_SHARDED = 2, 3
LOSS_SUMS: Final = 3  # greatest logit; sum of exponentials and target's logit
SPLITTING: Final = (TENSOR, EXPERTS, EXPERT_TENSOR)
EXPERT_COPIES: Final = (EXPERT_REPLICAS, EXPERT_REPLICAS)
COUNT: Final = 8  # bytes of a number of tokens
PER_STEP: Final = 24  # bytes of the loss, the norm and the wish to stop, in float64
Entry = tuple[str, str, int, int]  # kind, axis, times, bytes of each


@dataclass(frozen=True, slots=True)
class _Sizes:
    """Bytes of what one micro-batch moves, and between whom."""

    mesh: RankMesh
    layout: Layout
    training: TrainingSpec
    numbers: Numbers
    hidden: int
    tied: bool

    def tokens(self, strategy: Strategy) -> int:
        """Of a micro-batch, on each replica of a layer."""
        return self.layout.micro_batch_of(strategy) * self.training.seq_len // strategy.cp

    def activations(self, strategy: Strategy) -> int:
        """The whole residual stream of a micro-batch between the ranks that split a layer."""
        return self.tokens(strategy) * self.hidden * self.numbers.activations.itemsize

    def statistics(self, strategy: Strategy) -> int:
        """One wide number for each of those tokens."""
        return self.tokens(strategy) * max(4, self.numbers.activations.itemsize)

    def tensor(self, strategy: Strategy) -> str:
        """The axis of the ranks that split a layer."""
        return self.mesh.axis(TENSOR, strategy.tp)


def planned_traffic(
    parts: list[Part],
    mesh: RankMesh,
    training: TrainingSpec,
    numbers: Numbers,
    *,
    model: ModelSpec,
) -> Traffic:
    """Counts and bytes of a step on the rank that holds ``parts``, by kind and axis; groups of one
    rank move nothing and are left out.
    """
    layout = mesh.layout
    counts: Counter[tuple[str, str]] = Counter()
    moved: Counter[tuple[str, str]] = Counter()
    assert model.hidden is not None
    sizes = _Sizes(mesh, layout, training, numbers, model.hidden, model.tied)
    entries = [entry for part in parts for entry in _of_part(part, sizes)]
    if layout.mesh.num_ranks > 1:
        entries.append((ALL_REDUCE, WORLD, 1, PER_STEP))
    for kind, axis, times, size in entries:
        if times:
            counts[kind, axis] += times
            moved[kind, axis] += times * size
    return Traffic(dict(counts), dict(moved))


def _of_part(part: Part, sizes: _Sizes) -> Iterator[Entry]:
    yield from _hand_over(part, sizes)
    passes = sizes.layout.num_microbatches
    for name, layer in part.chain.layers.items():
        strategy = part.chain.strategies[name]
        if name in part.chain.changes:
            yield from _changed(part.chain.changes[name], strategy, sizes)
        if isinstance(layer, NativeBlock):
            yield from _of_context(layer, strategy, sizes)
            yield from _of_experts(layer, strategy, sizes)
        if strategy.tp > 1:
            axis = sizes.tensor(strategy)
            for kind, times, size in _crossings(layer, strategy, sizes):
                yield kind, axis, passes * times, size
            if (
                SCHEDULES[sizes.layout.schedule].splits
                and part.number
                and strategy.sequence_parallel
            ):
                entries = 2 if isinstance(layer, NativeBlock) else 1  # gathered for W as for B
                yield ALL_GATHER, axis, passes * entries, sizes.activations(strategy)
            yield from _partial_gradients(layer, strategy, sizes)
    yield from _tied_ends(part, sizes)
    for unit, strategy in part.data_parallel.units:
        assert isinstance(unit, nn.Module)
        yield from _of_unit(part.chain, unit, strategy, sizes)


def _changed(change: Resharding, after: Strategy, sizes: _Sizes) -> Iterator[Entry]:
    """Activations that a layer takes from one that holds them otherwise, and their gradients."""
    tp, rank = change.group.size, change.group.rank
    whole = sizes.activations(after) * tp // after.tp
    for way in (change, change.back):
        kind = collective(way.have, way.want)
        if kind is not None:
            given = (piece(way.have, way.want, rank, taker) for taker in range(tp))
            parts = sum(len(rows) * len(positions) for rows, positions in given)
            size = whole if kind is CollectiveKind.ALL_GATHER else whole * parts // tp**2
            yield kind.value, sizes.mesh.axis(TENSOR, tp), sizes.layout.num_microbatches, size


def _hand_over(part: Part, sizes: _Sizes) -> Iterator[Entry]:
    """Activations to the next chunk and gradients back, where it is on another rank."""
    chunks, passes = sizes.layout.chunks, sizes.layout.num_microbatches
    axis = sizes.mesh.axis(PIPELINE, sizes.layout.num_stages)
    for other, there, back in ((part.number - 1, RECEIVE, SEND), (part.number + 1, SEND, RECEIVE)):
        if 0 <= other < len(chunks) and chunks[other].stage != chunks[part.number].stage:
            strategy = chunks[min(other, part.number)].spans[-1].strategy
            parts = strategy.tp if strategy.sequence_parallel else 1
            yield there, axis, passes, sizes.activations(strategy) // parts
            yield back, axis, passes, sizes.activations(strategy) // parts


def _tied_ends(part: Part, sizes: _Sizes) -> Iterator[Entry]:
    """The sum of the gradients of both copies of a matrix, each rank with its opposite one."""
    chunks = sizes.layout.chunks
    if not sizes.tied or len(chunks) == 1 or chunks[0].stage == chunks[-1].stage:
        return
    ends = {"embedding": "tokens", "head": "projection"}
    for name in ends.keys() & part.chain.layers.keys():
        copy = part.chain.layers[name].get_parameter(ends[name])
        count = local_tensor(copy).numel()
        yield ALL_REDUCE, OTHER, 1, count * sizes.numbers.master.itemsize


def _crossings(
    layer: nn.Module, strategy: Strategy, sizes: _Sizes
) -> Iterator[tuple[str, int, int]]:
    """Of one micro-batch: (kind, times, bytes)."""
    whole, sequence = sizes.activations(strategy), strategy.sequence_parallel
    if isinstance(layer, NativeEmbedding):
        yield (REDUCE_SCATTER, 1, whole) if sequence else (ALL_REDUCE, 1, whole)
        if sequence:
            yield ALL_GATHER, 1, whole
    elif isinstance(layer, NativeHead):
        if sequence:
            yield ALL_GATHER, 2, whole  # again backward
            yield REDUCE_SCATTER, 1, whole
        else:
            yield ALL_REDUCE, 1, whole
        yield ALL_REDUCE, 1, sizes.statistics(strategy)
        yield ALL_REDUCE, 1, (LOSS_SUMS - 1) * sizes.statistics(strategy)
    elif isinstance(layer, NativeBlock):
        yield from _block_crossings(layer, strategy, sizes)


def _block_crossings(
    layer: NativeBlock, strategy: Strategy, sizes: _Sizes
) -> Iterator[tuple[str, int, int]]:
    """Attention and feed-forward each enter and leave, of experts the shared ones. Full
    recomputation repeats the forward crossings but the last, and that too where a gate follows;
    gathered inputs are gathered again backward in any case.
    """
    whole = sizes.activations(strategy)
    full = layer.recompute.kind is RecomputeKind.FULL
    own = layer.feed_forward
    if strategy.sequence_parallel:
        pairs, again = 2, 1
        if isinstance(own, NativeExpertFeedForward):
            pairs = 1 if own.shared is None else 2
            again = 2 if own.spec.shared_gate else 1
        yield ALL_GATHER, 3 * pairs, whole
        yield REDUCE_SCATTER, 2 * pairs + (again if full else 0), whole
    else:
        yield ALL_REDUCE, 5 if full else 4, whole
    if layer.spec.attention.qk_norm is QKNorm.FULL:
        yield ALL_REDUCE, 6 if full else 4, sizes.statistics(strategy)


def _partial_gradients(layer: nn.Module, strategy: Strategy, sizes: _Sizes) -> Iterator[Entry]:
    """Norms of a part of the sequence, or of a part of the heads: their gradients are summed over
    tp whenever gradients are reduced.
    """
    numbers, passes = sizes.numbers, sizes.layout.num_microbatches
    wrapped = replicas(strategy) > 1 or numbers.is_mixed
    often = wrapped and strategy.zero >= GRADIENTS_SHARDED
    times = passes if often else 1
    kept = numbers.reduce or numbers.master  # gradients of micro-batches are added up in it
    element = numbers.activations if often or passes == 1 else kept
    for part in layer.modules():
        if not isinstance(part, SplitModule):
            continue
        for name, traits in part.traits.items():
            if traits.partial:
                count = math.prod(getattr(part, name).shape)
                yield ALL_REDUCE, sizes.tensor(strategy), times, count * element.itemsize


def _of_context(layer: NativeBlock, strategy: Strategy, sizes: _Sizes) -> Iterator[Entry]:
    """Keys and values are gathered, again backward, where their gradients are scattered; or go
    round, again where attention is recomputed and backward, where their gradients follow them.
    """
    if strategy.cp == 1:
        return
    spec, passes = layer.spec.attention, sizes.layout.num_microbatches
    width = 2 * spec.kv_heads // strategy.tp * spec.head_dim
    size = sizes.tokens(strategy) * width * sizes.numbers.activations.itemsize
    if strategy.cp_comm is ContextComm.RING:
        own = layer.recompute
        again = own.kind is RecomputeKind.FULL or "core_attn" in own.modules
        rounds = (4 if again else 3) * passes
        yield SEND, CONTEXT, rounds * (strategy.cp - 1), size
        yield RECEIVE, CONTEXT, rounds * (strategy.cp - 1), size
    else:
        yield ALL_GATHER, CONTEXT, 2 * passes, size * strategy.cp
        yield REDUCE_SCATTER, CONTEXT, passes, size * strategy.cp


def _of_experts(layer: NativeBlock, strategy: Strategy, sizes: _Sizes) -> Iterator[Entry]:
    """Tokens go to their experts and back, and so do gradients; the counts of tokens and their
    weights beside them. Bytes are those of an even routing, and of all-to-alls exact in the sum
    over ranks.
    """
    spec = layer.spec.feed_forward
    if not isinstance(spec, ExpertFeedForward):
        return
    parts = strategy.tp if strategy.sequence_parallel else 1
    routed = sizes.tokens(strategy) // parts * spec.top_k
    row = sizes.hidden * sizes.numbers.activations.itemsize
    weight = max(4, sizes.numbers.activations.itemsize)
    passes = sizes.layout.num_microbatches
    forward = passes * (2 if layer.recompute.kind is RecomputeKind.FULL else 1)
    both = forward + passes
    if strategy.ep > 1:
        yield ALL_TO_ALL, EXPERTS, forward, spec.num_experts * COUNT
        yield ALL_TO_ALL, EXPERTS, 2 * both, routed * row
        yield ALL_TO_ALL, EXPERTS, both, routed * weight
    if strategy.expert_tp > 1:
        routed *= strategy.expert_tp
        yield ALL_GATHER, EXPERT_TENSOR, forward, spec.num_experts * COUNT * strategy.expert_tp
        for kind, there, back in ((ALL_GATHER, forward, passes), (REDUCE_SCATTER, passes, forward)):
            yield kind, EXPERT_TENSOR, there + back, routed * row
            yield kind, EXPERT_TENSOR, there, routed * weight


def _of_unit(chain: Chain, first: nn.Module, strategy: Strategy, sizes: _Sizes) -> Iterator[Entry]:
    """Reductions and gathers of one unit: a layer, or the two that share a matrix. Experts, over
    ranks of their own.
    """
    is_tied = chain.is_tied and isinstance(first, NativeEmbedding)
    layers = [first, chain.head] if is_tied else [first]
    experts = [part for part in first.modules() if isinstance(part, NativeExperts)]
    apart = {id(p) for part in experts for p in part.parameters()}
    dense = {id(p): p for layer in layers for p in layer.parameters() if id(p) not in apart}
    gathers = 2 if are_gathered_twice(layers) else 1
    ranks = replicas(strategy), shards(strategy)
    yield from _of_zero([*dense.values()], ranks, strategy, sizes, gathers=gathers)
    if shards(strategy) == 1 and not isinstance(first, NativeExperts):
        return  # experts are units of their own
    copies = sizes.layout.mesh.expert_dp
    own = [p for part in experts for p in part.parameters()]
    over = copies if strategy.zero else 1
    yield from _of_zero(own, (copies, over), strategy, sizes, names=EXPERT_COPIES)


def _of_zero(
    parameters: list[nn.Parameter],
    ranks: tuple[int, int],
    strategy: Strategy,
    sizes: _Sizes,
    *,
    names: tuple[str, str] = (REPLICAS, SHARDS),
    gathers: int = 2,
) -> Iterator[Entry]:
    """``ranks``: that hold the same weights, and over which those are sharded. ``names``: axes of
    the former beyond the latter, and of the latter. ``gathers``: of ZeRO-3 in a micro-batch.
    """
    if not parameters:
        return
    (copies, over), numbers, passes = ranks, sizes.numbers, sizes.layout.num_microbatches
    padded = sum(_padded(each, over) for each in parameters)
    weight = padded * numbers.activations.itemsize
    gradient = padded * (numbers.reduce or numbers.master).itemsize
    if over < copies:
        yield ALL_REDUCE, sizes.mesh.axis(names[0], copies // over), 1, gradient // over
    if over > 1:
        axis, every = sizes.mesh.axis(names[1], over), strategy.zero >= GRADIENTS_SHARDED
        yield REDUCE_SCATTER, axis, passes if every else 1, gradient
        yield ALL_GATHER, axis, gathers * passes if strategy.zero == WEIGHTS_SHARDED else 1, weight


def _padded(parameter: nn.Parameter, over: int) -> int:
    """Elements of what tp, or ep and expert_tp, leave of a parameter on one rank, its first dim
    padded to whole shards.
    """
    shape = [*parameter.shape]
    if isinstance(parameter, DTensor):
        names = parameter.device_mesh.mesh_dim_names or ()
        for name, placement in zip(names, parameter.placements, strict=True):
            if name in SPLITTING and isinstance(placement, Shard):
                size = parameter.device_mesh.size(names.index(name))
                shape[placement.dim] = -(-shape[placement.dim] // size)
    shape[0] = -(-shape[0] // over) * over
    return math.prod(shape)
