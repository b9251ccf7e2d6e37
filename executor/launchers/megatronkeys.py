"""The arguments of Megatron-LM's ``pretrain_gpt.py`` that say something of model or layout.

Names and defaults are those of Megatron-LM d98e8a6 (2026-08-22), ``training/arguments.py`` and the
configurations that it takes arguments from; the ``bridge`` column has the keys of Megatron-Bridge
067f987 (2026-08-22), ``training/config.py``.
"""

from __future__ import annotations

import re
from typing import Final

from executor.launchers.told import Key, Kind

__all__ = ["KEYS", "UNMODELLED"]

COUNT, SIZE, NUMBER = Kind.COUNT, Kind.SIZE, Kind.NUMBER
TEXT, WORDS, SWITCH, OFF = Kind.TEXT, Kind.WORDS, Kind.SWITCH, Kind.OFF


def _key(
    name: str,
    fact: str,
    kind: Kind = COUNT,
    usual: object = None,
    bridge: str = "",
    choices: tuple[str, ...] = (),
    once: tuple[str, ...] = (),
) -> Key:
    return Key(
        name=f"--{name}",
        fact=fact,
        kind=kind,
        usual=usual,
        choices=choices,
        bridge=bridge,
        once=tuple(f"--{each}" for each in once),
    )


PARALLEL: Final = (
    _key("tensor-model-parallel-size", "tp", usual=1, bridge="model.tensor_model_parallel_size"),
    _key(
        "pipeline-model-parallel-size", "pp", usual=1, bridge="model.pipeline_model_parallel_size"
    ),
    _key("context-parallel-size", "cp", usual=1, bridge="model.context_parallel_size"),
    _key("expert-model-parallel-size", "ep", usual=1, bridge="model.expert_model_parallel_size"),
    _key("expert-tensor-parallel-size", "expert_tp", bridge="model.expert_tensor_parallel_size"),
    _key("sequence-parallel", "sequence_parallel", SWITCH, False, "model.sequence_parallel"),
    _key(
        "cp-comm-type",
        "cp_comm",
        WORDS,
        ("p2p",),
        "model.cp_comm_type",
        choices=("p2p", "all_gather", "a2a", "a2a+p2p"),
    ),
    _key("use-tp-pp-dp-mapping", "stages_between", SWITCH, False, "dist.use_tp_pp_dp_mapping"),
    _key(
        "num-virtual-stages-per-pipeline-rank",
        "virtual_stages",
        bridge="model.virtual_pipeline_model_parallel_size",
    ),
    _key("num-layers-per-virtual-pipeline-stage", "virtual_layers"),
    _key(
        "pipeline-model-parallel-layout",
        "stage_layout",
        TEXT,
        bridge="model.pipeline_model_parallel_layout",
    ),
    _key(
        "decoder-first-pipeline-num-layers",
        "first_layers",
        bridge="model.num_layers_in_first_pipeline_stage",
    ),
    _key(
        "decoder-last-pipeline-num-layers",
        "last_layers",
        bridge="model.num_layers_in_last_pipeline_stage",
    ),
    _key(
        "account-for-embedding-in-pipeline-split",
        "count_embedding",
        SWITCH,
        False,
        "model.account_for_embedding_in_pipeline_split",
    ),
    _key(
        "account-for-loss-in-pipeline-split",
        "count_loss",
        SWITCH,
        False,
        "model.account_for_loss_in_pipeline_split",
    ),
    _key(
        "microbatch-group-size-per-virtual-pipeline-stage",
        "group_size",
        bridge="model.microbatch_group_size_per_vp_stage",
    ),
    _key("no-overlap-p2p-communication", "overlap_p2p", OFF, True, "comm_overlap.overlap_p2p_comm"),
    _key("tp-comm-overlap", "overlap_tp", SWITCH, False, "comm_overlap.tp_comm_overlap"),
    _key(
        "overlap-moe-expert-parallel-comm",
        "overlap_ep",
        SWITCH,
        False,
        "comm_overlap.overlap_moe_expert_parallel_comm",
    ),
    _key("delay-wgrad-compute", "delay_wgrad", SWITCH, False, "comm_overlap.delay_wgrad_compute"),
    _key(
        "use-distributed-optimizer",
        "distributed_optimizer",
        SWITCH,
        False,
        "ddp.use_distributed_optimizer",
    ),
    _key(
        "num-distributed-optimizer-instances",
        "optimizer_copies",
        usual=1,
        bridge="ddp.num_distributed_optimizer_instances",
    ),
    _key(
        "use-megatron-fsdp",
        "megatron_fsdp",
        SWITCH,
        False,
        "ddp.use_megatron_fsdp",
        once=("use-custom-fsdp",),
    ),
    _key(
        "data-parallel-sharding-strategy",
        "fsdp_strategy",
        TEXT,
        "optim_grads_params",
        "ddp.data_parallel_sharding_strategy",
        ("no_shard", "optim", "optim_grads", "optim_grads_params"),
    ),
    _key("use-torch-fsdp2", "torch_fsdp2", SWITCH, False, "dist.use_torch_fsdp2"),
    _key("torch-fsdp2-no-reshard-after-forward", "fsdp2_reshards", OFF, True),
    _key("overlap-grad-reduce", "overlap_grads", SWITCH, False, "ddp.overlap_grad_reduce"),
    _key("overlap-param-gather", "overlap_params", SWITCH, False, "ddp.overlap_param_gather"),
    _key(
        "overlap-param-gather-with-optimizer-step",
        "overlap_step",
        SWITCH,
        False,
        "comm_overlap.overlap_param_gather_with_optimizer_step",
    ),
    _key("no-gradient-accumulation-fusion", "fused_grads", OFF, True),
    _key("ckpt-format", "ckpt_format", TEXT, "torch_dist", "checkpoint.ckpt_format"),
    _key(
        "recompute-granularity",
        "recompute_kind",
        TEXT,
        bridge="model.recompute_granularity",
        choices=("full", "selective"),
    ),
    _key("recompute-activations", "recompute_selective", SWITCH, False),
    _key(
        "recompute-method",
        "recompute_method",
        TEXT,
        bridge="model.recompute_method",
        choices=("block", "uniform"),
    ),
    _key("recompute-num-layers", "recompute_layers", bridge="model.recompute_num_layers"),
    _key("recompute-modules", "recompute_modules", WORDS, (), "model.recompute_modules"),
    _key("distribute-saved-activations", "split_saved", SWITCH, False),
    _key("checkpoint-activations", "recompute_all", SWITCH, False),
    _key("zero-stage", "deepspeed_zero", SIZE),
    _key("pp-partition-method", "partition", TEXT),
)

