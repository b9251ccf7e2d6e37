"""Hugging Face Accelerate: the YAML of ``accelerate launch``, FSDP2 and ``ParallelismConfig``.

Keys are those of Accelerate 1.15.0, ``commands/config/config_args.py`` and
``utils/dataclasses.py``. Batch and sequence length belong to the training script: they are written
as its arguments, with the names of ``transformers.TrainingArguments``.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import yaml

from costmodel.layout import NO_RECOMPUTE, ContextComm
from executor.launchers.commandline import Source, read_flags
from executor.launchers.job import FULL, Heard
from executor.launchers.launchlines import launch_script, placeholder, slurm_script
from executor.launchers.mappings import nested, read_document, read_mapping
from executor.launchers.told import Key, Kind
from profiles.training import Precision

if TYPE_CHECKING:
    from executor.launchers.job import Job
    from executor.launchers.script import Command
    from executor.launchers.told import Told

__all__ = ["KEYS", "hear", "say", "tell", "write"]

TEXT, SWITCH, COUNT, SIZE = Kind.TEXT, Kind.SWITCH, Kind.COUNT, Kind.SIZE
FSDP, DDP = "FSDP", "MULTI_GPU"
GATHERS: Final = 3
FSDP2: Final = 2


def _key(name: str, fact: str, kind: Kind = COUNT, usual: object = None) -> Key:
    return Key(name=name, fact=fact, kind=kind, usual=usual)


AXES: Final = "parallelism_config.parallelism_config"
CONFIG: Final = (
    _key("distributed_type", "kind", TEXT, "NO"),
    _key("num_machines", "machines", COUNT, 1),
    _key("num_processes", "processes"),
    _key("mixed_precision", "precision", TEXT, "no"),
    _key("gradient_accumulation_steps", "accumulation"),
    _key(f"{AXES}_dp_replicate_size", "dp_replicate", COUNT, 1),
    _key(f"{AXES}_dp_shard_size", "dp_shard", COUNT, 1),
    _key(f"{AXES}_tp_size", "tp", COUNT, 1),
    _key(f"{AXES}_cp_size", "cp", COUNT, 1),
    _key(f"{AXES}_cp_backend", "cp_backend", TEXT, "torch"),
    _key(f"{AXES}_cp_comm_strategy", "cp_comm", TEXT, "allgather"),
    _key(f"{AXES}_sp_size", "ulysses", COUNT, 1),
    _key(f"{AXES}_sp_backend", "ulysses_backend", TEXT, "deepspeed"),
    _key("fsdp_config.fsdp_version", "fsdp_version", COUNT, 1),
    _key("fsdp_config.fsdp_reshard_after_forward", "reshard", TEXT),
    _key("fsdp_config.fsdp_sharding_strategy", "strategy", TEXT, "FULL_SHARD"),
    _key("fsdp_config.fsdp_activation_checkpointing", "checkpointing", SWITCH, usual=False),
    _key("fsdp_config.fsdp_forward_prefetch", "prefetch", SWITCH, usual=False),
    _key("fsdp_config.fsdp_offload_params", "offload", SWITCH, usual=False),
    _key("deepspeed_config.zero_stage", "zero_stage", SIZE),
    _key("deepspeed_config.gradient_accumulation_steps", "ds_accumulation"),
    _key("deepspeed_config.deepspeed_config_file", "ds_file", TEXT),
    _key("deepspeed_config.offload_optimizer_device", "ds_offload", TEXT, "none"),
)
SCRIPT: Final = (
    _key("--per_device_train_batch_size", "micro_batch"),
    _key("--gradient_accumulation_steps", "steps"),
    _key("--max_seq_length", "seq_len"),
    _key("--gradient_checkpointing", "script_checkpointing", SWITCH, usual=False),
)
KEYS: Final = (*CONFIG, *SCRIPT)
CP_COMM: Final = {ContextComm.RING: "alltoall", ContextComm.GATHER: "allgather"}
STRATEGIES: Final = {
    **dict.fromkeys(("FULL_SHARD", "1", "HYBRID_SHARD", "4"), 3),
    **dict.fromkeys(("SHARD_GRAD_OP", "2", "HYBRID_SHARD_ZERO2", "5"), 2),
    **dict.fromkeys(("NO_SHARD", "3"), 0),
}
UNMODELLED: Final = re.compile(r"(fp8_config|megatron_lm_config|deepspeed_config|dynamo_config).*")
NO_BEARING: Final = re.compile(
    r"(compute_environment|debug|downcast_bf16|enable_cpu_affinity|machine_rank|main_.*|rdzv_.*"
    r"|same_network|tpu_.*|use_cpu|gpu_ids|fsdp_config\.fsdp_.*|fsdp_config|parallelism_config"
    r"|command_file|commands|mpirun_config.*|deepspeed_config\.(zero3_.*|deepspeed_.*)"
    r"|ipex_config.*|fp16|dynamo_backend|use_.*|sagemaker.*|deepspeed_config|megatron_lm_config"
    r"|fp8_config|dynamo_config|deepspeed_config\.gradient_clipping|.*tp_handler.*|.*_rotate.*)"
)


def say(job: Job) -> dict[str, Any]:
    """The facts of a job by the names of the table."""
    s, training = job.setup, job.inputs.training
    sharded = s.one_zero > 0
    shard = s.shard_group // s.cp if sharded else 1
    replicate = s.dp // shard
    facts: dict[str, Any] = {
        "kind": FSDP if sharded or max(s.tp, s.cp) > 1 else DDP if s.num_ranks > 1 else "NO",
        "machines": job.num_nodes,
        "processes": s.num_ranks,
        "precision": _PRECISIONS.get(training.precision, "bf16"),
        "micro_batch": s.micro_batch,
        "steps": s.num_microbatches,
        "seq_len": training.seq_len,
    }
    if facts["kind"] == FSDP:
        facts |= {
            "dp_replicate": replicate,
            "dp_shard": shard,
            "tp": s.tp,
            "cp": s.cp,
            **({"cp_comm": CP_COMM[s.cp_comm]} if s.cp > 1 else {}),
            "fsdp_version": FSDP2,
            "reshard": s.one_zero == GATHERS,
            "checkpointing": FULL in job.blocks,
            "offload": False,
        }
    return facts


_PRECISIONS: Final = {
    Precision.FP16: "fp16",
    Precision.FP32: "no",
    Precision.FP8_TENSORWISE: "fp8",
    Precision.FP8_BLOCKWISE: "fp8",
}


def hear(told: Told) -> Heard:
    """What a configuration and its script's arguments say."""
    tp, cp = told.tp, told.cp
    dp = max(1, told.num_gpus // (tp * cp))
    zero, group = _hear_sharding(told, dp)
    if told.ulysses > 1:
        told.unmodelled.append(f"{told.spelt('ulysses')}: {told.ulysses} (Ulysses)")
    for fact in ("offload", "ds_offload"):
        if getattr(told, fact) not in (False, "none", None):
            told.unmodelled.append(f"{told.spelt(fact)}: {getattr(told, fact)}")
    if told.ds_file:
        told.notes.append(f"{told.spelt('ds_file')}: read {told.ds_file} with --from deepspeed")
    micro, steps = told.micro_batch, told.steps or told.accumulation or told.ds_accumulation
    precision = {"bf16": "bf16", "fp16": "fp16", "fp8": "fp8-tensorwise"}.get(
        told.precision, "fp32"
    )
    full = told.checkpointing or told.script_checkpointing
    training: dict[str, Any] = {"precision": precision, "seq_len": told.seq_len}
    if micro:
        training["global_batch"] = micro * (steps or 1) * dp
    return Heard(
        tp=tp,
        cp=cp,
        cp_comm={said: way for way, said in CP_COMM.items()}.get(told.cp_comm, ContextComm.GATHER),
        dp=dp,
        micro_batch=micro,
        zero=zero,
        shard_group=group,
        recompute=FULL if full else NO_RECOMPUTE,
        training=training,
    )


def _hear_sharding(told: Told, dp: int) -> tuple[int, int | None]:
    """(ZeRO stage, ranks of a shard group or None for all)."""
    kind = str(told.kind).upper()
    if kind == "DEEPSPEED":
        return told.zero_stage or 0, None
    if kind != FSDP:
        return 0, None
    stated = told.says("dp_shard") or told.says("dp_replicate")
    shard = told.dp_shard if stated else dp
    group = shard * told.cp
    if group == 1:
        return 0, None
    if told.fsdp_version >= FSDP2:
        zero = 2 if str(told.reshard).lower() == "false" else 3
    else:
        strategy = str(told.reshard if told.says("reshard") else told.strategy).upper()
        zero = STRATEGIES.get(strategy, GATHERS)
    return zero, group


def write(job: Job, *, version: str) -> dict[str, str]:
    """The files of a job."""
    facts = say(job)
    config = {"compute_environment": "LOCAL_MACHINE"} | nested(CONFIG, facts)
    if "fsdp_config" in config:
        config["fsdp_config"] |= {
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "fsdp_state_dict_type": "SHARDED_STATE_DICT",
        }
    config |= {"machine_rank": 0, "rdzv_backend": "c10d" if job.num_nodes > 1 else "static"}
    arguments = [
        f"{key.name} {facts[key.fact]}" for key in SCRIPT if key.fact in facts and key.kind is COUNT
    ]
    notes = [
        f"Accelerate {version}. TRAIN is your training script; its arguments are named as in",
        "transformers.TrainingArguments.",
    ]
    program = ["accelerate launch --config_file accelerate.yaml"]
    if job.num_nodes > 1:
        head = placeholder("HEAD", "first node of the job, as host name")
        program.append(f"--main_process_ip {head} --main_process_port 29500")
        program.append('--machine_rank "${SLURM_NODEID:-0}"')
    script = launch_script(
        job,
        [placeholder("TRAIN", "your training script"), *arguments],
        environment={"CUDA_DEVICE_MAX_CONNECTIONS": None} if facts["kind"] == FSDP else {},
        notes=notes,
        program=program,
    )
    return {
        "accelerate.yaml": yaml.safe_dump(config, sort_keys=False),
        "launch.sh": script,
        "job.sbatch": slurm_script(job),
    }


def tell(source: Source, *, num_gpus: int | None, version: str) -> Told:  # noqa: ARG001
    """What a YAML says, or a script with ``accelerate launch --config_file YAML train.py ...``."""
    launch = _launch(source)
    document_source = source
    if launch is not None:
        document_source = Source(_config_of(launch, source))
    told = read_mapping(
        "accelerate",
        KEYS,
        read_document(document_source),
        num_gpus=num_gpus or 1,
        no_bearing=NO_BEARING.fullmatch,
        unmodelled=UNMODELLED.fullmatch,
    )
    if launch is not None:
        arguments = read_flags(
            "accelerate",
            SCRIPT,
            launch,
            num_gpus=1,
            no_bearing=lambda _: True,
            unmodelled=lambda _: False,
        )
        told.given |= arguments.given
        told.places |= arguments.places
    told.started = told.processes
    told.num_gpus = num_gpus or told.processes or 1
    return told


def _launch(source: Source) -> Command | None:
    """The command that runs ``accelerate launch``, None where the source is a YAML itself."""
    if not (source.is_file and not source.given.endswith((".yaml", ".yml", ".json"))):
        return None
    for command in source.commands():
        words = [token.text for token in command.tokens]
        if "accelerate" in words and "launch" in words:
            return command
    return None


def _config_of(launch: Command, source: Source) -> str:
    words = [token.text for token in launch.tokens]
    for position, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name in ("--config_file", "--config-file"):
            path = value if equals else words[position + 1]
            return str(Path(source.given).parent / path)
    return source.given
