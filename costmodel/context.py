"""CostContext: a model, a cluster, a training run and a calibration, with memoised look-ups.

The look-ups are pure functions of these four values; the context only remembers answers, so that
a search may ask the same question for every layout that shares it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING

import numpy as np

from costmodel.compute import DeviceModel
from costmodel.fsdpmemory import Moments, is_one_pass, layer_moments
from costmodel.handover import HandOvers
from costmodel.layers import layer_operators, least_seconds, timed_layer
from costmodel.layout import NO_RECOMPUTE, Axis, Mesh, Strategy
from costmodel.measuredlayers import MeasuredLayers, Wrapping
from costmodel.measuredlinks import MeasuredTopology
from costmodel.operatorfit import as_found
from costmodel.passes import PassCost
from costmodel.sharding import (
    GRADIENTS_ONLY,
    Replicas,
    StateCost,
    is_gathered_twice,
    state_cost,
)
from costmodel.work import AttentionCore, Gemm, Group
from profiles.layers import Block, Embedding, ExpertFeedForward
from profiles.topology import GroupLink, Topology
from profiles.units import MIB

if TYPE_CHECKING:
    from costmodel.interpolation import Basis
    from costmodel.layers import LayerCost, TimedLayer
    from costmodel.measuredlinks import LinkTimes
    from costmodel.parttimes import TimedPart
    from profiles.calibration import Calibration, Efficiencies
    from profiles.cluster import ClusterSpec, DeviceSpec
    from profiles.layers import Layer
    from profiles.measured import Profile
    from profiles.model import ModelSpec
    from profiles.training import TrainingSpec

__all__ = ["CostContext", "LayerStep", "Memo"]

LONELY = GroupLink(1, ())


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerStep:
    """All that one layer costs one rank: passes of a micro-batch (ZeRO's exposed traffic
    included; ``weight_s`` of the backward makes weight gradients), bytes held per micro-batch,
    bytes while it runs, ``moments`` of the native executor's passes, and its states.
    """

    forward: PassCost
    backward: PassCost
    weight_s: float
    saved_bytes: int
    transient_bytes: int
    moments: Moments
    states: StateCost
    basis: Basis


class Memo:
    """Times of layers under one calibration, which depend on neither the batch nor the cluster's
    size: contexts that share them time each layer once.
    """

    def __init__(self) -> None:
        """Nothing is known yet."""
        self._known: dict[object, dict[object, TimedLayer]] = {}

    def of(self, device: DeviceSpec, training: TrainingSpec) -> dict[object, TimedLayer]:
        """The times on a device in such training."""
        key = (device.name, replace(training, global_batch=1))
        return self._known.setdefault(key, {})


@lru_cache(maxsize=128)
def _topology(cluster: ClusterSpec) -> Topology:
    """The cluster's topology, which remembers its groups whatever the calibration."""
    return Topology(cluster)


def _has_experts(layer: Layer) -> bool:
    """Whether a layer's cost depends on how experts are divided."""
    return isinstance(layer, Block) and isinstance(layer.feed_forward, ExpertFeedForward)


