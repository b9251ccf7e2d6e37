"""DeepSpeed: the JSON configuration, and the pipeline that its engine runs.

Keys are those of DeepSpeed 0.19.8, ``runtime/config.py`` and ``runtime/zero/config.py``. The model
is the training script's: what the JSON cannot say of layers stands in a file beside it.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any, Final

from costmodel.layout import NO_RECOMPUTE
from executor.launchers.job import FULL, Heard, has_experts
from executor.launchers.launchlines import launch_script, placeholder, slurm_script
from executor.launchers.mappings import nested, read_document, read_mapping
from executor.launchers.rulebook import Broken, Rulebook, divisors, nearest_legal
from executor.launchers.told import Key, Kind
from profiles.training import GradDtype, Precision

if TYPE_CHECKING:
    from collections.abc import Iterator

    from executor.launchers.commandline import Source
    from executor.launchers.job import Job
    from executor.launchers.told import Told

__all__ = ["KEYS", "RULES", "hear", "say", "tell", "write"]

SIZE, TEXT, SWITCH = Kind.SIZE, Kind.TEXT, Kind.SWITCH
BUCKET: Final = 500_000_000  # elements, DeepSpeed's own usual size
GATHERS, SHARDS_GRADIENTS = 3, 2


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


# --- the choices -----------------------------------------------------------------------------


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


# --- files -----------------------------------------------------------------------------------


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
    if has_experts(job.model) and job.setup.ep > 1:
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


# --- rules -----------------------------------------------------------------------------------

CONFIG: Final = "runtime/config.py"
RULES: Final = Rulebook()


def _replicas(told: Told) -> int:
    inner: int = max(1, told.pp) * max(1, told.tp) * told.ulysses
    return max(1, told.num_gpus // inner)


@RULES.fails("runtime/pipe/topology.py, utils/groups.py")
def world_divides(told: Told) -> Iterator[Broken]:
    """The number of GPUs is a multiple of stages x tensor parallel x Ulysses ranks."""
    inner = max(1, told.pp) * max(1, told.tp) * told.ulysses
    if told.num_gpus % inner:
        fact = "tp" if told.tp > 1 else "pp" if told.pp > 1 else "ulysses"
        message = f"{told.num_gpus} GPUs for {inner} model parallel ranks"
        yield Broken(fact, message, f"a multiple of {inner} GPUs")


@RULES.fails(f"{CONFIG}: _batch_assertion")
def batch_is_the_product(told: Told) -> Iterator[Broken]:
    """train_batch_size = micro-batch x accumulation x data parallel ranks, which leave tensor,
    sequence and pipeline parallel ranks out.
    """
    batch, micro, steps = told.global_batch, told.micro_batch, told.accumulation
    ranks = _replicas(told)
    if batch is None and micro is None:
        if {"global_batch", "micro_batch"} & told.places.keys():
            return  # the training script says them
        message = "neither train_batch_size nor train_micro_batch_size_per_gpu is stated"
        yield Broken("global_batch", message, "one of them")
        return
    if batch is None:
        return
    if micro is None:
        micro = batch // ranks // (steps or 1)
    if steps is None:
        steps = batch // (micro or 1) // ranks
    if batch != micro * steps * ranks or not batch:
        product = micro * steps * ranks
        message = f"train_batch_size {batch}, and {micro} x {steps} x {ranks} ranks = {product}"
        valid = f"{(micro or 1) * max(1, steps) * ranks}"
        yield Broken("global_batch", message, valid)


@RULES.fails("runtime/pipe/engine.py:77")
def no_sharded_gradients_in_a_pipeline(told: Told) -> Iterator[Broken]:
    """ZeRO-2 and ZeRO-3 do not go with a pipeline."""
    if told.pp > 1 and told.zero >= SHARDS_GRADIENTS:
        yield Broken("zero", f"ZeRO-{told.zero} with {told.pp} stages", "0 or 1")


@RULES.fails("runtime/zero/config.py: ZeroStageEnum")
def zero_stage_exists(told: Told) -> Iterator[Broken]:
    """ZeRO has the stages 0 to 3."""
    if told.zero not in range(GATHERS + 1):
        yield Broken("zero", f"ZeRO stage {told.zero}", "0 to 3")


@RULES.fails(f"{CONFIG}: _REMOVED_ZERO_CONFIG_KEYS")
def no_mics(told: Told) -> Iterator[Broken]:
    """MiCS sharding was removed from DeepSpeed."""
    if told.mics is not None and told.mics > 0:
        yield Broken("mics", f"MiCS over {told.mics} ranks: removed from DeepSpeed", "without it")


@RULES.fails(CONFIG)
def one_precision(told: Told) -> Iterator[Broken]:
    """bf16 and fp16 exclude one another."""
    if told.bf16 and told.fp16:
        yield Broken("fp16", "bf16 and fp16 together", "one of them")


@RULES.fails("runtime/zero/config.py: offload_ratio_check, runtime/engine.py")
def offload_needs_a_stage(told: Told) -> Iterator[Broken]:
    """The optimizer is offloaded from ZeRO-1 on, parameters with ZeRO-3 only."""
    if told.offload_param not in ("none", None) and told.zero != GATHERS:
        yield Broken("offload_param", f"parameters offloaded with ZeRO-{told.zero}", "stage 3")
    if told.offload_optimizer not in ("none", None) and not told.zero:
        yield Broken("offload_optimizer", "the optimizer offloaded without ZeRO", "stage 1 to 3")


@RULES.fails("module_inject/auto_ep_folding.py")
def experts_tile_the_stage(told: Told) -> Iterator[Broken]:
    """Expert parallel ranks divide the ranks of a stage, experts are not split, and tensor
    parallelism beside them needs ep of at least 2 and no pipeline.
    """
    if not told.autoep:
        return
    ranks = told.num_gpus // max(1, told.pp)
    if ranks % told.ep:
        message = f"ep {told.ep} does not divide the {ranks} ranks of a stage"
        yield Broken("ep", message, nearest_legal(told.ep, divisors(ranks)))
    if told.expert_tp > 1:
        yield Broken("expert_tp", f"experts split over {told.expert_tp} ranks", "1")
    if told.tp > 1 and (told.ep == 1 or told.pp > 1):
        what = f"ep {told.ep}" if told.ep == 1 else f"{told.pp} stages"
        yield Broken("tp", f"AutoTP with AutoEP at {what}", "ep at least 2, one stage")
    if told.num_experts and told.num_experts % told.ep:
        message = f"{told.num_experts} experts do not divide by ep {told.ep}"
        yield Broken("ep", message, nearest_legal(told.ep, divisors(told.num_experts)))


@RULES.fails("module_inject/auto_ep_folding.py; utils/groups.py")
def tensor_or_ulysses(told: Told) -> Iterator[Broken]:
    """Tensor parallelism and Ulysses sequence parallelism exclude one another."""
    if told.tp > 1 and told.ulysses > 1:
        yield Broken("ulysses", f"AutoTP {told.tp} with Ulysses {told.ulysses}", "one of them")


@RULES.fails("sequence/layer.py: DistributedAttention")
def ulysses_divides_heads(told: Told) -> Iterator[Broken]:
    """Ulysses ranks divide the attention heads and the sequence."""
    if told.ulysses == 1:
        return
    for fact, size in (("heads", told.heads), ("tokens", told.seq_len)):
        if size and size % told.ulysses:
            message = f"{size} {fact} do not divide by {told.ulysses} Ulysses ranks"
            yield Broken("ulysses", message, nearest_legal(told.ulysses, divisors(size)))


@RULES.trap("runtime/engine.py: AutoTP")
def tensor_ranks_without_heads(told: Told) -> Iterator[Broken]:
    """With more tensor parallel ranks than key/value heads the rest of the ranks has no attention
    to compute.
    """
    heads = told.kv_heads
    if heads and told.tp > heads:
        message = f"autotp_size {told.tp} and {heads} key/value heads: {told.tp - heads} ranks idle"
        yield Broken("tp", message, f"at most {heads}")


@RULES.trap("runtime/pipe/module.py: _partition_layers")
def stages_balanced_by_parameters(told: Told) -> Iterator[Broken]:
    """A pipeline is cut by parameters unless its module says otherwise, so that the stages with
    embedding and head get fewer blocks.
    """
    if told.pp > 1 and not str(told.partition).startswith("type:"):
        message = (
            f"{told.pp} stages cut by {told.partition}: embedding and head count as parameters"
        )
        yield Broken("partition", message, "partition_method='type:block' in PipelineModule")


@RULES.trap("runtime/config.py: get_pipeline_config; runtime/pipe/module.py")
def stages_are_the_modules(told: Told) -> Iterator[Broken]:
    """The pipeline section is only read: stages and recomputation are those of PipelineModule."""
    if told.pp > 1:
        message = f"{told.pp} stages in the JSON start no pipeline by themselves"
        yield Broken("pp", message, f"PipelineModule(num_stages={told.pp}) in the script")
