"""What ZeRO makes of a layer: state bytes per rank, communication per micro-batch and per step.

Stages 0 and 1 accumulate whole gradients and reduce them once a step (0: all-reduce; 1:
reduce-scatter, then all-gather of the updated weights). Stage 2 keeps gradients sharded, so it
reduce-scatters them in every micro-batch. Stage 3 gathers the weights of each layer for every
pass of every micro-batch, frees them after it, and reduce-scatters gradients like stage 2.
Sharding inside a group smaller than the replicas (HSDP) adds one all-reduce of the shard a step.
The native executor gathers some layers once for both passes (``is_gathered_twice``).
Source: Rajbhandari et al. 2020 (ZeRO), Zhao et al. 2023 (PyTorch FSDP).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from costmodel.collectives import collective_seconds
from costmodel.work import CollectiveKind
from profiles.layers import Block, Embedding, Norm

if TYPE_CHECKING:
    from costmodel.compute import DeviceModel
    from costmodel.layers import LayerCost
    from profiles.layers import Layer
    from profiles.topology import GroupLink
    from profiles.training import TrainingSpec

__all__ = [
    "GRADIENTS_ONLY",
    "Replicas",
    "StateBytes",
    "StateCost",
    "is_gathered_twice",
    "state_bytes",
    "state_cost",
]

GRADIENTS_ONLY, WEIGHTS_TOO = 2, 3
FP32 = 4  # bytes
BYTES_PER_MASTER_PASS = 2  # each state is read and written once


class StateBytes(NamedTuple):
    """Bytes of a layer's states on one rank, and how many parameters the rank updates."""

    owned: int
    parameters: int
    gradients: int
    optimizer: int

    @property
    def total(self) -> int:
        """All states."""
        return self.parameters + self.gradients + self.optimizer


@dataclass(frozen=True, slots=True)
class Replicas:
    """The ranks that hold the same weights: their shard group, and the groups across shards."""

    shard: GroupLink
    across: GroupLink

    @property
    def size(self) -> int:
        """All replicas."""
        return self.shard.size * self.across.size


class StateCost(NamedTuple):
    """States of one layer on one rank, and the seconds that keeping them in step takes.

    ``forward_comm_s`` and ``backward_comm_s`` are per micro-batch, ``reduce_s`` and ``gather_s``
    per step, all before any overlap. ``owned``: parameters that the rank updates. ``working_bytes``
    live while the layer runs (gathered weights, unsharded gradients); ``gradient_working_bytes`` of
    them only once its gradients are there; ``gathered_bytes`` its own gathered weights alone.
    ``left_gradient_bytes``: of FSDP2's gradients, what lives once they are reduced.
    """

    owned: int
    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    working_bytes: int
    gradient_working_bytes: int
    left_gradient_bytes: int
    gathered_bytes: int
    forward_comm_s: float
    backward_comm_s: float
    reduce_s: float
    gather_s: float
    optimizer_s: float

    def unsharded_bytes(self, training: TrainingSpec) -> int:
        """Of FSDP2's parameters, those that stand beside the shard which the optimizer updates."""
        shard = 0 if training.param_bytes < FP32 else self.owned * training.param_bytes
        return self.parameter_bytes - shard

    def holding(self, other: StateCost) -> StateCost:
        """These states with the gradients of others."""
        return self._replace(
            gradient_bytes=other.gradient_bytes,
            working_bytes=other.working_bytes,
            gradient_working_bytes=other.gradient_working_bytes,
        )

    @property
    def resident_bytes(self) -> int:
        """What stays on the rank all the time."""
        return self.parameter_bytes + self.gradient_bytes + self.optimizer_bytes


def is_gathered_twice(layer: Layer) -> bool:
    """Whether the native executor gathers a layer's weights under ZeRO-3 for its backward pass as
    well. The head keeps them: its backward pass follows its forward pass at once. That of an
    embedding reads none but those of a norm.
    """
    if isinstance(layer, Embedding):
        return layer.norm is not Norm.NONE
    return isinstance(layer, Block)


def state_cost(
    cost: LayerCost,
    zero: int,
    training: TrainingSpec,
    *,
    dense: Replicas,
    expert: Replicas,
    device: DeviceModel,
) -> StateCost:
    """States and communication of one layer under a ZeRO stage."""
    own = _part(cost.dense_params, zero, training, dense, device)
    if cost.expert_params:
        routed = _part(cost.expert_params, zero, training, expert, device)
        own = StateCost._make(here + there for here, there in zip(own, routed, strict=True))
    if cost.update_s is not None:
        own = own._replace(optimizer_s=own.owned * cost.update_s)
    return own


