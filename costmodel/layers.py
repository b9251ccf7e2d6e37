"""A layer under a strategy -> its cost: seconds by cause for each pass, bytes by kind.

This is where operators meet the device and the links. Costs stay split; totals are properties.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING

from costmodel.blocks import block_operators, block_parts
from costmodel.interpolation import Basis
from costmodel.layout import RecomputeKind
from costmodel.operators import Shard, padded_vocab
from costmodel.otherlayers import other_operators
from costmodel.parttimes import PartTimer
from costmodel.passes import PassCost, total
from costmodel.work import Group
from profiles.layers import (
    Block,
    Conv2d,
    CustomLayer,
    Embedding,
    ExpertFeedForward,
    Head,
    Linear,
    Split,
    Table,
)
from profiles.training import CudaGraphs

if TYPE_CHECKING:
    from collections.abc import Mapping

    from costmodel.compute import DeviceModel
    from costmodel.layout import Recompute, Strategy
    from costmodel.operators import Operator
    from costmodel.parttimes import TimedPart
    from profiles.layers import Layer
    from profiles.topology import GroupLink
    from profiles.training import TrainingSpec

__all__ = [
    "LayerCost",
    "TimedLayer",
    "boundary_bytes",
    "layer_operators",
    "least_seconds",
    "rank_parameters",
    "timed_layer",
]


OPERATORS = "operators"
GEMMS_OF_BOTH_PASSES = 3  # forward, gradients of input and of weights


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCost:
    """One layer on one rank for one micro-batch.

    ``weight_s`` is the part of ``backward`` that makes weight gradients and can be put off.
    ``saved_bytes`` are held from forward to backward, ``transient_bytes`` appear on top while its
    backward runs (recomputed tensors, logits). Parameters are elements on this rank before ZeRO
    divides them; ``expert_params`` are replicated over fewer ranks than ``dense_params``.
    ``update_s``: what an optimizer step takes for one of them, where that was measured.
    """

    forward: PassCost
    backward: PassCost
    weight_s: float
    saved_bytes: int
    transient_bytes: int
    dense_params: int
    expert_params: int
    update_s: float | None = None
    basis: Basis = Basis.FORMULA

    @property
    def total_s(self) -> float:
        """Forward and backward."""
        return self.forward.total_s + self.backward.total_s


@lru_cache(maxsize=8192)
def layer_operators(
    layer: Layer, strategy: Strategy, training: TrainingSpec, micro_batch: int
) -> tuple[Operator, ...]:
    """Operators of one layer in forward order, per rank and micro-batch."""
    if isinstance(layer, Block):
        return block_operators(layer, _shard(layer, strategy, training, micro_batch))
    shard = Shard(strategy=strategy, training=training, micro_batch=micro_batch)
    return other_operators(layer, shard)


def _shard(layer: Block, strategy: Strategy, training: TrainingSpec, micro_batch: int) -> Shard:
    return Shard(
        strategy=strategy, training=training, micro_batch=micro_batch, own_tokens=layer.tokens
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedLayer:
    """A layer's operators with their seconds, before recomputation is chosen.

    ``by_module``: forward pass of each module that selective recomputation may name;
    ``saved_by_module``: bytes that it would free, under None what nothing but full recomputation
    frees. ``held``: measured bytes, saved and transient, by recomputation.
    ``outputs_bytes``: results of attention and of every second GEMM, and of
    the residual where kernels are not fused.
    """

    forward: PassCost
    backward: PassCost
    weight_s: float
    by_module: Mapping[str, PassCost]
    saved_by_module: Mapping[str | None, int]
    outputs_bytes: int
    transient_bytes: int
    boundary_bytes: int
    recomputes: bool
    dense_params: int
    expert_params: int
    update_s: float | None = None
    basis: Basis = Basis.FORMULA
    held: Mapping[str, tuple[int, int]] = field(default_factory=dict)

    def cost(self, recompute: Recompute) -> LayerCost:
        """The layer's cost, without what ZeRO adds (see ``costmodel.sharding``). Layers other
        than blocks are never recomputed.
        """
        saved = sum(self.saved_by_module.values())
        again, kept = PassCost(), saved
        if self.recomputes and recompute.kind is RecomputeKind.FULL:
            again, kept = self.forward, self.boundary_bytes
        elif self.recomputes and recompute.modules == (OPERATORS,):
            cheap = self.by_module.get("core_attn", PassCost()) * -1
            again, kept = (self.forward + cheap) * 0.5, self.boundary_bytes + self.outputs_bytes
        elif self.recomputes:
            for module in recompute.modules:
                again = again + self.by_module.get(module, PassCost())
                kept -= self.saved_by_module.get(module, 0)
        saved_bytes, transient_bytes = self.held.get(
            str(recompute), (kept, saved - kept + self.transient_bytes)
        )
        return LayerCost(
            forward=self.forward,
            backward=self.backward + again.again,
            weight_s=self.weight_s,
            saved_bytes=saved_bytes,
            transient_bytes=transient_bytes,
            dense_params=self.dense_params,
            expert_params=self.expert_params,
            update_s=self.update_s,
            basis=self.basis,
        )


def timed_layer(
    layer: Layer,
    strategy: Strategy,
    training: TrainingSpec,
    micro_batch: int,
    *,
    device: DeviceModel,
    links: Mapping[Group, GroupLink],
    shares_embedding: bool = False,
    known: dict[object, TimedPart] | None = None,
) -> TimedLayer:
    """Time the operators of one layer under a strategy, whatever its recomputation. ``known``:
    parts of blocks timed before, in the same training on the same device.
    """
    timer = PartTimer(device, links)
    parts = _timed_parts(
        layer, strategy, training, micro_batch, timer, {} if known is None else known
    )
    by_module: dict[str, PassCost] = {}
    saved: dict[str | None, int] = {}
    for part in parts:
        for module, forward in part.by_module.items():
            by_module[module] = by_module.get(module, PassCost()) + forward
        for dropped_by, size in part.saved.items():
            saved[dropped_by] = saved.get(dropped_by, 0) + size
    launched = _launches(parts, training.graphs)
    passes = (total(part.forward for part in parts), total(part.backward for part in parts))
    forward, backward = (
        timer.launched(timer.beside_experts(cost, overlaps=training.overlaps_experts), kernels)
        for cost, kernels in zip(passes, launched, strict=True)
    )
    dense, expert = rank_parameters(
        layer, strategy, shares_embedding=shares_embedding, pads=not training.fsdp2
    )
    boundary = boundary_bytes(layer, strategy, training, micro_batch)
    outputs = sum(part.outputs for part in parts)
    return TimedLayer(
        forward=forward,
        backward=backward,
        weight_s=sum(part.weight_s for part in parts),
        by_module=by_module,
        saved_by_module=saved,
        outputs_bytes=outputs * training.param_bytes + (0 if training.fused_kernels else boundary),
        transient_bytes=max(part.transient_bytes for part in parts),
        boundary_bytes=boundary,
        recomputes=isinstance(layer, Block),
        dense_params=dense,
        expert_params=expert,
    )


def least_seconds(
    layer: Block,
    strategy: Strategy,
    training: TrainingSpec,
    micro_batch: int,
    *,
    device: DeviceModel,
    links: Mapping[Group, GroupLink],
    known: dict[object, TimedPart],
) -> float:
    """Seconds of both passes of a block that no division of its experts can beat: what is outside
    of the routed ones, and their GEMMs at the highest rate without a word to other ranks.

    On a rank the rows of its experts are rounded down, by less than one for each expert.
    """
    timer = PartTimer(device, links)
    parts = _timed_parts(layer, strategy, training, micro_batch, timer, known, routed=False)
    seconds = sum(part.forward.device_s + part.backward.device_s for part in parts)
    experts = layer.feed_forward
    if isinstance(experts, ExpertFeedForward):
        tokens = _shard(layer, strategy, training, micro_batch).sp_tokens
        rows = max(0, tokens * experts.top_k - experts.num_experts)
        widths = experts.expert_hidden * (3 if experts.gated else 2)
        flop = 2 * rows * layer.hidden * widths * GEMMS_OF_BOTH_PASSES
        seconds += device.efficiencies.moe_imbalance * flop / device.highest_gemm_rate
    return seconds


def _timed_parts(
    layer: Layer,
    strategy: Strategy,
    training: TrainingSpec,
    micro_batch: int,
    timer: PartTimer,
    known: dict[object, TimedPart],
    *,
    routed: bool = True,
) -> list[TimedPart]:
    if not isinstance(layer, Block):
        return [timer.part(layer_operators(layer, strategy, training, micro_batch))]
    found = []
    for part in block_parts(layer, _shard(layer, strategy, training, micro_batch)):
        has_experts = Group.EP in part.groups
        if has_experts and not routed:
            continue
        key = (part.key, *(timer.links[group] for group in part.groups))
        if key not in known:
            known[key] = timer.part(part.build())._replace(routed=has_experts)
        found.append(known[key])
    return found


def _launches(parts: list[TimedPart], graphs: CudaGraphs) -> tuple[float, float]:
    """What the host launches for a layer in either pass, a graph counting as one kernel."""
    if graphs is CudaGraphs.STEP:
        return 0.0, 0.0
    if graphs is CudaGraphs.LAYERS:
        return 1.0, 1.0
    captured = graphs is CudaGraphs.OUTSIDE_EXPERTS
    forward, backward = (
        sum(1.0 if captured and not part.routed else part.kernels[way] for part in parts)
        for way in (0, 1)
    )
    return forward, backward


def boundary_bytes(
    layer: Layer, strategy: Strategy, training: TrainingSpec, micro_batch: int
) -> int:
    """Bytes of a layer's output on one rank: what the next stage receives."""
    if isinstance(layer, CustomLayer):
        return layer.output_bytes * micro_batch
    if isinstance(layer, Block):
        shard = _shard(layer, strategy, training, micro_batch)
        return shard.sp_tokens * layer.hidden * training.param_bytes
    if isinstance(layer, Embedding | Head):
        shard = Shard(strategy=strategy, training=training, micro_batch=micro_batch)
        return shard.sp_tokens * layer.hidden * training.param_bytes
    return _generic_output(layer, training, micro_batch)


