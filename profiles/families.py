"""The families of Hugging Face models that are understood, each one entry of a table.

An entry says only how a family differs from the plain decoder: what its ``config.json`` calls a
field, what the class behind it assumes when the field is absent, and which parts its blocks have.
Class defaults are those of the transformers library.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from profiles.family import Family
from profiles.layers import Norm, QKNorm

__all__ = ["FAMILIES", "NESTED"]

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

_FALCON: Final = {
    "kv_heads": ("num_kv_heads",),
    "ffn_hidden": ("ffn_hidden_size",),
    **dict.fromkeys(("qkv_bias", "output_bias", "ffn_bias"), ("bias",)),
}
_FALCON_DEFAULTS: Final = {"ffn_hidden": None, "tied": True, "parallel": True}
_NEW_FALCON: Final = Family(keys=_FALCON, defaults=_FALCON_DEFAULTS, norm=Norm.LAYER, gated=False)

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
        must={"attn_config.alibi": (True,), "no_bias": (True,)},
        defaults={"ffn_hidden": None, "tied": True},
        norm=Norm.LAYER_NO_BIAS,
        gated=False,
        position="alibi",
    ),
    "phi3": Family(keys=_WINDOW),
    "gemma3_text": Family(
        keys=_WINDOW | _ATTENTION_BIAS | {"full_every": ("sliding_window_pattern",)},
        defaults={"head_dim": 256, "kv_heads": 4, "tied": True, "window": 4096, "full_every": 6}
        | {"vocab": 262_208},
        qk_norm=QKNorm.PER_HEAD,
        num_norms=4,
    ),
    "llama4_text": Family(
        keys=_ATTENTION_BIAS
        | {
            "window": ("attention_chunk_size",),
            "expert_hidden": ("intermediate_size",),
            "shared_hidden": ("intermediate_size",),
            "ffn_hidden": ("intermediate_size_mlp",),
            "expert_step": ("interleave_moe_layer_step",),
        },
        defaults={"window": 8192, "full_every": 4, "head_dim": 128},
        experts=True,
        expert_offset=1,
    ),
    "phi": Family(
        must={"qk_layernorm": (False, None)},
        defaults=_ALL_BIASES | {"parallel": True},
        norm=Norm.LAYER,
        num_norms=1,
        gated=False,
        head_bias=True,
    ),
    "phimoe": Family(
        keys=_WINDOW | _ATTENTION_BIAS | {"expert_hidden": ("intermediate_size",)},
        must={"lm_head_bias": (True,)},
        defaults={"kv_heads": 8},
        norm=Norm.LAYER,
        head_bias=True,
        experts=True,
    ),
    "opt": Family(
        keys={"ffn_hidden": ("ffn_dim",)},
        must={"do_layer_norm_before": (True, None), "enable_bias": (True, None)},
        defaults=_ALL_BIASES | {"max_seq_len": 2048, "tied": True},
        norm=Norm.LAYER,
        gated=False,
        position="learned",
        spare_positions=2,
        dropout=True,
    ),
    "falcon": Family(
        keys=_FALCON | {"kv_heads": (), "multi_query": ("multi_query",)},
        must={"parallel_attn": (True, None), "alibi": (False, None)},
        defaults=_FALCON_DEFAULTS | {"multi_query": True},
        norm=Norm.LAYER,
        gated=False,
        num_norms=1,
        variants={
            ("new_decoder_architecture", True): replace(
                _NEW_FALCON,
                variants={("num_ln_in_parallel_attn", 1): replace(_NEW_FALCON, num_norms=1)},
            )
        },
    ),
    "gpt_bigcode": Family(
        keys={"multi_query": ("multi_query",)},
        defaults=_ALL_BIASES
        | {"ffn_hidden": None, "max_seq_len": 1024, "tied": True, "multi_query": True},
        norm=Norm.LAYER,
        gated=False,
        position="learned",
        dropout=True,
    ),
    "starcoder2": Family(
        keys=_WINDOW | dict.fromkeys(("qkv_bias", "output_bias", "ffn_bias"), ("use_bias",)),
        defaults=_ALL_BIASES | {"kv_heads": 2, "tied": True},
        norm=Norm.LAYER,
        gated=False,
    ),
    "dbrx": Family(
        keys={
            "kv_heads": ("attn_config.kv_n_heads",),
            "num_experts": ("ffn_config.moe_num_experts",),
            "top_k": ("ffn_config.moe_top_k",),
            "expert_hidden": ("ffn_config.ffn_hidden_size",),
            "max_seq_len": ("max_seq_len",),
        },
        norm=Norm.LAYER_NO_BIAS,
        experts=True,
    ),
    "cohere": Family(
        keys=_ATTENTION_BIAS | {"use_qk_norm": ("use_qk_norm",)},
        defaults={"tied": True, "use_qk_norm": False, "parallel": True},
        norm=Norm.LAYER_NO_BIAS,
        num_norms=1,
        qk_norm=QKNorm.FULL,
    ),
    "cohere2": Family(
        keys=_WINDOW | _ATTENTION_BIAS | {"full_every": ("sliding_window_pattern",)},
        defaults={"tied": True, "parallel": True, "window": 4096, "full_every": 4},
        norm=Norm.LAYER_NO_BIAS,
        num_norms=1,
    ),
    "granite": Family(keys=_ATTENTION_BIAS | {"ffn_bias": ("mlp_bias",)}),
    "nemotron": Family(
        keys=_ATTENTION_BIAS | {"ffn_bias": ("mlp_bias",)}, norm=Norm.LAYER, gated=False
    ),
    "internlm2": Family(
        keys={"qkv_bias": ("bias",), "output_bias": ("bias",)},
        defaults={"qkv_bias": True, "output_bias": True},
    ),
    "stablelm": Family(
        keys={"qkv_bias": ("use_qkv_bias",)},
        must={"use_parallel_residual": (False, None), "qk_layernorm": (False, None)},
        norm=Norm.LAYER,
    ),
    "gemma": Family(keys=_ATTENTION_BIAS, defaults={"head_dim": 256, "tied": True}),
    "gemma2": Family(
        keys=_WINDOW | _ATTENTION_BIAS,
        defaults={"head_dim": 256, "kv_heads": 4, "tied": True, "window": 4096, "full_every": 2},
        num_norms=4,
    ),
    "gpt_oss": Family(
        keys=_WINDOW
        | _ATTENTION_BIAS
        | {
            "expert_hidden": ("intermediate_size",),
            "top_k": ("num_experts_per_tok", "experts_per_token"),
        },
        defaults=_ALL_BIASES | {"kv_heads": 8, "head_dim": 64, "window": 128, "full_every": 2},
        sinks=True,
        experts=True,
        router_bias=True,
    ),
    "olmo": Family(keys=_ATTENTION_BIAS, norm=Norm.LAYER_NO_WEIGHT),
    "olmo2": Family(keys=_ATTENTION_BIAS, qk_norm=QKNorm.FULL),
    "olmo3": Family(
        keys=_WINDOW | _ATTENTION_BIAS,
        defaults={"window": 4096, "full_every": 4},
        qk_norm=QKNorm.FULL,
    ),
    "olmoe": Family(
        keys=_ATTENTION_BIAS | {"expert_hidden": ("intermediate_size",)},
        qk_norm=QKNorm.FULL,
        experts=True,
    ),
    "llama": Family(keys=_ATTENTION_BIAS | {"ffn_bias": ("mlp_bias",)}),
    "mistral": Family(keys=_WINDOW, defaults={"kv_heads": 8, "window": 4096}),
    "mixtral": Family(
        keys=_WINDOW | {"expert_hidden": ("intermediate_size",)},
        defaults={"kv_heads": 8},
        experts=True,
    ),
    "qwen": Family(
        keys={
            "head_dim": ("kv_channels",),
            "max_seq_len": ("max_position_embeddings", "seq_length"),
        },
        must={"no_bias": (True, None)},
        defaults={"qkv_bias": True},
        ffn_parts=2,
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
    "glm": Family(
        keys={"qkv_bias": ("attention_bias",)}, defaults={"head_dim": 128, "kv_heads": 2}
    ),
    "glm4": Family(
        keys={"qkv_bias": ("attention_bias",)},
        defaults={"head_dim": 128, "kv_heads": 2},
        num_norms=4,
    ),
    "glm4_moe": Family(
        keys=_DEEPSEEK | {"use_qk_norm": ("use_qk_norm",)},
        defaults={"head_dim": 128, "kv_heads": 8, "use_qk_norm": False, "first_dense": 1}
        | {"num_shared": 1},
        qk_norm=QKNorm.PER_HEAD,
        experts=True,
        correction_bias=True,
    ),
    "minimax_m2": Family(
        keys={
            "expert_hidden": ("intermediate_size",),
            "shared_hidden": ("shared_intermediate_size",),
            "mtp_layers": ("num_mtp_modules",),
            "use_qk_norm": ("use_qk_norm",),
        },
        must={"use_routing_bias": (True, None)},
        defaults={"kv_heads": 8, "head_dim": 128},
        qk_norm=QKNorm.FULL,
        experts=True,
        correction_bias=True,
    ),
    "deepseek": Family(keys=_DEEPSEEK, experts=True),
    "deepseek_v2": Family(keys=_DEEPSEEK, latent=True, experts=True),
    "deepseek_v3": Family(
        keys=_DEEPSEEK,
        defaults={"first_dense": 3, "num_shared": 1},
        latent=True,
        experts=True,
        correction_bias=True,
    ),
}

FAMILIES["qwen2_vl"] = replace(FAMILIES["qwen2"], beside=("vision_config",))
FAMILIES["qwen2_5_vl"] = FAMILIES["qwen2_vl"]
FAMILIES["qwen2_vl_text"] = FAMILIES["qwen2_5_vl_text"] = FAMILIES["qwen2"]
FAMILIES["qwen3_vl_text"] = FAMILIES["qwen3"]
FAMILIES["qwen3_vl_moe_text"] = FAMILIES["qwen3_moe"]
FAMILIES["kimi_k2"] = FAMILIES["deepseek_v3"]

# Models whose language part stands under ``text_config``; their towers are left out.
NESTED: Final = (
    "gemma3",
    "llama4",
    "mistral3",
    "qwen2_vl",
    "qwen2_5_vl",
    "qwen3_vl",
    "qwen3_vl_moe",
)