def _part(
    params: int, zero: int, training: TrainingSpec, replicas: Replicas, device: DeviceModel
) -> StateCost:
    weight = params * training.param_bytes
    gradient = params * training.grad_dtype.bytes
    shards = replicas.shard.size
    own = device.efficiencies

    def seconds(kind: CollectiveKind, size: int, link: GroupLink) -> float:
        return collective_seconds(kind, size, link, own)

    gather = scatter = 0.0
    if zero:
        gather = seconds(CollectiveKind.ALL_GATHER, weight, replicas.shard)
        scatter = seconds(CollectiveKind.REDUCE_SCATTER, gradient, replicas.shard)
    across = seconds(CollectiveKind.ALL_REDUCE, gradient // shards, replicas.across)
    resident = state_bytes(params, zero, shards, training)
    if zero == 0:
        once = seconds(CollectiveKind.ALL_REDUCE, gradient, replicas.shard) + across
    else:
        once = across + (scatter if zero < GRADIENTS_ONLY else 0.0)
    working = whole = 0
    if zero == WEIGHTS_TOO:
        working = weight * (2 if training.prefetches else 1) + params * training.reduce_copy_bytes
    if zero >= GRADIENTS_ONLY and shards > 1:
        whole = gradient
    weights = resident.parameters
    replicated = zero == 0 and shards * replicas.across.size > 1
    if training.fsdp2 and training.param_bytes >= FP32 and replicated:
        weights += weight  # FSDP2 copies what it replicates
    return StateCost(
        owned=resident.owned,
        parameter_bytes=weights,
        gradient_bytes=resident.gradients,
        optimizer_bytes=resident.optimizer,
        working_bytes=working + whole if shards > 1 else 0,
        gradient_working_bytes=whole,
        left_gradient_bytes=_left(resident.owned, training, sums=shards == 1 or across > 0),
        gathered_bytes=weight if zero == WEIGHTS_TOO and shards > 1 else 0,
        forward_comm_s=gather if zero == WEIGHTS_TOO else 0.0,
        backward_comm_s=(gather if zero == WEIGHTS_TOO else 0.0)
        + (scatter if zero >= GRADIENTS_ONLY else 0.0),
        reduce_s=once,
        gather_s=gather if 1 <= zero < WEIGHTS_TOO else 0.0,
        optimizer_s=device.stream_seconds(resident.owned * optimizer_traffic(training)),
    )


def _left(owned: int, training: TrainingSpec, *, sums: bool) -> int:
    """Bytes of a layer's gradients once FSDP2 has reduced them: those that the optimizer reads are
    of the type of its weights, and what ``sums`` over replicas in another type is there until the
    pass is over.
    """
    summed = training.grad_dtype.bytes if sums and training.grad_dtype.bytes < FP32 else 0
    return owned * (FP32 + summed)


def state_bytes(params: int, zero: int, shards: int, training: TrainingSpec) -> StateBytes:
    """What ``params`` parameters leave on one rank when states are divided over ``shards``."""
    part = -(-params // shards)
    owned = part if zero else params
    weights = (part if zero == WEIGHTS_TOO else params) * training.param_bytes
    if training.fsdp2 and training.param_bytes < FP32:
        weights = 0 if zero == WEIGHTS_TOO and shards > 1 else weights
    elif training.fsdp2 and zero in (1, 2) and shards > 1:
        weights += part * training.param_bytes  # the shard stays beside what is gathered
    gradients = (part if zero >= GRADIENTS_ONLY else params) * training.gradient_bytes
    if training.fsdp2:  # once reduced, they are of the type of the weights that are updated
        gradients = owned * FP32 if zero >= GRADIENTS_ONLY else max(gradients, owned * FP32)
    return StateBytes(
        owned=owned,
        parameters=weights,
        gradients=gradients,
        optimizer=owned * training.optimizer_bytes,
    )


def optimizer_traffic(training: TrainingSpec) -> int:
    """Bytes moved per owned parameter: states read and written, the gradient read twice (norm,
    update), the weight written.
    """
    states = BYTES_PER_MASTER_PASS * training.optimizer_bytes
    return states + 2 * training.grad_dtype.bytes + training.param_bytes
