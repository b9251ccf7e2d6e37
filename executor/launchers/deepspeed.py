"""DeepSpeed: the JSON configuration, and the pipeline that its engine runs.

Keys are those of DeepSpeed 0.19.8, ``runtime/config.py`` and ``runtime/zero/config.py``. The model
is the training script's: what the JSON cannot say of layers stands in a file beside it.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any, Final

from costmodel.layout import NO_RECOMPUTE
from executor.launchers.job import FULL, Heard
from executor.launchers.launchlines import launch_script, placeholder, slurm_script
from executor.launchers.mappings import nested, read_document, read_mapping
from executor.launchers.told import Key, Kind
from profiles.training import GradDtype, Precision

if TYPE_CHECKING:
    from executor.launchers.commandline import Source
    from executor.launchers.job import Job
    from executor.launchers.told import Told

__all__ = ["KEYS", "hear", "say", "tell", "write"]

SIZE, TEXT, SWITCH = Kind.SIZE, Kind.TEXT, Kind.SWITCH
BUCKET: Final = 500_000_000  # elements, DeepSpeed's own usual size


def _key(name: str, fact: str, kind: Kind = Kind.COUNT, usual: object = None) -> Key:
    return Key(name=name, fact=fact, kind=kind, usual=usual)


KEYS: Final = (
    _key("train_batch_size", "global_batch"),
    _key("train_micro_batch_size_per_gpu", "micro_batch"),
    _key("gradient_accumulation_steps", "accumulation"),
    _key("zero_optimization.stage", "zero", SIZE, 0),
    _key("zero_optimization.overlap_comm", "overlap", SWITCH),
    _key("zero_optimization.contiguous_gradients", "contiguous", SWITCH, usual=True),
    _key("zero_optimization.reduce_bucket_size", "reduce_bucket", Kind.NUMBER, BUCKET),
    _key("zero_optimization.allgather_bucket_size", "gather_bucket", Kind.NUMBER, BUCKET),
    _key("zero_optimization.zero_hpz_partition_size", "hpz", Kind.COUNT, 1),
    _key("zero_optimization.mics_shard_size", "mics", SIZE),
    _key("zero_optimization.offload_optimizer.device", "offload_optimizer", TEXT, "none"),
    _key("zero_optimization.offload_param.device", "offload_param", TEXT, "none"),
    _key("bf16.enabled", "bf16", SWITCH, usual=False),
    _key("fp16.enabled", "fp16", SWITCH, usual=False),
    _key("data_types.grad_accum_dtype", "grad_dtype", TEXT),
    _key("tensor_parallel.autotp_size", "tp", SIZE, 0),
    _key("expert_parallel.enabled", "autoep", SWITCH, usual=False),
    _key("expert_parallel.autoep_size", "ep", Kind.COUNT, 1),
    _key("expert_parallel.expert_tensor_parallel_size", "expert_tp", Kind.COUNT, 1),
    _key("sequence_parallel_size", "ulysses", Kind.COUNT, 1),
    _key("pipeline.stages", "pp", SIZE, 1),
    _key("pipeline.partition", "partition", TEXT, "best"),
    _key("pipeline.activation_checkpoint_interval", "interval", SIZE, 0),
    _key("activation_checkpointing", "checkpointing", TEXT),
    _key("optimizer.type", "optimizer", TEXT, "AdamW"),
)
UNMODELLED: Final = re.compile(
    r"(zero_optimization\.(offload_.*|zero_quantized_.*|zenflow.*|sub_group_size|cpu_offload.*)"
    r"|compression_training.*|sparse_attention.*|aio.*|hybrid_engine.*|compile.*|torch_autocast.*"
    r"|data_efficiency.*|curriculum_learning.*|progressive_layer_drop.*|eigenvalue.*"
    r"|prescale_gradients|tensor_parallel\.tp.*|communication_data_type|quantize_training.*)"
)
NO_BEARING: Final = re.compile(
    r"(optimizer\.params.*|scheduler.*|steps_per_print|wall_clock_breakdown|gradient_clipping"
    r"|(fp16|bf16|amp)\..*|fp16_.*|zero_optimization\..*|dump_state|tensorboard.*|wandb.*|csv_monitor.*"
    r"|comet.*|flops_profiler.*|comms_logger.*|memory_breakdown|checkpoint\..*|load_universal.*"
    r"|use_node_local_storage|zero_allow_untested_optimizer|zero_force_.*|seed|dataloader_drop_last"
    r"|gradient_predivide_factor|sparse_gradients|disable_allgather|elasticity.*|autotuning.*"
    r"|nebula.*|data_types\..*|pipeline\..*|expert_parallel\..*|tensor_parallel\..*|amp|fp16|bf16"
    r"|scheduler|optimizer|zero_optimization|graph_harvesting|use_data_before_expert.*|comment"
    r"|no_pipeline_parallel|timers.*|monitor_config.*|train_steps|\$schema)"
)


def say(job: Job) -> dict[str, Any]:
    """The facts of a job by the names of the table."""
    s, training = job.setup, job.inputs.training
    zero, full = s.one_zero, FULL in job.blocks
    facts: dict[str, Any] = {
        "global_batch": training.global_batch,
        "micro_batch": s.micro_batch,
        "accumulation": s.num_microbatches,
        "zero": zero,
        "bf16": training.precision.other == "bf16",
        "fp16": training.precision.other == "fp16",
        "grad_dtype": training.grad_dtype.value,
    }
    if zero:
        facts |= {
            "overlap": True,
            "contiguous": True,
            "reduce_bucket": BUCKET,
            "gather_bucket": BUCKET,
        }
    if s.tp > 1:
        facts["tp"] = s.tp
    if s.ep > 1:
        facts |= {"autoep": True, "ep": s.ep}
    if s.pp > 1:
        facts |= {"pp": s.pp, "partition": PARTITION, "interval": int(full)}
    elif full:
        facts["checkpointing"] = {"partition_activations": False, "cpu_checkpointing": False}
    return facts


PARTITION: Final = "type:block"


def hear(told: Told) -> Heard:
    """What a configuration says."""
    pp, tp = max(1, told.pp), max(1, told.tp)
    dp = max(1, told.num_gpus // (pp * tp))
    micro, batch = _hear_batch(told, dp)
    full = bool(told.interval) if pp > 1 else told.checkpointing is not None
    if full and pp == 1:
        told.notes.append("activation_checkpointing is taken as full recomputation of every block")
    for fact in ("offload_optimizer", "offload_param"):
        if getattr(told, fact) not in ("none", None):
            told.unmodelled.append(f"{told.spelt(fact)}: {getattr(told, fact)}")
    if told.ulysses > 1:
        told.unmodelled.append(f"{told.spelt('ulysses')}: {told.ulysses} (Ulysses)")
    if told.hpz > 1:
        told.unmodelled.append(f"{told.spelt('hpz')}: {told.hpz}")
    precision = Precision.BF16 if told.bf16 else Precision.FP16 if told.fp16 else Precision.FP32
    grads = told.grad_dtype or ("fp32" if precision is not Precision.FP16 else "fp16")
    return Heard(
        tp=tp,
        pp=pp,
        dp=dp,
        ep=told.ep if told.autoep or told.ep == 1 else 1,
        expert_tp=told.expert_tp,
        micro_batch=micro,
        zero=told.zero,
        recompute=FULL if full else NO_RECOMPUTE,
        training={
            "global_batch": batch,
            "precision": precision.value,
            "grad_dtype": GradDtype(grads).value if grads in list(GradDtype) else "fp32",
            "optimizer": "sgd" if str(told.optimizer).lower() == "sgd" else "adamw",
        },
    )


def _hear_batch(told: Told, dp: int) -> tuple[int | None, int | None]:
    """(micro-batch, global batch), each from the others as DeepSpeed does."""
    batch, micro, steps = told.global_batch, told.micro_batch, told.accumulation
    if micro is None and batch is not None:
        micro = max(1, batch // dp // (steps or 1))
    if batch is None and micro is not None:
        batch = micro * (steps or 1) * dp
    return micro, batch


def write(job: Job, *, version: str) -> dict[str, str]:
    """The files of a job."""
    facts = say(job)
    config = nested(KEYS, facts)
    files = {"deepspeed.json": json.dumps(config, indent=2) + "\n"}
    notes = [f"DeepSpeed {version}. TRAIN is your training script; it builds the model."]
    if job.setup.pp > 1:
        notes.append("Its model is the PipelineModule that pipeline.py makes of your layers.")
        files["pipeline.py"] = _PIPELINE.format(
            stages=job.setup.pp,
            blocks=job.setup.blocks[0],
            interval=int(FULL in job.blocks),
            partition=PARTITION,
        )
    elif FULL in job.blocks:
        notes.append("Every block recomputes: deepspeed.checkpointing.checkpoint in your model.")
    if job.model.has_experts and job.setup.ep > 1:
        notes.append("expert_parallel needs a model that AutoEP has a preset for.")
    script = launch_script(
        job,
        [
            placeholder("TRAIN", "your training script"),
            "--deepspeed --deepspeed_config deepspeed.json",
        ],
        environment={},
        notes=notes,
    )
    return {**files, "launch.sh": script, "job.sbatch": slurm_script(job)}


_PIPELINE: Final = '''"""The pipeline of deepspeed.json: {stages} stages of {blocks} blocks each.

``layers``: the embedding, the blocks (instances or LayerSpecs of one class whose name contains
"block") and the head, in the order of the model. Written by parplan export.
"""

from deepspeed.pipe import PipelineModule


def pipeline(layers, loss_fn):
    return PipelineModule(
        layers=layers,
        loss_fn=loss_fn,
        num_stages={stages},
        partition_method="{partition}",
        activation_checkpoint_interval={interval},
    )
'''


def tell(source: Source, *, num_gpus: int | None, version: str) -> Told:  # noqa: ARG001
    """What a JSON configuration says."""
    told = read_mapping(
        "deepspeed",
        KEYS,
        read_document(source),
        num_gpus=num_gpus or 1,
        no_bearing=NO_BEARING.fullmatch,
        unmodelled=UNMODELLED.fullmatch,
    )
    batch, share = told.global_batch, (told.micro_batch or 0) * (told.accumulation or 0)
    if batch and share and batch % share == 0:  # the batch says how many replicas there are
        told.started = batch // share * max(1, told.pp) * max(1, told.tp) * told.ulysses
        told.num_gpus = num_gpus or told.started
    return told
