"""What a family of Hugging Face models is: the fields of its config, and how it differs from the
plain decoder (RMSNorm before each sublayer, rotary embedding, gated feed-forward, untied head).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Literal

from profiles.layers import Norm, QKNorm

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["FIELDS", "FOREIGN", "FOREIGN_PREFIXES", "REQUIRED", "Family", "Field"]


class _Required:
    """Marks a field without which nothing is known."""


REQUIRED: Final = _Required()


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """One fact of a model: the keys it goes by, its type and bound, and what absence means.

    A key with dots is a path: ``attn_config.kv_n_heads`` stands inside ``attn_config``.
    ``null``: what an explicit null means, where that is not what absence means.
    """

    keys: tuple[str, ...] = ()
    kind: Literal["size", "count", "flag", "indices", "names"] = "size"
    maximum: int = 10_000_000
    default: object = REQUIRED
    null: object = REQUIRED
    group: Literal["all", "latent", "experts"] = "all"


FIELDS: Final[dict[str, Field]] = {
    "hidden": Field(keys=("hidden_size", "n_embd", "d_model"), maximum=1_000_000),
    "num_layers": Field(
        keys=("num_hidden_layers", "n_layer", "n_layers", "num_layers"), maximum=10_000
    ),
    "heads": Field(keys=("num_attention_heads", "n_head", "n_heads", "num_heads"), maximum=65_536),
    "kv_heads": Field(
        keys=("num_key_value_heads", "num_kv_heads"), maximum=65_536, default=None, null=None
    ),
    "multi_query": Field(kind="flag", default=False),
    "head_dim": Field(keys=("head_dim",), maximum=65_536, default=None, null=None),
    "ffn_hidden": Field(keys=("intermediate_size", "n_inner", "ffn_hidden_size")),
    "expansion": Field(keys=("expansion_ratio",), maximum=1_000, default=4, null=4),
    "vocab": Field(keys=("vocab_size",), maximum=100_000_000),
    "max_seq_len": Field(
        keys=("max_position_embeddings", "n_positions", "max_sequence_length", "n_ctx"),
        maximum=10**9,
        default=None,
        null=None,
    ),
    "embedding_width": Field(
        keys=("word_embed_proj_dim",), maximum=1_000_000, default=None, null=None
    ),
    "tied": Field(keys=("tie_word_embeddings",), kind="flag", default=False),
    "qkv_bias": Field(kind="flag", default=False),
    "output_bias": Field(kind="flag", default=False),
    "ffn_bias": Field(kind="flag", default=False),
    "use_qk_norm": Field(kind="flag", default=True),
    "parallel": Field(kind="flag", default=False),
    "window": Field(maximum=10**9, default=None, null=None),
    "use_window": Field(kind="flag", default=True),
    "window_from": Field(kind="count", default=0),
    "full_every": Field(maximum=10_000, default=None, null=None),
    "layer_types": Field(keys=("layer_types",), kind="names", default=()),
    "mtp_layers": Field(keys=("num_nextn_predict_layers",), kind="count", maximum=1_000, default=0),
    "query_rank": Field(keys=("q_lora_rank",), default=1536, null=None, group="latent"),
    "kv_rank": Field(keys=("kv_lora_rank",), group="latent"),
    "rope_dim": Field(keys=("qk_rope_head_dim",), group="latent"),
    "nope_dim": Field(keys=("qk_nope_head_dim",), group="latent"),
    "value_head_dim": Field(keys=("v_head_dim",), group="latent"),
    "num_experts": Field(
        keys=("num_experts", "num_local_experts", "n_routed_experts"),
        maximum=100_000,
        group="experts",
    ),
    "top_k": Field(keys=("num_experts_per_tok",), maximum=100_000, group="experts"),
    "expert_hidden": Field(keys=("moe_intermediate_size",), group="experts"),
    "num_shared": Field(kind="count", maximum=10_000, default=0, group="experts"),
    "shared_hidden": Field(kind="count", default=0, group="experts"),
    "first_dense": Field(kind="count", default=0, group="experts"),
    "expert_step": Field(default=1, maximum=10_000, group="experts"),
    "dense_layers": Field(kind="indices", default=(), group="experts"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """How a family differs from the plain decoder.

    ``keys`` and ``defaults`` replace those of ``FIELDS``; ``defaults`` are what the family's
    class assumes. ``num_norms`` as in ``Block``. ``position``: how the order of tokens is told;
    ``spare_positions`` are rows of a table beyond the longest sequence. ``must``: what a config has
    to say, key by key, for the entry to be true of it (None: or leave out); ``variants``: the entry
    that is true instead where a key has a value. ``beside``: keys that are foreign elsewhere and
    here describe a part that is left out. ``ffn_parts``: into how many projections the config's
    feed-forward width is divided. ``expert_offset``: layer i has experts where (i + offset) is a
    multiple of the step.
    """

    keys: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    must: Mapping[str, tuple[object, ...]] = field(default_factory=dict)
    variants: Mapping[tuple[str, object], Family] = field(default_factory=dict)
    beside: tuple[str, ...] = ()
    defaults: Mapping[str, object] = field(default_factory=dict)
    norm: Norm = Norm.RMS
    gated: bool = True
    qk_norm: QKNorm = QKNorm.NONE
    num_norms: int = 2
    position: Literal["rotary", "learned", "alibi"] = "rotary"
    spare_positions: int = 0
    ffn_parts: int = 1
    embedding_norm: bool = False
    head_bias: bool = False
    sinks: bool = False
    router_bias: bool = False
    dropout: bool = False
    latent: bool = False
    experts: bool = False
    expert_offset: int = 0
    correction_bias: bool = False
    shared_gate: bool = False


# Keys of models that look like a decoder and are not; a null, false or empty value is harmless.
FOREIGN: Final[dict[str, str]] = {
    "ssm_cfg": "state-space layers",
    "d_state": "state-space layers",
    "d_conv": "state-space layers",
    "state_size": "state-space layers",
    "conv_kernel": "state-space layers",
    "time_step_rank": "state-space layers",
    "hybrid_override_pattern": "layers of different kinds",
    "layers_block_type": "layers of different kinds",
    "block_types": "layers of different kinds",
    "block_configs": "blocks that differ in shape",
    "attn_layer_period": "layers without attention",
    "attn_layer_indices": "layers without attention",
    "attn_type_list": "linear attention in some layers",
    "layernorm_linear_attention_alpha": "linear attention",
    "full_attention_interval": "linear attention in most layers",
    "is_encoder_decoder": "an encoder and a decoder",
    "num_decoder_layers": "an encoder and a decoder",
    "encoder_layers": "an encoder",
    "add_cross_attention": "cross-attention",
    "pruned_heads": "layers with heads removed",
    "text_config": "a language model inside another",
    "vision_config": "a vision tower",
    "audio_config": "an audio tower",
    "thinker_config": "a language model inside another",
}
FOREIGN_PREFIXES: Final[dict[str, str]] = {
    "mamba_": "state-space layers",
    "ssm_": "state-space layers",
    "rwkv": "recurrent layers",
    "linear_num_": "linear attention",
    "linear_key_": "linear attention",
    "linear_value_": "linear attention",
    "linear_conv_": "linear attention",
    "index_": "sparse attention chosen by an indexer",
    "altup_": "alternating updates of several streams",
    "laurel_": "low-rank side paths",
}
