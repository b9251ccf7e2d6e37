"""A layer under a strategy -> its cost: seconds by cause for each pass, bytes by kind.

This is where operators meet the device and the links. Costs stay split; totals are properties.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from costmodel.blocks import block_operators, block_parts
from costmodel.collectives import collective_seconds
from costmodel.interpolation import Basis
from costmodel.layout import RecomputeKind
from costmodel.operators import Shard, padded_vocab
from costmodel.otherlayers import other_operators
from costmodel.work import AttentionCore, Collective, CollectiveKind, Gemm, Group, Stream
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

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from costmodel.compute import DeviceModel
    from costmodel.layout import Recompute, Strategy
    from costmodel.operators import Operator
    from costmodel.work import Work
    from profiles.layers import Layer
    from profiles.topology import GroupLink
    from profiles.training import TrainingSpec

__all__ = [
    "LayerCost",
    "PassCost",
    "TimedLayer",
    "boundary_bytes",
    "layer_operators",
    "least_seconds",
    "rank_parameters",
    "timed_layer",
]


OPERATORS = "operators"
GEMMS_OF_BOTH_PASSES = 3  # forward, gradients of input and of weights
SHARPNESS = 4  # of the change from launch-bound to device-bound layers
# Part of a collective that running beside a GEMM saves: both want the same multiprocessors and
# memory. Of 0.9 ms a layer that sequence parallelism takes off the backward pass of a 22B model,
# the second gather leaves 0.1 (Korthikanti et al. 2022, table 4), which says less; the layouts of
# Hagemann et al. 2023, where it saves 8 % of a step, say more.
HIDDEN_BESIDE = 2 / 3
# Of the host's time for a kernel, what one more expert of a grouped GEMM takes: its launch comes
# from a loop inside the library (Transformer Engine's grouped linear layer), not from Python.
ONE_MORE_EXPERT = 0.2


@dataclass(frozen=True, slots=True)
class PassCost:
    """Seconds of one pass of one micro-batch, by cause; communication is what is exposed, and
    ``host_s`` what the device waits for the host to launch its kernels.
    """

    compute_s: float = 0.0
    recompute_s: float = 0.0
    tp_s: float = 0.0
    cp_s: float = 0.0
    ep_s: float = 0.0
    zero_s: float = 0.0
    host_s: float = 0.0

    @property
    def device_s(self) -> float:
        """What the device is busy with."""
        return self.compute_s + self.recompute_s + self.tp_s + self.cp_s + self.ep_s + self.zero_s

    @property
    def total_s(self) -> float:
        """All causes together."""
        return self.device_s + self.host_s

    def __add__(self, other: PassCost) -> PassCost:
        return PassCost(
            self.compute_s + other.compute_s,
            self.recompute_s + other.recompute_s,
            self.tp_s + other.tp_s,
            self.cp_s + other.cp_s,
            self.ep_s + other.ep_s,
            self.zero_s + other.zero_s,
            self.host_s + other.host_s,
        )

    def __mul__(self, count: float) -> PassCost:
        return PassCost(
            self.compute_s * count,
            self.recompute_s * count,
            self.tp_s * count,
            self.cp_s * count,
            self.ep_s * count,
            self.zero_s * count,
            self.host_s * count,
        )


NOTHING = PassCost()


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
            backward=self.backward + _as_recompute(again),
            weight_s=self.weight_s,
            saved_bytes=saved_bytes,
            transient_bytes=transient_bytes,
            dense_params=self.dense_params,
            expert_params=self.expert_params,
            update_s=self.update_s,
            basis=self.basis,
        )


class TimedPart(NamedTuple):
    """Operators in a row with the seconds of their passes together, the kernels that they launch
    forward and backward, and the elements of their results that count. ``by_module``, ``saved``
    and ``transient_bytes`` are their share of what ``TimedLayer`` has.
    """

    forward: PassCost
    backward: PassCost
    weight_s: float
    kernels: tuple[float, float]
    by_module: Mapping[str, PassCost]
    saved: Mapping[str | None, int]
    outputs: int
    transient_bytes: int


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
    timer = _Timer(device, links)
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
    launched = [sum(part.kernels[way] for part in parts) for way in (0, 1)]
    dense, expert = rank_parameters(
        layer, strategy, shares_embedding=shares_embedding, pads=not training.fsdp2
    )
    boundary = boundary_bytes(layer, strategy, training, micro_batch)
    outputs = sum(part.outputs for part in parts)
    return TimedLayer(
        forward=timer.launched(_total(part.forward for part in parts), launched[0]),
        backward=timer.launched(_total(part.backward for part in parts), launched[1]),
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
    timer = _Timer(device, links)
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
    timer: _Timer,
    known: dict[object, TimedPart],
    *,
    routed: bool = True,
) -> list[TimedPart]:
    if not isinstance(layer, Block):
        return [timer.part(layer_operators(layer, strategy, training, micro_batch))]
    found = []
    for part in block_parts(layer, _shard(layer, strategy, training, micro_batch)):
        if Group.EP in part.groups and not routed:
            continue
        key = (part.key, *(timer.links[group] for group in part.groups))
        if key not in known:
            known[key] = timer.part(part.build())
        found.append(known[key])
    return found


def _total(costs: Iterable[PassCost]) -> PassCost:
    """The sum of some passes."""
    compute = recompute = tp = cp = ep = zero = host = 0.0
    for each in costs:
        compute += each.compute_s
        recompute += each.recompute_s
        tp += each.tp_s
        cp += each.cp_s
        ep += each.ep_s
        zero += each.zero_s
        host += each.host_s
    return PassCost(compute, recompute, tp, cp, ep, zero, host)


def _as_recompute(cost: PassCost) -> PassCost:
    """Computing a pass again: its arithmetic is recomputation, its communication stays named."""
    return PassCost(0.0, cost.compute_s, cost.tp_s, cost.cp_s, cost.ep_s, 0.0, cost.host_s)


def _output_elements(work: Work) -> int:
    """Elements of what attention makes, and of every second GEMM: half of each GEMM's."""
    if isinstance(work, AttentionCore):
        return work.batch * work.heads * work.query_len * work.value_head_dim
    return work.m * work.n * work.groups // 2 if isinstance(work, Gemm) else 0