class CostContext:
    """The four inputs of every estimate."""

    def __init__(
        self,
        model: ModelSpec,
        cluster: ClusterSpec,
        training: TrainingSpec,
        calibration: Calibration,
        *,
        profile: Profile | None = None,
        memo: Memo | None = None,
    ) -> None:
        """Bind the inputs; nothing is computed yet. ``profile``: measured times of layers and
        rates of devices, used where there are any. ``memo`` shares the times of layers with other
        contexts of the same calibration and profile.
        """
        self.model = model
        self.cluster = cluster if profile is None else as_found(cluster, profile)
        self.training = training
        self.calibration = calibration
        self.topology: Topology = _topology(self.cluster)
        self.link_times: LinkTimes | None = None
        if profile is not None and profile.collective_times:
            measured = MeasuredTopology(self.cluster, profile)
            self.topology, self.link_times = measured, measured.times
        device = self.cluster.slowest_device
        self.device = DeviceModel(device, calibration.efficiencies, training.precision)
        self.profile = profile
        self._measured = None if profile is None else MeasuredLayers(profile, self.device, training)
        self._timed = {} if memo is None else memo.of(device, training)
        self._parts: dict[object, TimedPart] = {}
        self._states: dict[object, StateCost] = {}
        self._jitters: dict[int, float] = {}
        self._steps: dict[object, LayerStep] = {}
        self._replicas: dict[object, tuple[Replicas, Replicas]] = {}

    def anew(self) -> CostContext:
        """The same inputs, nothing remembered."""
        return CostContext(
            self.model, self.cluster, self.training, self.calibration, profile=self.profile
        )

    @property
    def own(self) -> Efficiencies:
        """The efficiencies in force."""
        return self.calibration.efficiencies

    @cached_property
    def classes(self) -> tuple[Layer, ...]:
        """Distinct layers of the model in order of first appearance."""
        return tuple(dict.fromkeys(self._in_force(run.layer) for run in self.model.runs))

    @cached_property
    def _stated(self) -> dict[Layer, Layer]:
        """Layers as the model states them, by those in force."""
        return {self._in_force(run.layer): run.layer for run in self.model.runs}

    def _in_force(self, layer: Layer) -> Layer:
        """The layer as it acts on sequences of the training: a window that spans them is none."""
        if not isinstance(layer, Block):
            return layer
        if (layer.attention.window or 0) < (layer.tokens or self.training.seq_len):
            return layer
        return replace(layer, attention=replace(layer.attention, window=None))

    @cached_property
    def chain(self) -> tuple[int, ...]:
        """Class of each layer of the model."""
        number = {layer: c for c, layer in enumerate(self.classes)}
        return tuple(
            number[self._in_force(run.layer)] for run in self.model.runs for _ in range(run.count)
        )

    @cached_property
    def hand_overs(self) -> HandOvers:
        """Times of hand-overs between stages."""
        return HandOvers(
            topology=self.topology,
            link_times=self.link_times,
            own=self.own,
            training=self.training,
            layers=self.classes,
        )

    @cached_property
    def model_flop_per_sequence(self) -> float:
        """FLOP of one sequence's forward and backward pass without recomputation: three times
        the forward's GEMMs and attention, masked scores left out.
        """
        total = 0.0
        for run in self.model.runs:
            for operator in layer_operators(run.layer, Strategy(), self.training, 1):
                for work in operator.forward:
                    if isinstance(work, Gemm):
                        total += run.count * work.flop
                    elif isinstance(work, AttentionCore):
                        total += run.count * work.flop * work.visible / work.key_len
        return 3 * total

    @cached_property
    def peak_flop_per_s(self) -> float:
        """Datasheet peak of one device in the precision of the block GEMMs."""
        return self.device.device.peak_flop_per_s[self.training.precision.gemm]

    def links(self, mesh: Mesh) -> dict[Group, GroupLink]:
        """Links of the groups in which a layer communicates."""
        axis = self.topology.axis
        ranks = mesh.num_ranks
        return {
            Group.TP: axis(mesh.dims(Axis.TP), num_ranks=ranks),
            Group.CP: axis(mesh.dims(Axis.CP), num_ranks=ranks),
            Group.EP: axis(mesh.ep_dims, num_ranks=ranks) if mesh.ep > 1 else LONELY,
            Group.EXPERT_TP: (
                axis(mesh.expert_tp_dims, num_ranks=ranks) if mesh.expert_tp > 1 else LONELY
            ),
        }

    def replicas(self, mesh: Mesh, shard_group: int) -> tuple[Replicas, Replicas]:
        """Replicas of the dense and of the expert weights. Experts are sharded over at most
        their own replicas.
        """
        key = (mesh, shard_group)
        if key not in self._replicas:
            axis, ranks = self.topology.axis, mesh.num_ranks
            dense = Replicas(
                axis(mesh.shard_dims(shard_group), num_ranks=ranks),
                axis(mesh.replica_dims(shard_group), num_ranks=ranks),
            )
            expert = Replicas(axis(mesh.expert_gradient_dims, num_ranks=ranks), LONELY)
            self._replicas[key] = (dense, expert)
        return self._replicas[key]

    def layer(
        self,
        layer: Layer,
        strategy: Strategy,
        micro_batch: int,
        mesh: Mesh,
        *,
        shares_embedding: bool = False,
        share_gather: int = 1,
    ) -> LayerStep:
        """Cost of one layer on one rank of ``mesh``; ``share_gather`` micro-batches have one gather
        of its parameters, and one reduction of its gradients, in common.
        """
        key = (layer, strategy, micro_batch, mesh, shares_embedding, share_gather)
        if key not in self._steps:
            self._steps[key] = self._layer(*key)
        return self._steps[key]

    def _layer(
        self,
        layer: Layer,
        strategy: Strategy,
        micro_batch: int,
        mesh: Mesh,
        shares_embedding: bool,  # noqa: FBT001 - private
        share_gather: int,
    ) -> LayerStep:
        cost = self.compute(layer, strategy, micro_batch, mesh, shares_embedding=shares_embedding)
        states = self.states(cost, mesh, strategy.zero, strategy.shard_group)
        wrapping = self._wrapping(layer, strategy, mesh)
        states = states._replace(optimizer_s=states.optimizer_s + wrapping.step_s)
        own_root = isinstance(layer, Embedding) and not self.training.fsdp2
        if own_root and states.forward_comm_s:
            # the root unit of FSDP, which is not freed between its passes
            whole = states.parameter_bytes + cost.dense_params * self.training.param_bytes
            states = states._replace(parameter_bytes=whole)
        moments = Moments()
        if self.training.fsdp2:
            once = is_one_pass(self, strategy, micro_batch)
            if once and strategy.zero == 1:
                sharded = self.states(cost, mesh, GRADIENTS_ONLY, strategy.shard_group)
                states = states.holding(sharded)
            if not is_gathered_twice(layer):
                again = states.backward_comm_s - states.forward_comm_s
                states = states._replace(backward_comm_s=again)
            moments = layer_moments(self, layer, strategy, micro_batch, cost, states)
        forward = self._with_traffic(cost.forward, states.forward_comm_s / share_gather)
        backward = self._with_traffic(cost.backward, states.backward_comm_s / share_gather)
        return LayerStep(
            forward=forward + PassCost(compute_s=wrapping.forward_s),
            backward=backward + PassCost(compute_s=wrapping.backward_s),
            weight_s=cost.weight_s,
            saved_bytes=cost.saved_bytes,
            transient_bytes=cost.transient_bytes + states.working_bytes,
            moments=moments,
            states=states,
            basis=cost.basis,
        )

    def _wrapping(self, layer: Layer, strategy: Strategy, mesh: Mesh) -> Wrapping:
        """What was measured of the wrapper of data parallelism, where there is one."""
        alone = all(own.size == 1 for own in self.replicas(mesh, strategy.shard_group))
        if self._measured is None or alone:
            return Wrapping()
        return self._measured.wrapping(self._stated.get(layer, layer), strategy.tp, strategy.zero)

    def compute(
        self,
        layer: Layer,
        strategy: Strategy,
        micro_batch: int,
        mesh: Mesh,
        *,
        shares_embedding: bool = False,
    ) -> LayerCost:
        """Cost of one layer before ZeRO: the same for every dp, zero and pipeline."""
        links = self.links(mesh)
        plain = replace(strategy, dp=1, zero=0, shard_group=1, recompute=NO_RECOMPUTE)
        if not _has_experts(layer):
            plain = replace(plain, ep=1, expert_tp=1)
            links = {**links, Group.EP: LONELY, Group.EXPERT_TP: LONELY}
        key = (layer, plain, micro_batch, *links.values(), shares_embedding)
        if key not in self._timed:
            timed = timed_layer(
                layer,
                plain,
                self.training,
                micro_batch,
                device=self.device,
                links=links,
                shares_embedding=shares_embedding,
                known=self._parts,
            )
            if self._measured is not None:
                stated = self._stated.get(layer, layer)
                timed = self._measured.corrected(timed, stated, plain, micro_batch)
            self._timed[key] = timed
        return self._timed[key].cost(strategy.recompute)

    def least_s(self, layer: Block, strategy: Strategy, micro_batch: int, mesh: Mesh) -> float:
        """Seconds of both passes of a block that no division of its experts can beat; zero where
        layers have measured times.
        """
        if self._measured is not None:
            return 0.0
        plain = replace(strategy, dp=1, zero=0, shard_group=1, recompute=NO_RECOMPUTE)
        return least_seconds(
            layer,
            plain,
            self.training,
            micro_batch,
            device=self.device,
            links=self.links(mesh),
            known=self._parts,
        )

    def states(self, cost: LayerCost, mesh: Mesh, zero: int, shard_group: int) -> StateCost:
        """States of a layer under a ZeRO stage and the traffic that keeps them in step."""
        weights = (cost.dense_params, cost.expert_params, cost.update_s)
        key = (*weights, mesh, zero, shard_group)
        if key not in self._states:
            dense, expert = self.replicas(mesh, shard_group)
            self._states[key] = state_cost(
                cost, zero, self.training, dense=dense, expert=expert, device=self.device
            )
        return self._states[key]

    def _with_traffic(self, cost: PassCost, traffic_s: float) -> PassCost:
        """ZeRO's traffic hides behind the layer before it, up to the calibrated part."""
        if not traffic_s:
            return cost
        return cost + PassCost(zero_s=self.exposed(traffic_s, cost.total_s))

    def exposed(self, traffic_s: float, window_s: float) -> float:
        """What remains of data-parallel traffic beside ``window_s`` of compute, the slow-down
        of that compute included.
        """
        return traffic_s - self.hidden_part * min(traffic_s, window_s)

    @property
    def hidden_part(self) -> float:
        """Part of data-parallel traffic beside compute that costs nothing."""
        return self.own.dp_overlap * (1 - self.own.overlap_slowdown)

    def once_s(self, states: StateCost, *, forward_s: float, backward_s: float) -> float:
        """Seconds a step that a layer adds beside its passes: the optimizer, and gradient traffic
        beyond what its own passes can hide.
        """
        traffic = self.exposed(states.reduce_s, backward_s)
        return states.optimizer_s + traffic + self.exposed(states.gather_s, forward_s)

    def jitter(self, num_ranks: int) -> float:
        """Part by which a step grows since it waits for the slowest of many nodes."""
        if num_ranks not in self._jitters:
            nodes = max(1.0, num_ranks / self.cluster.gpus_per_node)
            self._jitters[num_ranks] = self.own.straggler * math.log2(nodes)
        return self._jitters[num_ranks]

    def whole_step_s(self, passes_s: float, num_ranks: int) -> float:
        """A step from the time of its passes: host time once a step, and jitter."""
        return (passes_s + self.own.step_s) * (1 + self.jitter(num_ranks))

    def passes_s(self, step_s: float, num_ranks: int) -> float:
        """The inverse of ``whole_step_s``."""
        return step_s / (1 + self.jitter(num_ranks)) - self.own.step_s

    def stage_pair(self, mesh: Mesh, stage: int, other: int) -> GroupLink:
        """The link of pairs of ranks at the same place of two stages, all pairs active at once."""
        here, there = (np.concatenate(mesh.stage_ranks(each)) for each in (stage, other))
        return self.topology.groups(np.stack([here, there], axis=1))

    def communicator_bytes(self, *meshes: Mesh) -> int:
        """Buffers of the communication library: one set per group that a rank takes part in."""
        groups = {
            (axis, size)
            for mesh in meshes
            for axis, size in (
                ("tp", mesh.tp),
                ("cp", mesh.cp),
                ("dp", mesh.dp),
                ("pp", mesh.pp),
                ("ep", mesh.ep),
                ("expert_tp", mesh.expert_tp),
            )
            if size > 1
        }
        return len(groups) * self.own.communicator_bytes

    def beside_activations(self, resident_bytes: int) -> float:
        """States in the unit of a limit that was divided by 1 + reserve: they stay where they are,
        so only what comes and goes beside them costs the allocator's overhead.
        """
        return resident_bytes / (1 + self.own.reserve)

    def gathered_bytes(self, strategy: Strategy, micro_batch: int) -> int:
        """Whole activations that sequence parallelism gathers: one in use, one on its way."""
        hidden = self.model.hidden
        if not strategy.sequence_parallel or strategy.tp == 1 or hidden is None:
            return 0
        tokens = micro_batch * -(-self.training.seq_len // strategy.cp)
        return 2 * tokens * hidden * self.training.param_bytes

    @property
    def usable_bytes(self) -> int:
        """Memory of the smallest device, less a margin of 64 MiB that no process can have."""
        return self.cluster.least_memory_bytes - 64 * MIB