BATCH: Final = (
    _key("micro-batch-size", "micro_batch", bridge="train.micro_batch_size"),
    _key("global-batch-size", "global_batch", bridge="train.global_batch_size"),
    _key("rampup-batch-size", "ramp", WORDS),
    _key("step-batch-size-schedule", "batch_schedule", WORDS),
    _key("seq-length", "seq_len", bridge="dataset.seq_length", once=("encoder-seq-length",)),
    _key("bf16", "bf16", SWITCH, False),
    _key("fp16", "fp16", SWITCH, False),
    _key("fp8-format", "fp8", TEXT, bridge="mixed_precision.fp8", choices=("e4m3", "hybrid")),
    _key("fp8-recipe", "fp8_recipe", TEXT, "delayed", "mixed_precision.fp8_recipe"),
    _key("fp8-hybrid", "fp8_hybrid", SWITCH, False),
    _key("fp8-e4m3", "fp8_e4m3", SWITCH, False),
    _key("fp4-format", "fp4", TEXT, bridge="mixed_precision.fp4", choices=("e2m1",)),
    _key("grad-reduce-in-bf16", "bf16_grads", SWITCH, False),
    _key("accumulate-allreduce-grads-in-fp32", "fp32_grads", SWITCH, False),
    _key("optimizer", "optimizer", TEXT, "adam", "optimizer.optimizer"),
    _key(
        "attention-backend",
        "attention",
        TEXT,
        "auto",
        "model.attention_backend",
        ("flash", "fused", "unfused", "local", "auto"),
    ),
    _key("transformer-impl", "implementation", TEXT, "transformer_engine"),
    _key("use-flash-attn", "flash", SWITCH, False),
)