def _kernels(works: tuple[Work, ...]) -> float:
    """Launches of the host for some works, those of a grouped GEMM's experts by their part."""
    return sum(map(_launches, works))


def _launches(work: Work) -> float:
    if isinstance(work, Stream):
        return work.kernels
    return 1 + ONE_MORE_EXPERT * (work.groups - 1) if isinstance(work, Gemm) else 1


@dataclass(frozen=True, slots=True)
class _Timer:
    device: DeviceModel
    links: Mapping[Group, GroupLink]

    def part(self, operators: Sequence[Operator]) -> TimedPart:
        """The times of operators in a row."""
        by_module: dict[str, list[PassCost]] = {}
        saved: dict[str | None, int] = {}
        backward, weights = [], []
        forward_kernels = backward_kernels = 0.0
        outputs = 0
        for each in operators:
            by_module.setdefault(each.module, []).append(self.seconds(each.forward, each.module))
            weights.append(self.seconds(each.backward_weight, each.module))
            backward += [self.seconds(each.backward_input, each.module), weights[-1]]
            if each.beside:
                backward.append(self.beside(each.beside, each.backward_input))
            forward_kernels += _kernels(each.forward)
            backward_kernels += _kernels(each.backward_input) + _kernels(each.backward_weight)
            outputs += sum(_output_elements(work) for work in each.forward)
            for tensor in each.saved:
                saved[tensor.dropped_by] = saved.get(tensor.dropped_by, 0) + tensor.bytes
        totals = {module: _total(own) for module, own in by_module.items()}
        return TimedPart(
            forward=_total(totals.values()),
            backward=_total(backward),
            weight_s=sum(each.total_s for each in weights),
            kernels=(forward_kernels, backward_kernels),
            by_module=totals,
            saved=saved,
            outputs=outputs,
            transient_bytes=max((each.transient_bytes for each in operators), default=0),
        )

    def launched(self, cost: PassCost, kernels: float) -> PassCost:
        """A layer's pass with what the device waits for the host.

        The host runs ahead of the device, so the greater of the two counts; near equality each
        waits for the other at times: (device^4 + host^4)^(1/4), at most 19 % above the greater.
        """
        device = cost.device_s
        host = kernels * self.device.efficiencies.kernel_launch_s
        both = (device**SHARPNESS + host**SHARPNESS) ** (1 / SHARPNESS)
        return cost + PassCost(host_s=both - device)

    def beside(self, works: tuple[Work, ...], others: tuple[Work, ...]) -> PassCost:
        """What remains of tensor-parallel collectives that run beside the compute of others."""
        own = self.device.efficiencies
        compute = sum(self.device.seconds(w) for w in others if not isinstance(w, Collective))
        traffic = sum(
            collective_seconds(work.kind, work.bytes, self.links[work.group], own)
            for work in works
            if isinstance(work, Collective)
        )
        return PassCost(tp_s=traffic - HIDDEN_BESIDE * min(compute, traffic))

    def seconds(self, works: tuple[Work, ...], module: str) -> PassCost:
        """Communication hides behind its own operator's compute: T3's
        T = T_compute + T_collective - overlap * min(T_compute, T_collective), and what hides
        slows the compute down by a stated part.
        """
        if not works:
            return NOTHING
        own = self.device.efficiencies
        compute = sum(self.device.seconds(w) for w in works if not isinstance(w, Collective))
        if module == "experts":
            compute *= own.moe_imbalance
        exposed: dict[Group, float] = {Group.TP: 0.0, Group.CP: 0.0, Group.EP: 0.0}
        overlaps = {Group.TP: own.tp_overlap, Group.CP: 0.0, Group.EP: own.ep_overlap}
        for work in works:
            if isinstance(work, Collective):
                if work.kind is CollectiveKind.RING_EXCHANGE:  # attention waits for all other kinds
                    overlaps[Group.CP] = own.cp_overlap
                axis: Group = Group.EP if work.group is Group.EXPERT_TP else work.group
                link = self.links[work.group]
                exposed[axis] += collective_seconds(
                    work.kind, work.bytes, link, own, copies=work.copies
                )
        for axis, overlap in overlaps.items():
            hidden = overlap * min(compute, exposed[axis])
            exposed[axis] -= hidden * (1 - own.overlap_slowdown)
        return PassCost(
            compute_s=compute,
            tp_s=exposed[Group.TP],
            cp_s=exposed[Group.CP],
            ep_s=exposed[Group.EP],
        )


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