def _generic_output(layer: Layer, training: TrainingSpec, micro_batch: int) -> int:
    if isinstance(layer, Linear):
        elements = (layer.tokens or training.seq_len) * layer.out_features
    elif isinstance(layer, Conv2d):
        elements = layer.output_pixels * layer.out_channels
    else:
        assert isinstance(layer, Table)
        elements = layer.lookups * layer.dim
    return micro_batch * elements * training.param_bytes


def rank_parameters(
    layer: Layer, strategy: Strategy, *, shares_embedding: bool = False, pads: bool = True
) -> tuple[int, int]:
    """(dense, expert) parameter elements that tensor and expert parallelism leave to one rank.

    ``shares_embedding``: the head stands on the embedding's stage, so a tied matrix is there once.
    ``pads``: vocabularies that tp splits are padded.
    """
    dense = expert = 0
    tp = strategy.tp
    for parameter in layer.parameters():
        if shares_embedding and isinstance(layer, Head) and parameter.name == "projection":
            continue
        match parameter.split:
            case Split.EXPERT:
                local = -(-parameter.shape[0] // strategy.ep)
                expert += parameter.count // parameter.shape[0] * local // strategy.expert_tp
            case Split.VOCAB:
                rows = parameter.shape[0]
                if tp > 1:
                    rows = padded_vocab(rows, tp) if pads else -(-rows // tp) * tp
                dense += parameter.count // parameter.shape[0] * rows // tp
            case Split.COLUMN | Split.ROW:
                dense += -(-parameter.count // tp)
            case Split.KV:
                heads = layer.attention.kv_heads if isinstance(layer, Block) else tp
                dense += parameter.count // heads * -(-heads // tp)
            case Split.REPLICATED:
                dense += parameter.count
    return dense, expert
