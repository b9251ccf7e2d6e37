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

from costmodel.layout import RecomputeKind
from costmodel.schedules import SCHEDULES
from executor.gradients import local_tensor
from executor.mesh import PIPELINE, REPLICAS, SHARDS, TENSOR, WORLD, shards
from executor.models.block import NativeBlock
from executor.models.ends import NativeEmbedding, NativeHead
from executor.models.parameters import SplitModule
from executor.traffic import (
    ALL_GATHER,
    ALL_REDUCE,
    OTHER,
    RECEIVE,
    REDUCE_SCATTER,
    SEND,
    Traffic,
)
from profiles.layers import QKNorm

if TYPE_CHECKING:
    from collections.abc import Iterator

    from costmodel.layout import Layout, Strategy
    from executor.mesh import RankMesh
    from executor.models.chain import Chain
    from executor.pipeline import Part
    from executor.precision import Numbers
    from profiles.model import ModelSpec
    from profiles.training import TrainingSpec

__all__ = ["planned_traffic"]

GRADIENTS_SHARDED, WEIGHTS_SHARDED = 2, 3
LOSS_SUMS: Final = 3  # greatest logit; sum of exponentials and target's logit
PER_STEP: Final = 16  # bytes of the loss and the norm, in float64
Entry = tuple[str, str, int, int]  # kind, axis, times, bytes of each


@dataclass(frozen=True, slots=True)
class _Sizes:
    """Bytes of what one micro-batch moves."""

    layout: Layout
    training: TrainingSpec
    numbers: Numbers
    hidden: int
    tied: bool

    @property
    def activations(self) -> int:
        """The whole residual stream of a micro-batch."""
        tokens = self.layout.micro_batch * self.training.seq_len
        return tokens * self.hidden * self.numbers.activations.itemsize


def planned_traffic(
    parts: list[Part],
    mesh: RankMesh,
    training: TrainingSpec,
    numbers: Numbers,
    *,
    model: ModelSpec,
) -> Traffic:
    """Counts and bytes of a step on the rank that holds ``parts``, by kind and axis; groups of one
    rank move nothing and are left out. Axes that span all ranks are one.
    """
    layout = mesh.layout
    counts: Counter[tuple[str, str]] = Counter()
    moved: Counter[tuple[str, str]] = Counter()
    assert model.hidden is not None
    sizes = _Sizes(layout, training, numbers, model.hidden, model.tied)
    entries = [entry for part in parts for entry in _of_part(part, sizes)]
    if layout.mesh.num_ranks > 1:
        entries.append((ALL_REDUCE, WORLD, 1, PER_STEP))
    for kind, own_axis, times, size in entries:
        axis = mesh.whole_axis if own_axis == WORLD else own_axis
        if times:
            counts[kind, axis] += times
            moved[kind, axis] += times * size
    return Traffic(dict(counts), dict(moved))


def _of_part(part: Part, sizes: _Sizes) -> Iterator[Entry]:
    yield from _hand_over(part, sizes)
    passes = sizes.layout.num_microbatches
    for name, layer in part.chain.layers.items():
        strategy = part.chain.strategies[name]
        if strategy.tp > 1:
            for kind, times, size in _crossings(layer, strategy, sizes):
                yield kind, TENSOR, passes * times, size
            if (
                SCHEDULES[sizes.layout.schedule].splits
                and part.number
                and strategy.sequence_parallel
            ):
                entries = 2 if isinstance(layer, NativeBlock) else 1  # gathered for W as for B
                yield ALL_GATHER, TENSOR, passes * entries, sizes.activations
            yield from _partial_gradients(layer, strategy, sizes)
    yield from _tied_ends(part, sizes)
    for unit, strategy in part.data_parallel.units:
        if strategy.dp > 1:
            assert isinstance(unit, nn.Module)
            yield from _of_zero(part.chain, unit, strategy, sizes)


def _hand_over(part: Part, sizes: _Sizes) -> Iterator[Entry]:
    """Activations to the next chunk and gradients back, where it is on another rank."""
    chunks, passes = sizes.layout.chunks, sizes.layout.num_microbatches
    for other, there, back in ((part.number - 1, RECEIVE, SEND), (part.number + 1, SEND, RECEIVE)):
        if 0 <= other < len(chunks) and chunks[other].stage != chunks[part.number].stage:
            strategy = chunks[min(other, part.number)].spans[-1].strategy
            parts = strategy.tp if strategy.sequence_parallel else 1
            yield there, PIPELINE, passes, sizes.activations // parts
            yield back, PIPELINE, passes, sizes.activations // parts


