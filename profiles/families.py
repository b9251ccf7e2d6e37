"""The families of Hugging Face models that are understood, each one entry of a table.

An entry says only how a family differs from the plain decoder (RMSNorm before each sublayer,
rotary embedding, gated feed-forward, untied head): what its ``config.json`` calls a field, what
the class behind it assumes when the field is absent, and which parts its blocks have. Class
defaults are those of the transformers library.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Literal

from profiles.layers import Norm, QKNorm

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = [
    "FAMILIES",
    "FIELDS",
    "FOREIGN",
    "FOREIGN_PREFIXES",
    "NESTED",
    "REQUIRED",
    "Family",
    "Field",
]


class _Required:
    """Marks a field without which nothing is known."""


REQUIRED: Final = _Required()


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """One fact of a model: the keys it goes by, its type and bound, and what absence means.

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
    class assumes. ``num_norms`` as in ``Block``. ``position``: how the order of tokens is told.
    ``must``: what a config has to say, key by key, for the entry to be true of it.
    ``expert_offset``: layer i has experts where (i + offset) is a multiple of
    the step.
    """

    keys: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    must: Mapping[tuple[str, ...], object] = field(default_factory=dict)
    defaults: Mapping[str, object] = field(default_factory=dict)
    norm: Norm = Norm.RMS
    gated: bool = True
    qk_norm: QKNorm = QKNorm.NONE
    num_norms: int = 2
    position: Literal["rotary", "learned", "alibi"] = "rotary"
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


_WINDOW: Final = {"window": ("sliding_window",)}
_QWEN_WINDOW: Final = _WINDOW | {
    "use_window": ("use_sliding_window",),
    "window_from": ("max_window_layers",),
}
_QWEN_WINDOW_DEFAULTS: Final = {"window": 4096, "use_window": False, "window_from": 28}
_ATTENTION_BIAS: Final = {"qkv_bias": ("attention_bias",), "output_bias": ("attention_bias",)}
_ALL_BIASES: Final = {"qkv_bias": True, "output_bias": True, "ffn_bias": True}
_QWEN_EXPERTS: Final = {
    "expert_step": ("decoder_sparse_step",),
    "dense_layers": ("mlp_only_layers",),
}
_DEEPSEEK: Final = {
    "qkv_bias": ("attention_bias",),
    "num_shared": ("n_shared_experts",),
    "first_dense": ("first_k_dense_replace",),
    "expert_step": ("moe_layer_freq",),
}

FAMILIES: Final[dict[str, Family]] = {
    "gpt2": Family(
        defaults=_ALL_BIASES | {"ffn_hidden": None, "max_seq_len": 1024, "tied": True},
        norm=Norm.LAYER,
        gated=False,
        position="learned",
        dropout=True,
    ),
    "gpt_neox": Family(
        keys=_ATTENTION_BIAS | {"parallel": ("use_parallel_residual",)},
        defaults=_ALL_BIASES | {"parallel": True},
        norm=Norm.LAYER,
        gated=False,
    ),
    "gptj": Family(
        defaults={"ffn_hidden": None, "ffn_bias": True, "parallel": True},
        norm=Norm.LAYER,
        num_norms=1,
        gated=False,
        head_bias=True,
    ),
    "bloom": Family(
        keys={"max_seq_len": ("seq_length",)},
        defaults=_ALL_BIASES | {"ffn_hidden": None, "tied": True},
        norm=Norm.LAYER,
        gated=False,
        position="alibi",
        embedding_norm=True,
    ),
    "chatglm": Family(
        keys={
            "vocab": ("padded_vocab_size", "vocab_size"),
            "kv_heads": ("multi_query_group_num",),
            "head_dim": ("kv_channels",),
            "max_seq_len": ("seq_length",),
            "qkv_bias": ("add_qkv_bias",),
            "output_bias": ("add_bias_linear",),
            "ffn_bias": ("add_bias_linear",),
        },
    ),
    "mpt": Family(
        keys={"max_seq_len": ("max_seq_len",)},
        must={("attn_config", "alibi"): True, ("no_bias",): True},
        defaults={"ffn_hidden": None, "tied": True},
        norm=Norm.LAYER_NO_BIAS,
        gated=False,
        position="alibi",
    ),
    "phi3": Family(keys=_WINDOW),
    "olmo2": Family(keys=_ATTENTION_BIAS, qk_norm=QKNorm.FULL),
    "llama": Family(keys=_ATTENTION_BIAS | {"ffn_bias": ("mlp_bias",)}),
    "mistral": Family(keys=_WINDOW, defaults={"kv_heads": 8, "window": 4096}),
    "mixtral": Family(
        keys=_WINDOW | {"expert_hidden": ("intermediate_size",)},
        defaults={"kv_heads": 8},
        experts=True,
    ),
    "qwen2": Family(keys=_QWEN_WINDOW, defaults=_QWEN_WINDOW_DEFAULTS | {"qkv_bias": True}),
    "qwen2_moe": Family(
        keys=_QWEN_WINDOW
        | _QWEN_EXPERTS
        | {"qkv_bias": ("qkv_bias",), "shared_hidden": ("shared_expert_intermediate_size",)},
        defaults=_QWEN_WINDOW_DEFAULTS | {"qkv_bias": True, "shared_hidden": 5632},
        experts=True,
        expert_offset=1,
        shared_gate=True,
    ),
    "qwen3": Family(
        keys=_QWEN_WINDOW | _ATTENTION_BIAS,
        defaults=_QWEN_WINDOW_DEFAULTS | {"head_dim": 128},
        qk_norm=QKNorm.PER_HEAD,
    ),
    "qwen3_moe": Family(
        keys=_QWEN_WINDOW | _QWEN_EXPERTS | _ATTENTION_BIAS,
        defaults=_QWEN_WINDOW_DEFAULTS | {"kv_heads": 4},
        qk_norm=QKNorm.PER_HEAD,
        experts=True,
        expert_offset=1,
    ),
    "glm4_moe": Family(
        keys=_DEEPSEEK | {"use_qk_norm": ("use_qk_norm",)},
        defaults={"head_dim": 128, "kv_heads": 8, "use_qk_norm": False, "first_dense": 1}
        | {"num_shared": 1},
        qk_norm=QKNorm.PER_HEAD,
        experts=True,
        correction_bias=True,
    ),
    "deepseek_v2": Family(keys=_DEEPSEEK, latent=True, experts=True),
    "deepseek_v3": Family(
        keys=_DEEPSEEK,
        defaults={"first_dense": 3, "num_shared": 1},
        latent=True,
        experts=True,
        correction_bias=True,
    ),
}

FAMILIES["qwen3_vl_text"] = FAMILIES["qwen3"]
FAMILIES["qwen3_vl_moe_text"] = FAMILIES["qwen3_moe"]
FAMILIES["kimi_k2"] = FAMILIES["deepseek_v3"]

# Models whose language part stands under ``text_config``; their towers are left out.
NESTED: Final = ("qwen3_vl", "qwen3_vl_moe")

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
}
