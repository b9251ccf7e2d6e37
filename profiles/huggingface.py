"""Hugging Face ``config.json`` -> ModelSpec, for the families of ``profiles.families``.

Read in three steps, so that every problem is told at once: the fields with their types, then how
they fit together, and only then the layers. What is not understood is refused, never guessed.
"""

from __future__ import annotations

from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from profiles import jsonfile
from profiles.configfields import WINDOWED, Config, has_experts
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
from profiles.sanity import refuse_absurd

if TYPE_CHECKING:
    from collections.abc import Mapping

    from profiles.family import Family
    from profiles.yamlfile import Document, Place

__all__ = ["load_config", "model_from_config"]


def load_config(path: str | Path) -> ModelSpec:
    """The model of a ``config.json`` or of the folder that holds one."""
    file = Path(path)
    if file.is_dir():
        file /= "config.json"
    document = jsonfile.read(file)
    name = file.parent.name if file.name == "config.json" else file.stem
    return model_from_config(document, name=name or "model")


def model_from_config(document: Document, *, name: str, place: Place = ()) -> ModelSpec:
    """The model whose config stands at ``place`` of a document."""
    config = Config(document, place)
    if config.is_nested:
        return model_from_config(document, name=name, place=(*place, "text_config"))
    family = config.family()
    values = config.values(family)
    config.check(family, values)
    document.raise_problems(config.problems)
    runs = [
        LayerRun(block, len(list(equal)))
        for block, equal in groupby(
            _block(family, values, index) for index in range(values["num_layers"])
        )
    ]
    embedding = Embedding(
        vocab=values["vocab"],
        hidden=values["hidden"],
        positions=(
            values["max_seq_len"] + family.spare_positions if family.position == "learned" else 0
        ),
        norm=family.norm if family.embedding_norm else Norm.NONE,
        dropout=family.dropout,
    )
    head = Head(
        vocab=values["vocab"],
        hidden=values["hidden"],
        norm=family.norm,
        tied=values["tied"],
        bias=family.head_bias,
    )
    model = ModelSpec(
        name=name,
        family=config.model_type,
        runs=(LayerRun(embedding, 1), *runs, LayerRun(head, 1)),
        max_seq_len=values["max_seq_len"],
        mtp_layers=values["mtp_layers"],
    )
    refuse_absurd(model, document, place)
    return model


def _block(family: Family, values: Mapping[str, Any], index: int) -> Block:
    """Block ``index`` of the chain."""
    return Block(
        hidden=values["hidden"],
        attention=_attention(family, values, index),
        feed_forward=(
            _experts(family, values)
            if has_experts(family, values, index)
            else FeedForward(
                ffn_hidden=_ffn_hidden(family, values),
                gated=family.gated,
                bias=values["ffn_bias"],
            )
        ),
        norm=family.norm,
        num_norms=family.num_norms,
        parallel=values["parallel"],
        dropout=family.dropout,
    )


def _ffn_hidden(family: Family, values: Mapping[str, Any]) -> int:
    width: int = values["ffn_hidden"] or values["expansion"] * values["hidden"]
    return width // family.ffn_parts


def _attention(family: Family, values: Mapping[str, Any], index: int) -> Attention:
    heads = values["heads"]
    latent = None
    head_dim = values["head_dim"] or values["hidden"] // heads
    value_head_dim = head_dim
    if family.latent:
        latent = LatentAttention(
            query_rank=values["query_rank"],
            kv_rank=values["kv_rank"],
            rope_dim=values["rope_dim"],
            nope_dim=values["nope_dim"],
        )
        head_dim = latent.rope_dim + latent.nope_dim
        value_head_dim = values["value_head_dim"]
    return Attention(
        heads=heads,
        kv_heads=_kv_heads(family, values),
        head_dim=head_dim,
        value_head_dim=value_head_dim,
        qkv_bias=values["qkv_bias"],
        output_bias=values["output_bias"],
        qk_norm=family.qk_norm if values["use_qk_norm"] else QKNorm.NONE,
        window=values["window"] if _has_window(values, index) else None,
        latent=latent,
        rope=family.position == "rotary",
        sinks=family.sinks,
    )


def _kv_heads(family: Family, values: Mapping[str, Any]) -> int:
    if values["multi_query"]:
        return 1
    heads: int = values["heads"]
    return heads if family.latent else values["kv_heads"] or heads


def _experts(family: Family, values: Mapping[str, Any]) -> ExpertFeedForward:
    shared = values["shared_hidden"] + values["num_shared"] * values["expert_hidden"]
    return ExpertFeedForward(
        num_experts=values["num_experts"],
        top_k=values["top_k"],
        expert_hidden=values["expert_hidden"],
        shared_hidden=shared,
        gated=family.gated,
        bias=values["ffn_bias"],
        router_bias=family.router_bias,
        correction_bias=family.correction_bias,
        shared_gate=family.shared_gate and shared > 0,
    )


def _has_window(values: Mapping[str, Any], index: int) -> bool:
    if not values["use_window"]:
        return False
    if values["layer_types"]:
        return values["layer_types"][index] in WINDOWED
    if values["full_every"]:
        return bool((index + 1) % values["full_every"])
    return index >= int(values["window_from"])