def _tied_ends(part: Part, sizes: _Sizes) -> Iterator[Entry]:
    """The sum of the gradients of both copies of a matrix, each rank with its opposite one."""
    chunks = sizes.layout.chunks
    if not sizes.tied or len(chunks) == 1 or chunks[0].stage == chunks[-1].stage:
        return
    axis = PIPELINE if sizes.layout.num_stages == 2 else OTHER  # noqa: PLR2004 - all of them
    ends = {"embedding": "tokens", "head": "projection"}
    for name in ends.keys() & part.chain.layers.keys():
        copy = part.chain.layers[name].get_parameter(ends[name])
        count = local_tensor(copy).numel()
        yield ALL_REDUCE, axis, 1, count * sizes.numbers.master.itemsize


def _crossings(
    layer: nn.Module, strategy: Strategy, sizes: _Sizes
) -> Iterator[tuple[str, int, int]]:
    """Of one micro-batch: (kind, times, bytes)."""
    whole, sequence = sizes.activations, strategy.sequence_parallel
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
        tokens = sizes.layout.micro_batch * sizes.training.seq_len
        wide = max(4, sizes.numbers.activations.itemsize)
        yield ALL_REDUCE, 1, tokens * wide
        yield ALL_REDUCE, 1, (LOSS_SUMS - 1) * tokens * wide
    elif isinstance(layer, NativeBlock):
        yield from _block_crossings(layer, sizes, sequence=sequence)


def _block_crossings(
    layer: NativeBlock, sizes: _Sizes, *, sequence: bool
) -> Iterator[tuple[str, int, int]]:
    """Attention and feed-forward each enter and leave. Full recomputation repeats the forward
    crossings but the last; gathered inputs are gathered again backward in any case.
    """
    whole = sizes.activations
    full = layer.recompute.kind is RecomputeKind.FULL
    if sequence:
        yield ALL_GATHER, 6, whole
        yield REDUCE_SCATTER, 5 if full else 4, whole
    else:
        yield ALL_REDUCE, 5 if full else 4, whole
    if layer.spec.attention.qk_norm is QKNorm.FULL:
        tokens = sizes.layout.micro_batch * sizes.training.seq_len
        yield ALL_REDUCE, 6 if full else 4, tokens * max(4, sizes.numbers.activations.itemsize)


def _partial_gradients(layer: nn.Module, strategy: Strategy, sizes: _Sizes) -> Iterator[Entry]:
    """Norms of a part of the sequence, or of a part of the heads: their gradients are summed over
    tp whenever gradients are reduced.
    """
    numbers, passes = sizes.numbers, sizes.layout.num_microbatches
    wrapped = strategy.dp > 1 or numbers.is_mixed
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
                yield ALL_REDUCE, TENSOR, times, count * element.itemsize


def _of_zero(chain: Chain, first: nn.Module, strategy: Strategy, sizes: _Sizes) -> Iterator[Entry]:
    """Reductions and gathers of one unit: a layer, or the two that share a matrix."""
    numbers, passes, over = sizes.numbers, sizes.layout.num_microbatches, shards(strategy)
    is_tied = chain.is_tied and isinstance(first, NativeEmbedding)
    layers = [first, chain.head] if is_tied else [first]
    tensors = {id(p): p for layer in layers for p in layer.parameters()}.values()
    padded = sum(_padded(each, over) for each in tensors)
    weight = padded * numbers.activations.itemsize
    gradient = padded * (numbers.reduce or numbers.master).itemsize
    if over == 1:
        yield ALL_REDUCE, REPLICAS, 1, gradient
        return
    yield REDUCE_SCATTER, SHARDS, passes if strategy.zero >= GRADIENTS_SHARDED else 1, gradient
    yield ALL_GATHER, SHARDS, 2 * passes if strategy.zero == WEIGHTS_SHARDED else 1, weight
    if over < strategy.dp:
        yield ALL_REDUCE, REPLICAS, 1, gradient // over


def _padded(parameter: nn.Parameter, over: int) -> int:
    """Elements of a tp rank's part of a parameter, its first dim padded to whole shards."""
    shape = [*parameter.shape]
    if isinstance(parameter, DTensor):
        names = parameter.device_mesh.mesh_dim_names or ()
        for name, placement in zip(names, parameter.placements, strict=True):
            if name == TENSOR and isinstance(placement, Shard):
                size = parameter.device_mesh.size(names.index(name))
                shape[placement.dim] = -(-shape[placement.dim] // size)
    shape[0] = -(-shape[0] // over) * over
    return math.prod(shape)
