"""A model as launchers are told it, and back: hidden size, heads, experts of which layers.

Only decoders of blocks between an embedding and a head can be told so. What of a block has no
fact (parallel sublayers, windows that alternate) is named, so that nobody takes the arguments for
the whole model.
"""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING, Any, Final

from profiles.layers import (
    Attention,
    Block,
    Embedding,
    ExpertFeedForward,
    FeedForward,
    Head,
    LatentAttention,
    Norm,
    QKNorm,
)
from profiles.model import LayerRun, ModelSpec

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["facts_of_model", "model_of_facts", "unsaid"]

NORMS: Final = {Norm.RMS: "RMSNorm", Norm.LAYER: "LayerNorm"}


def facts_of_model(model: ModelSpec) -> dict[str, Any]:
    """The facts of a model of blocks; empty for another."""
    blocks = _blocks(model)
    if not blocks:
        return {}
    first = blocks[0]
    attention = first.attention
    facts: dict[str, Any] = {
        "num_layers": len(blocks),
        "hidden": first.hidden,
        "heads": attention.heads,
        "kv_heads": attention.kv_heads,
        "head_dim": attention.head_dim,
        "norm": NORMS.get(first.norm, first.norm.value),
        "qk_norm": attention.qk_norm is not QKNorm.NONE,
        "qkv_bias": attention.qkv_bias,
        "output_bias": attention.output_bias,
        "rope": attention.rope,
        "window": attention.window,
        "max_positions": model.max_seq_len,
        "tied": model.tied,
        "dropout": first.dropout,
        "mtp_layers": model.mtp_layers,
        **_latent(attention),
        **_feed_forward(blocks),
    }
    embedding = model.layers[0]
    if isinstance(embedding, Embedding):
        facts |= {"vocab": embedding.vocab, "positions": embedding.positions}
    return facts


def _blocks(model: ModelSpec) -> list[Block]:
    return [layer for layer in model.layers if isinstance(layer, Block)]


def _latent(attention: Attention) -> dict[str, Any]:
    latent = attention.latent
    if latent is None:
        return {"latent": False}
    return {
        "latent": True,
        "query_rank": latent.query_rank,
        "kv_rank": latent.kv_rank,
        "nope_dim": latent.nope_dim,
        "rope_dim": latent.rope_dim,
        "value_dim": attention.value_head_dim,
    }


def _feed_forward(blocks: list[Block]) -> dict[str, Any]:
    dense = [b.feed_forward for b in blocks if isinstance(b.feed_forward, FeedForward)]
    experts = [b.feed_forward for b in blocks if isinstance(b.feed_forward, ExpertFeedForward)]
    facts: dict[str, Any] = {}
    if dense:
        own = dense[0]
        facts |= {"ffn": own.ffn_hidden, "gated": own.gated, "ffn_bias": own.bias}
    if experts:
        own_experts = experts[0]
        facts |= {
            "ffn": facts.get("ffn", own_experts.expert_hidden),
            "gated": own_experts.gated,
            "ffn_bias": own_experts.bias,
            "num_experts": own_experts.num_experts,
            "top_k": own_experts.top_k,
            "expert_ffn": own_experts.expert_hidden,
            "shared_ffn": own_experts.shared_hidden,
            "expert_layers": tuple(
                int(isinstance(b.feed_forward, ExpertFeedForward)) for b in blocks
            ),
            "correction_bias": own_experts.correction_bias,
            "shared_gate": own_experts.shared_gate,
        }
    return facts