MODEL: Final = (
    _key("num-layers", "num_layers", bridge="model.num_layers", once=("encoder-num-layers",)),
    _key("hidden-size", "hidden", bridge="model.hidden_size"),
    _key("ffn-hidden-size", "ffn", bridge="model.ffn_hidden_size"),
    _key("num-attention-heads", "heads", bridge="model.num_attention_heads"),
    _key("group-query-attention", "grouped_queries", SWITCH, False),
    _key("num-query-groups", "groups", usual=1, bridge="model.num_query_groups"),
    _key("kv-channels", "head_dim", bridge="model.kv_channels"),
    _key("max-position-embeddings", "max_positions", bridge="model.max_position_embeddings"),
    _key(
        "position-embedding-type",
        "position",
        TEXT,
        "learned_absolute",
        "model.position_embedding_type",
        ("learned_absolute", "rope", "mrope", "yarn", "alibi", "relative", "none"),
    ),
    _key("use-rotary-position-embeddings", "rotary", SWITCH, False),
    _key("normalization", "norm", TEXT, "LayerNorm", "model.normalization"),
    _key("swiglu", "swiglu", SWITCH, False, "model.gated_linear_unit"),
    _key("quick-geglu", "geglu", SWITCH, False),
    _key("disable-bias-linear", "linear_bias", OFF, True, "model.add_bias_linear"),
    _key("add-qkv-bias", "qkv_bias", SWITCH, False, "model.add_qkv_bias"),
    _key("qk-layernorm", "qk_norm", SWITCH, False, "model.qk_layernorm"),
    _key(
        "untie-embeddings-and-output-weights",
        "tied",
        OFF,
        True,
        "model.share_embeddings_and_output_weights",
    ),
    _key("vocab-size", "vocab", bridge="tokenizer.vocab_size"),
    _key(
        "padded-vocab-size", "padded_vocab", bridge="model.vocab_size", once=("pad-vocab-size-to",)
    ),
    _key("tokenizer-type", "tokenizer", TEXT, bridge="tokenizer.tokenizer_type"),
    _key(
        "make-vocab-size-divisible-by",
        "vocab_multiple",
        usual=128,
        bridge="model.make_vocab_size_divisible_by",
    ),
    _key("attention-dropout", "attention_dropout", NUMBER, 0.1, "model.attention_dropout"),
    _key("hidden-dropout", "hidden_dropout", NUMBER, 0.1, "model.hidden_dropout"),
    _key("window-size", "window_pair", WORDS, bridge="model.window_size"),
    _key("num-experts", "num_experts", bridge="model.num_moe_experts"),
    _key("moe-router-topk", "top_k", usual=2, bridge="model.moe_router_topk"),
    _key("moe-ffn-hidden-size", "expert_ffn", bridge="model.moe_ffn_hidden_size"),
    _key(
        "moe-shared-expert-intermediate-size",
        "shared_ffn",
        bridge="model.moe_shared_expert_intermediate_size",
    ),
    _key("moe-shared-expert-gate", "shared_gate", SWITCH, False, "model.moe_shared_expert_gate"),
    _key("moe-layer-freq", "expert_pattern", TEXT, "1", "model.moe_layer_freq"),
    _key("moe-grouped-gemm", "grouped_gemm", SWITCH, False, "model.moe_grouped_gemm"),
    _key(
        "moe-router-enable-expert-bias",
        "correction_bias",
        SWITCH,
        False,
        "model.moe_router_enable_expert_bias",
    ),
    _key("multi-latent-attention", "latent", SWITCH, False, "model.multi_latent_attention"),
    _key("q-lora-rank", "query_rank", bridge="model.q_lora_rank"),
    _key("kv-lora-rank", "kv_rank", usual=32, bridge="model.kv_lora_rank"),
    _key("qk-head-dim", "nope_dim", usual=128, bridge="model.qk_head_dim"),
    _key("qk-pos-emb-head-dim", "rope_dim", usual=64, bridge="model.qk_pos_emb_head_dim"),
    _key("v-head-dim", "value_dim", usual=128, bridge="model.v_head_dim"),
    _key("mtp-num-layers", "mtp_layers", SIZE, bridge="model.mtp_num_layers"),
)

KEYS: Final = (*PARALLEL, *BATCH, *MODEL)

# Arguments that change what a step costs in ways that no estimate knows.
UNMODELLED: Final = re.compile(
    r"--(cpu-offloading.*|optimizer-cpu-offload|optimizer-offload-fraction|.*activation-offload.*"
    r"|offload-modules|moe-expert-capacity-factor|moe-pad-expert-input-to-capacity"
    r"|moe-layer-recompute|moe-token-drop-policy|use-precision-aware-optimizer"
    r"|main-(grads|params)-dtype|exp-avg(-sq)?-dtype|hybrid-.*|mamba-.*|is-hybrid-model"
    r"|window-attn-skip-freq|mtp-.*|experimental-attention-variant|linear-.*|moe-latent-size"
    r"|tensor-parallel-num-weight-shards|expert-tensor-parallel-num-weight-shards"
    r"|hierarchical-context-parallel-sizes|hybrid-context-parallel|outer-dp-sharding-strategy"
    r"|heterogeneous-.*|multi-latent-.*|softmax-type|spec|recompute-modules-.*"
    r"|decoder-pipeline-.*|embed-layernorm|partition-activations|encoder-(tensor|pipeline).*|dsa-.*|freeze-.*)"
)
