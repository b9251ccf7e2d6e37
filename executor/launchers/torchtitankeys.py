"""The keys of torchtitan: of 0.3.0, of main at b5bcd76 (2026-08-21), and of its TOML files before.

From ``config/configs.py`` and ``distributed/activation_checkpoint.py``; former names are those of
the TOML files, until 0.2.
"""

from __future__ import annotations

import re
from typing import Final

from executor.launchers.told import Key, Kind

__all__ = ["KEYS", "NO_BEARING", "UNMODELLED"]

SIZE, TEXT, WORDS, SWITCH = Kind.SIZE, Kind.TEXT, Kind.WORDS, Kind.SWITCH


def _key(name: str, fact: str, kind: Kind = Kind.COUNT, usual: object = None, *once: str) -> Key:
    return Key(name=name, fact=fact, kind=kind, usual=usual, once=once)


COMMON: Final = (
    _key("parallelism.data_parallel_replicate_degree", "dp_replicate", Kind.COUNT, 1,
         "training.data_parallel_replicate_degree"),
    _key("parallelism.data_parallel_shard_degree", "dp_shard", SIZE, -1,
         "training.data_parallel_shard_degree", "training.data_parallel_degree"),
    _key("parallelism.fsdp_reshard_after_forward", "reshard", TEXT, "default",
         "training.fsdp_reshard_after_forward"),
    _key("parallelism.tensor_parallel_degree", "tp", Kind.COUNT, 1,
         "training.tensor_parallel_degree"),
    _key("parallelism.enable_sequence_parallel", "sequence_parallel", SWITCH, True),
    _key("parallelism.disable_loss_parallel", "no_loss_parallel", SWITCH, False),
    _key("parallelism.pipeline_parallel_degree", "pp", Kind.COUNT, 1,
         "experimental.pipeline_parallel_degree"),
    _key("parallelism.pipeline_parallel_schedule", "pp_schedule", TEXT, "1F1B",
         "experimental.pipeline_parallel_schedule"),
    _key("parallelism.pipeline_parallel_schedule_csv", "schedule_csv", TEXT, "",
         "experimental.pipeline_parallel_schedule_csv"),
    _key("parallelism.module_fqns_per_model_part", "stage_modules", WORDS),
    _key("parallelism.pipeline_parallel_split_points", "split_points", WORDS, None,
         "experimental.pipeline_parallel_split_points"),
    _key("parallelism.pipeline_parallel_first_stage_less_layers", "first_less", SIZE, 1),
    _key("parallelism.pipeline_parallel_last_stage_less_layers", "last_less", SIZE, 1),
    _key("parallelism.pipeline_parallel_layers_per_stage", "stage_layers"),
    _key("parallelism.context_parallel_degree", "cp", Kind.COUNT, 1,
         "experimental.context_parallel_degree"),
    _key("parallelism.expert_parallel_degree", "ep", Kind.COUNT, 1),
    _key("parallelism.expert_tensor_parallel_degree", "expert_tp"),
    _key("activation_checkpoint", "recompute", TEXT, "selective"),
    _key("activation_checkpoint.mode", "recompute_mode", TEXT),
    _key("activation_checkpoint.selective_ac_option", "recompute_every", TEXT, "op"),
    _key("compile.enable", "compile", SWITCH, False, "training.compile"),
    _key("compile.components", "compiled", WORDS, ("model", "loss")),
    _key("compile.enable_async_tensor_parallel", "async_tp", SWITCH, False,
         "parallelism.enable_async_tensor_parallel", "experimental.enable_async_tensor_parallel"),
    _key("training.disable_cuda_graphs", "no_graphs", SWITCH, False),
    _key("training.enable_cpu_offload", "offload", SWITCH, False),
    _key("training.mixed_precision_param", "param_dtype", TEXT, "bfloat16"),
    _key("training.mixed_precision_reduce", "reduce_dtype", TEXT, "float32"),
    _key("training.dtype", "dtype", TEXT, "float32"),
    Key(name="module", fact="module", kind=TEXT, once=("model.name",), free=True),
    Key(name="config", fact="config", kind=TEXT, once=("model.flavor",), free=True),
)  # fmt: skip
BATCH: Final = {
    "0.3.0": (
        _key("training.local_batch_size", "local_batch", Kind.COUNT, 8, "training.batch_size"),
        _key("training.global_batch_size", "batch", SIZE, -1),
        _key("training.seq_len", "seq_len", Kind.COUNT, 2048),
        _key("parallelism.pipeline_parallel_microbatch_size", "pp_micro_batch", Kind.COUNT, 1),
        _key("parallelism.pipeline_parallel_microbatches", "pp_microbatches", Kind.COUNT, None,
             "experimental.pipeline_parallel_microbatches"),
    ),
    "main": (
        _key("training.num_tokens_per_microbatch_per_dp_rank", "micro_tokens", Kind.COUNT, 16384),
        _key("training.num_tokens_per_train_step", "step_tokens", SIZE, -1),
        _key("training.max_context_length", "seq_len", Kind.COUNT, 2048),
        _key("parallelism.num_pp_microbatches", "num_pp_microbatches", Kind.COUNT, 1),
    ),
}  # fmt: skip
KEYS: Final = {version: (*COMMON, *batch) for version, batch in BATCH.items()}
UNMODELLED: Final = re.compile(
    r"(quantize|float8|mx|model\.(converters|print_after_conversion)|experimental\.(enable_compiled"
    r"|custom)|parallelism\.(enable_fsdp_symm_mem|spmd_backend|context_parallel|expert_parallel_comm"
    r"|enable_compiled_autograd|fsdp_overlap|pipeline_parallel_expert)|fault_tolerance\.enable"
    r"|memory_estimation|training\.(fp8|gc)|activation_checkpoint\.memory_budget|deepep).*"
)
NO_BEARING: Final = re.compile(
    r"(job|profiling|profiler|metrics|optimizer|lr_scheduler|checkpoint|comm|validation|validator"
    r"|dataloader|data|debug|tokenizer|hf_assets_path|dump_folder|loss|override|fault_tolerance"
    r"|encoder|ema|inference|model|experimental|compile|activation_checkpoint|training|override_.*"
    r"|import|custom_.*|comms|override|eval|log_.*)(\..*)?"
)
