"""LayerStep: what one layer costs one rank under ZeRO, from its cost before ZeRO and its states."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from costmodel.fsdpmemory import Moments, is_one_pass, layer_moments
from costmodel.measuredlayers import Wrapping
from costmodel.passes import PassCost
from costmodel.sharding import GRADIENTS_ONLY, is_gathered_twice
from profiles.layers import Embedding

if TYPE_CHECKING:
    from costmodel.context import CostContext
    from costmodel.interpolation import Basis
    from costmodel.layout import Mesh, Strategy
    from costmodel.sharding import StateCost
    from profiles.layers import Layer

__all__ = ["LayerStep", "layer_step"]


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


def layer_step(
    context: CostContext,
    layer: Layer,
    strategy: Strategy,
    micro_batch: int,
    mesh: Mesh,
    shares_embedding: bool,  # noqa: FBT001 - the context's own key
    share_gather: int,
) -> LayerStep:
    """As ``CostContext.layer`` has it, which remembers the answer."""
    cost = context.compute(layer, strategy, micro_batch, mesh, shares_embedding=shares_embedding)
    states = context.states(cost, mesh, strategy.zero, strategy.shard_group)
    wrapping = _wrapping(context, layer, strategy, mesh)
    states = states._replace(optimizer_s=states.optimizer_s + wrapping.step_s)
    own_root = isinstance(layer, Embedding) and not context.training.fsdp2
    if own_root and states.forward_comm_s:
        # the root unit of FSDP, which is not freed between its passes
        whole = states.parameter_bytes + cost.dense_params * context.training.param_bytes
        states = states._replace(parameter_bytes=whole)
    moments = Moments()
    if context.training.fsdp2:
        once = is_one_pass(context, strategy, micro_batch)
        if once and strategy.zero == 1:
            sharded = context.states(cost, mesh, GRADIENTS_ONLY, strategy.shard_group)
            states = states.holding(sharded)
        if not is_gathered_twice(layer):
            again = states.backward_comm_s - states.forward_comm_s
            states = states._replace(backward_comm_s=again)
        moments = layer_moments(context, layer, strategy, micro_batch, cost, states)
    forward = _with_traffic(context, cost.forward, states.forward_comm_s / share_gather)
    backward = _with_traffic(context, cost.backward, states.backward_comm_s / share_gather)
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


def _wrapping(context: CostContext, layer: Layer, strategy: Strategy, mesh: Mesh) -> Wrapping:
    """What was measured of the wrapper of data parallelism, where there is one."""
    alone = all(own.size == 1 for own in context.replicas(mesh, strategy.shard_group))
    if context.measured is None or alone:
        return Wrapping()
    stated = context.stated.get(layer, layer)
    return context.measured.wrapping(stated, strategy.tp, strategy.zero)


def _with_traffic(context: CostContext, cost: PassCost, traffic_s: float) -> PassCost:
    """ZeRO's traffic hides behind the layer before it, up to the calibrated part."""
    if not traffic_s:
        return cost
    return cost + PassCost(zero_s=context.exposed(traffic_s, cost.total_s))
