"""The operators of a transformer block: norms, attention (plain, grouped, latent, cross), and its
feed-forward (``feedforwards``).

Widths with a ``_local`` in their name are per rank. Saved tensors carry the recompute module that
would free them: ``layernorm`` drops the normalised inputs of the GEMMs, ``core_attn`` what lies
between queries and context, ``mlp`` the inner activations, ``moe_act`` the experts' activation.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from costmodel.feedforwards import (
    expert_operators,
    feed_forward_operators,
    routing_operators,
)
from costmodel.layout import ContextComm
from costmodel.operators import (
    NO_WORK,
    Operator,
    Saved,
    Shard,
    eager_norm_bytes,
    gemm,
    normalised,
    stream_operator,
)
from costmodel.work import AttentionCore, Collective, CollectiveKind, Group, Stream
from profiles.layers import ExpertFeedForward, Norm, QKNorm
from profiles.training import AttentionKernel

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    from costmodel.layout import Strategy
    from costmodel.operators import TensorParallelWork
    from profiles.layers import Attention, Block, CrossAttention, LatentAttention

__all__ = ["Part", "block_operators", "block_parts"]

# What PyTorch's own operators make of one fused kernel, in passes of 16-bit elements through
# memory: RMSNorm (to fp32, square, mean, scale, back, weight: 36 bytes an element forward and 68
# backward, where one kernel would move 4 and 6), rotary embedding (two products, the rotated half,
# their sum). LayerNorm and GELU are one kernel there too.
EAGER_RMS_PASSES = 10
EAGER_ROPE_PASSES = 5
EAGER_SOFTMAX_PASSES = 4
# Sequences times heads of a rank must be a multiple of 4 for Megatron's fused softmax; others take
# its operators one by one: to fp32, scale, a new mask (3), softmax, back (its fused_softmax.py).
FUSED_SOFTMAX_MULTIPLE = 4
UNFUSED_SOFTMAX_PASSES = 7


class Part(NamedTuple):
    """Operators of a block that many strategies share: those of equal ``key`` in one training are
    equal. ``groups`` are the ones in which they communicate.
    """

    key: Hashable
    groups: tuple[Group, ...]
    build: Callable[[], list[Operator]]


def block_operators(block: Block, shard: Shard) -> tuple[Operator, ...]:
    """Operators of a block in forward order.

    A parallel block enters and leaves its tensor-parallel region once: the feed-forward reads
    what attention gathered, and both results are reduced together.
    """
    return tuple(operator for part in block_parts(block, shard) for operator in part.build())


def block_parts(block: Block, shard: Shard) -> list[Part]:
    """The operators of a block in forward order: what comes before the feed-forward, the router,
    the routed experts, and all behind them. Only the experts depend on how they are divided, and on
    nothing but the tokens besides.
    """
    layer, strategy = block.feed_forward, replace(shard.strategy, ep=1, expert_tp=1)
    plain = (block, strategy, shard.micro_batch)
    before = Part(("before", *plain), (Group.TP, Group.CP), lambda: _before(block, shard))
    behind = Part(("behind", *plain), (Group.TP,), lambda: _behind(block, shard))
    if not isinstance(layer, ExpertFeedForward):
        return [before, behind]
    ways = (shard.strategy.ep, shard.strategy.expert_tp)
    tokens = (layer, block.hidden, shard.sp_tokens, shard.kept_tokens)
    router = Part(tokens, (), lambda: routing_operators(layer, block.hidden, shard))
    routed = Part(
        (*tokens, *ways),
        (Group.EP, Group.EXPERT_TP),
        lambda: expert_operators(layer, block.hidden, shard),
    )
    return [before, router, routed, behind]


def _before(block: Block, shard: Shard) -> list[Operator]:
    leave = NO_WORK if block.parallel else shard.leave_tp(block.hidden)
    operators = [*_norm("attention", block, shard), *_attention(block, shard, leave)]
    if not block.parallel:
        operators.append(_residual("attention", block, shard))
    if block.attention.cross is not None:
        operators += [*_norm("cross", block, shard), *_cross(block, block.attention.cross, shard)]
        operators.append(_residual("cross", block, shard))
    if block.num_norms > 1:
        operators += _norm("feed_forward", block, shard)
    return operators


def _behind(block: Block, shard: Shard) -> list[Operator]:
    hidden, layer = block.hidden, block.feed_forward
    operators = []
    if not isinstance(layer, ExpertFeedForward):
        enter = NO_WORK if block.parallel else shard.enter_tp(hidden)
        operators += feed_forward_operators("mlp", layer, hidden, shard, enter)
    elif layer.shared is not None:
        operators += feed_forward_operators(
            "shared", layer.shared, hidden, shard, shard.enter_tp(hidden)
        )
    operators.append(_residual("feed_forward", block, shard))
    if block.num_norms > 2:  # noqa: PLR2004 - norms after both sublayers as well
        operators += [*_norm("after_attention", block, shard), *_norm("after_mlp", block, shard)]
    return operators


def _norm(place: str, block: Block, shard: Shard) -> list[Operator]:
    if block.norm is Norm.NONE:
        return []
    elements = shard.sp_tokens * block.hidden
    saved = [Saved(f"{place}_norm input", elements * shard.element)]
    passes, extra = 1, eager_norm_bytes(block.norm, shard)
    if extra:
        passes = EAGER_RMS_PASSES
        kept = elements * extra
        saved.append(Saved(f"{place}_norm in fp32 and before its weight", kept, "layernorm"))
    return [
        stream_operator(
            f"{place}_norm", elements, shard, module="layernorm", saved=tuple(saved), passes=passes
        )
    ]


def _residual(place: str, block: Block, shard: Shard) -> Operator:
    elements = shard.sp_tokens * block.hidden
    mask = (Saved(f"{place} dropout mask", elements),) if block.dropout else ()
    return stream_operator(f"{place}_residual", elements, shard, reads=2, saved=mask)


def _attention(block: Block, shard: Shard, leave: TensorParallelWork) -> list[Operator]:
    attention, tokens, element = block.attention, shard.tokens, shard.element
    heads_local = -(-attention.heads // shard.tp)
    if attention.latent:
        operators = _latent_projections(block, attention.latent, heads_local, shard)
        kv_heads_local = heads_local
    else:
        kv_heads_local = -(-attention.kv_heads // shard.tp)
        operators = _projections(block, heads_local, kv_heads_local, shard)
    operators += _rotate(attention, heads_local + kv_heads_local, shard)
    operators.append(_core(block, heads_local, kv_heads_local, shard))
    context_local = heads_local * attention.value_head_dim
    operators.append(
        gemm(
            "o_proj",
            (tokens, block.hidden, context_local),
            saved=(Saved("context", tokens * context_local * element),),
            leave=leave,
        )
    )
    return operators


def _projections(
    block: Block, heads_local: int, kv_heads_local: int, shard: Shard
) -> list[Operator]:
    attention, hidden = block.attention, block.hidden
    width = heads_local * attention.head_dim
    width += kv_heads_local * (attention.head_dim + attention.value_head_dim)
    return [
        gemm(
            "qkv_proj",
            (shard.tokens, width, hidden),
            saved=(normalised("qkv_proj", hidden, shard),),
            enter=shard.enter_tp(hidden),
        )
    ]


def _latent_projections(
    block: Block, latent: LatentAttention, heads_local: int, shard: Shard
) -> list[Operator]:
    """Down projections run on each rank's own tokens (their weights are replicated); only the
    narrow latents are gathered for the head-parallel up projections.
    """
    attention, tokens, element = block.attention, shard.tokens, shard.element
    query_width = heads_local * attention.head_dim
    key_value_width = heads_local * (latent.nope_dim + attention.value_head_dim)
    down = latent.kv_rank + latent.rope_dim + (latent.query_rank or 0)
    latents = Saved("latents", shard.sp_tokens * down * element)
    operators = [
        gemm(
            "latent_down",
            (shard.sp_tokens, down, block.hidden),
            saved=(normalised("latent_down", block.hidden, shard),),
        ),
        stream_operator("latent_norm", shard.sp_tokens * down, shard, saved=(latents,)),
    ]
    up_input = Saved("latent_up input", shard.sp_tokens * down * element)
    query_input = block.hidden if latent.query_rank is None else latent.query_rank
    operators.append(
        gemm(
            "q_up",
            (tokens, query_width, query_input),
            saved=(up_input,),
            enter=shard.enter_tp(down if latent.query_rank else block.hidden),
        )
    )
    operators.append(gemm("kv_up", (tokens, key_value_width, latent.kv_rank)))
    return operators


def _rotate(attention: Attention, heads_local: int, shard: Shard) -> list[Operator]:
    elements = shard.tokens * heads_local * attention.head_dim
    operators = []
    if attention.qk_norm is not QKNorm.NONE:
        saved = [Saved("qk_norm input", elements * shard.element)]
        if shard.training.fsdp2:
            extra = eager_norm_bytes(Norm.RMS, shard)
            saved.append(Saved("qk_norm in fp32 and before its weight", elements * extra))
        operators.append(stream_operator("qk_norm", elements, shard, saved=tuple(saved)))
    if attention.rope:
        passes = 1 if shard.training.fused_kernels else EAGER_ROPE_PASSES
        operators.append(stream_operator("rope", elements, shard, passes=passes))
    return operators


def _core(block: Block, heads_local: int, kv_heads_local: int, shard: Shard) -> Operator:
    attention, training = block.attention, shard.training
    seq, element, unfused = shard.seq, shard.element, training.attention.stores_scores
    visible = shard.seq_len if unfused else _visible_keys(attention, shard.seq_len)
    forward = AttentionCore(
        batch=shard.micro_batch,
        heads=heads_local,
        query_len=seq,
        key_len=shard.seq_len,
        head_dim=attention.head_dim,
        value_head_dim=attention.value_head_dim,
        visible=visible,
        kernel=training.attention,
    )
    backward = replace(forward, backward=True)
    key_value = kv_heads_local * (attention.head_dim + attention.value_head_dim)
    kept = heads_local * attention.head_dim + key_value
    saved = [Saved("q, k, v", shard.tokens * kept * element)]
    scores = shard.micro_batch * heads_local * seq * shard.seq_len
    softmax: tuple[Stream, ...] = ()
    softmax_backward: tuple[Stream, ...] = ()
    transient = 0
    if unfused:
        saved += _scores(scores, element, dropout=block.dropout)
        softmax, softmax_backward = _softmax(scores, element, block, shard)
        transient = 2 * scores * element
    else:
        saved.append(Saved("softmax statistics", 4 * shard.tokens * heads_local, "core_attn"))
    if _gathers(shard.strategy):  # those of all ranks, and all gradients; a ring has a few blocks
        transient += 2 * shard.strategy.cp * shard.tokens * key_value * element
    if training.fsdp2 and _gathers(shard.strategy):  # of which o_proj keeps one tensor
        context = shard.tokens * heads_local * attention.value_head_dim * element
        saved.append(Saved("context of either piece", context, "core_attn"))
    there, back = _key_value_exchange(key_value, shard)
    return Operator(
        name="core_attn",
        module="core_attn",
        forward=(forward, *softmax, *there),
        backward_input=(backward, *softmax_backward, *back),
        saved=tuple(saved),
        transient_bytes=transient,
    )


def _cross(block: Block, cross: CrossAttention, shard: Shard) -> list[Operator]:
    """Attention to another tower: its tokens give the keys and values, all of which are seen."""
    attention, hidden, element = block.attention, block.hidden, shard.element
    heads_local = -(-attention.heads // shard.tp)
    kv_heads_local = -(-attention.kv_heads // shard.tp)
    source = Shard(
        strategy=shard.strategy,
        training=shard.training,
        micro_batch=shard.micro_batch,
        own_tokens=cross.source_tokens,
    )
    queries = heads_local * attention.head_dim
    key_value = kv_heads_local * (attention.head_dim + attention.value_head_dim)
    context = heads_local * attention.value_head_dim
    core = AttentionCore(
        batch=shard.micro_batch,
        heads=heads_local,
        query_len=shard.seq,
        key_len=cross.source_tokens,
        head_dim=attention.head_dim,
        value_head_dim=attention.value_head_dim,
        visible=cross.source_tokens,
        kernel=shard.training.attention,
    )
    saved = [Saved("cross q, k, v", (shard.tokens * queries + source.tokens * key_value) * element)]
    scores = shard.micro_batch * heads_local * shard.seq * cross.source_tokens
    softmax: tuple[Stream, ...] = ()
    softmax_backward: tuple[Stream, ...] = ()
    if shard.training.attention.stores_scores:
        saved += _scores(scores, element, dropout=block.dropout)
        softmax, softmax_backward = _softmax(scores, element, block, shard)
    there, back = _key_value_exchange(key_value, source)
    return [
        gemm(
            "cross_q_proj",
            (shard.tokens, queries, hidden),
            saved=(normalised("cross_q_proj", hidden, shard),),
            enter=shard.enter_tp(hidden),
        ),
        gemm(
            "cross_kv_proj",
            (source.tokens, key_value, cross.source_hidden),
            enter=source.enter_tp(cross.source_hidden),
        ),
        Operator(
            name="cross_attn",
            module="core_attn",
            forward=(core, *softmax, *there),
            backward_input=(replace(core, backward=True), *softmax_backward, *back),
            saved=tuple(saved),
        ),
        gemm(
            "cross_o_proj",
            (shard.tokens, hidden, context),
            saved=(Saved("cross context", shard.tokens * context * element),),
            leave=shard.leave_tp(hidden),
        ),
    ]


def _visible_keys(attention: Attention, seq_len: int) -> float:
    """Mean number of keys that a query sees: (s + 1) / 2 if causal, at most the window."""
    if not attention.causal:
        return float(seq_len)
    window = min(attention.window or seq_len, seq_len)
    return window - window * (window - 1) / (2 * seq_len)


def _scores(scores: int, element: int, *, dropout: bool) -> list[Saved]:
    saved = [Saved("softmax output", scores * element, "core_attn")]
    if dropout:
        saved.append(Saved("attention dropout mask", scores, "core_attn"))
        saved.append(Saved("attention dropout output", scores * element, "core_attn"))
    return saved


def _softmax(
    scores: int, element: int, block: Block, shard: Shard
) -> tuple[tuple[Stream, ...], tuple[Stream, ...]]:
    """Scale, mask and softmax (one kernel or several), and dropout."""
    passes = 1
    if shard.training.attention is AttentionKernel.EAGER:
        passes = EAGER_SOFTMAX_PASSES
    elif scores // (shard.seq * shard.seq_len) % FUSED_SOFTMAX_MULTIPLE:
        passes = UNFUSED_SOFTMAX_PASSES
    softmax = Stream(2 * scores * element * passes, passes)
    backward = Stream(3 * scores * element * passes, passes)
    if not block.dropout:
        return (softmax,), (backward,)
    dropout = Stream(scores * (2 * element + 1))
    return (softmax, dropout), (backward, dropout)


def _gathers(strategy: Strategy) -> bool:
    return strategy.cp > 1 and strategy.cp_comm is ContextComm.GATHER


def _key_value_exchange(
    key_value: int, shard: Shard
) -> tuple[tuple[Collective, ...], tuple[Collective, ...]]:
    """Forward and backward under context parallelism. In a ring each rank's keys and values visit
    all others; backward they do again, and their gradients beside them. Gathered, they come in one
    collective, again backward, where one scatters their gradients.
    """
    cp = shard.strategy.cp
    if cp == 1:
        return (), ()
    size = shard.tokens * key_value * shard.element
    if _gathers(shard.strategy):
        gather = Collective(CollectiveKind.ALL_GATHER, Group.CP, size * cp)
        return (gather,), (gather, Collective(CollectiveKind.REDUCE_SCATTER, Group.CP, size * cp))
    ring = Collective(CollectiveKind.RING_EXCHANGE, Group.CP, size)
    return (ring,), (ring, ring)