def model_of_facts(facts: Mapping[str, Any], *, name: str) -> ModelSpec:
    """The model that facts describe. ``facts`` has every name that ``facts_of_model`` gives for
    its kind; ``head_dim`` and ``kv_heads`` may be None.
    """
    pattern = facts.get("expert_layers") or (0,) * facts["num_layers"]
    blocks = [_block(facts, experts=bool(own)) for own in pattern]
    norm = _norm(facts["norm"])
    ends = {"vocab": facts["vocab"], "hidden": facts["hidden"]}
    positions = 0 if facts["rope"] else facts.get("positions", 0)
    return ModelSpec(
        name=name,
        family="generic",
        runs=(
            LayerRun(Embedding(**ends, positions=positions, dropout=facts["dropout"]), 1),
            *(LayerRun(block, len(list(equal))) for block, equal in groupby(blocks)),
            LayerRun(Head(**ends, norm=norm, tied=facts["tied"]), 1),
        ),
        max_seq_len=facts.get("max_positions"),
        mtp_layers=facts.get("mtp_layers") or 0,
    )


def _norm(name: str) -> Norm:
    known = {said: norm for norm, said in NORMS.items()}
    return known[name] if name in known else Norm(name)


def _block(facts: Mapping[str, Any], *, experts: bool) -> Block:
    feed_forward: FeedForward | ExpertFeedForward
    if experts:
        feed_forward = ExpertFeedForward(
            num_experts=facts["num_experts"],
            top_k=facts["top_k"],
            expert_hidden=facts.get("expert_ffn") or facts["ffn"],
            shared_hidden=facts.get("shared_ffn") or 0,
            gated=facts["gated"],
            bias=facts["ffn_bias"],
            correction_bias=bool(facts.get("correction_bias")),
            shared_gate=bool(facts.get("shared_gate")),
        )
    else:
        feed_forward = FeedForward(
            ffn_hidden=facts["ffn"], gated=facts["gated"], bias=facts["ffn_bias"]
        )
    return Block(
        hidden=facts["hidden"],
        attention=_attention(facts),
        feed_forward=feed_forward,
        norm=_norm(facts["norm"]),
        dropout=facts["dropout"],
    )


def _attention(facts: Mapping[str, Any]) -> Attention:
    heads = facts["heads"]
    head_dim = facts.get("head_dim") or facts["hidden"] // heads
    latent, value_dim = None, head_dim
    if facts.get("latent"):
        latent = LatentAttention(
            query_rank=facts["query_rank"],
            kv_rank=facts["kv_rank"],
            rope_dim=facts["rope_dim"],
            nope_dim=facts["nope_dim"],
        )
        head_dim, value_dim = latent.rope_dim + latent.nope_dim, facts["value_dim"]
    return Attention(
        heads=heads,
        kv_heads=heads if latent else facts.get("kv_heads") or heads,
        head_dim=head_dim,
        value_head_dim=value_dim,
        qkv_bias=facts["qkv_bias"],
        output_bias=facts["output_bias"],
        qk_norm=QKNorm.PER_HEAD if facts["qk_norm"] else QKNorm.NONE,
        window=facts.get("window"),
        latent=latent,
        rope=facts["rope"],
    )


def unsaid(model: ModelSpec) -> list[str]:
    """What of a model no facts say; empty if they say it whole."""
    facts = facts_of_model(model)
    if not facts or "vocab" not in facts:
        return ["the model is no chain of blocks between an embedding and a head"]
    again = model_of_facts(facts, name=model.name)
    if again.runs == model.runs:
        return []
    found = {
        difference
        for ours, theirs in zip(model.layers, again.layers, strict=False)
        for difference in _differences(ours, theirs)
    }
    return sorted(found) or ["the order of its layers"]


def _differences(ours: object, theirs: object) -> list[str]:
    """The fields in which two layers differ."""
    names = getattr(type(ours), "__dataclass_fields__", {})
    if type(ours) is not type(theirs):
        return [f"a layer of kind {type(ours).__name__.lower()}"]
    found = []
    for name in names:
        mine, other = getattr(ours, name), getattr(theirs, name)
        if mine != other:
            inner = _differences(mine, other) if hasattr(mine, "__dataclass_fields__") else []
            found += inner or [f"{name.replace('_', ' ')} {mine}"]
    return found
