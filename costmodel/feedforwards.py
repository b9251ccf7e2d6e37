"""The operators of feed-forward layers: dense ones, and routed experts.

Module names are those of ``blocks``.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from costmodel.operators import Operator, Saved, Shard, gemm, normalised, stream_operator
from costmodel.work import Collective, CollectiveKind, Group
from profiles.training import Dispatch

if TYPE_CHECKING:
    from costmodel.operators import TensorParallelWork
    from profiles.layers import ExpertFeedForward, FeedForward

__all__ = ["expert_operators", "feed_forward_operators", "routing_operators"]

# Top-k, softmax, masks, counts, sorting, auxiliary loss (Megatron-Core's router).
ROUTING_KERNELS = 12


def feed_forward_operators(
    name: str, layer: FeedForward, hidden: int, shard: Shard, enter: TensorParallelWork
) -> list[Operator]:
    """A dense feed-forward of width ``hidden`` outside. ``enter``: the collectives before it."""
    tokens, element = shard.tokens, shard.element
    inner = -(-layer.ffn_hidden // shard.tp)
    up = inner * (2 if layer.gated else 1)
    kept = [Saved(f"{name} activation input", tokens * up * element, "mlp")]
    if layer.gated and not shard.training.fused_kernels:
        kept.append(Saved(f"{name} gate activation", tokens * inner * element, "mlp"))
    activation = stream_operator(
        f"{name}_activation",
        tokens * inner,
        shard,
        module="mlp",
        reads=2 if layer.gated else 1,
        saved=tuple(kept),
        passes=2 if layer.gated and not shard.training.fused_kernels else 1,
    )
    gradients = tokens * up * element if shard.training.fsdp2 else 0
    return [
        gemm(
            f"{name}_up",
            (tokens, up, hidden),
            module="mlp",
            saved=(normalised(f"{name}_up", hidden, shard),),
            enter=enter,
        ),
        replace(activation, transient_bytes=gradients),
        gemm(
            f"{name}_down",
            (tokens, hidden, inner),
            module="mlp",
            saved=(Saved(f"{name}_down input", tokens * inner * element, "mlp"),),
            leave=shard.leave_tp(hidden),
        ),
    ]


def routing_operators(layer: ExpertFeedForward, hidden: int, shard: Shard) -> list[Operator]:
    """The router, and what it makes of its scores."""
    tokens = shard.sp_tokens
    return [
        gemm(
            "router",
            (tokens, layer.num_experts, hidden),
            block=False,
            saved=(
                normalised("router", hidden, shard),
                Saved("router probabilities", 4 * tokens * layer.num_experts),
            ),
        ),
        stream_operator("routing", tokens * layer.num_experts, shard, passes=ROUTING_KERNELS),
    ]


def expert_operators(layer: ExpertFeedForward, hidden: int, shard: Shard) -> list[Operator]:
    """Dispatch, experts, combine.

    A rank sends top_k copies of its tokens and, on average, receives as many; with expert tensor
    parallelism the group gathers them. Routing weights are applied before the second GEMM.
    """
    strategy, element, tokens = shard.strategy, shard.element, shard.sp_tokens
    routed = tokens * layer.top_k
    received = routed * strategy.expert_tp
    local = -(-layer.num_experts // strategy.ep)
    rows = max(1, received // local)
    inner = -(-layer.expert_hidden // strategy.expert_tp)
    up = inner * (2 if layer.gated else 1)
    to_experts, from_experts = _exchange(routed * hidden * element, layer.top_k, shard)
    kept = Saved("experts activation input", received * up * element)
    sorts = shard.training.dispatch is Dispatch.EACH and strategy.ep > 1 and local > 1
    sort = [stream_operator("sort", received * hidden, shard)] if sorts else []
    return [
        stream_operator("permute", routed * hidden, shard),
        Operator(name="dispatch", forward=to_experts, backward_input=from_experts),
        *sort,
        gemm(
            "experts_up",
            (rows, up, hidden),
            groups=local,
            module="experts",
            saved=(Saved("experts_up input", received * hidden * element),),
        ),
        stream_operator(
            "experts_activation",
            received * inner,
            shard,
            module="moe_act",
            reads=2 if layer.gated else 1,
            saved=(kept,),
        ),
        gemm(
            "experts_down",
            (rows, hidden, inner),
            groups=local,
            module="experts",
            saved=(Saved("experts_down input", received * inner * element, "moe_act"),),
        ),
        *sort,
        Operator(name="combine", forward=from_experts, backward_input=to_experts),
        stream_operator("unpermute", routed * hidden, shard),
    ]


def _exchange(
    size: int, copies: int, shard: Shard
) -> tuple[tuple[Collective, ...], tuple[Collective, ...]]:
    """Collectives to the experts and back for ``size`` bytes of routed tokens on this rank."""
    strategy = shard.strategy
    if shard.training.dispatch is Dispatch.EACH:
        copies = 1
    there: list[Collective] = []
    back: list[Collective] = []
    if strategy.ep > 1:
        exchange = Collective(CollectiveKind.ALL_TO_ALL, Group.EP, size, copies)
        there.append(exchange)
        back.append(exchange)
    if strategy.expert_tp > 1:
        whole = size * strategy.expert_tp
        there.append(Collective(CollectiveKind.ALL_GATHER, Group.EXPERT_TP, whole))
        back.insert(0, Collective(CollectiveKind.REDUCE_SCATTER, Group.EXPERT_TP, whole))
    return tuple(there), tuple(back)
