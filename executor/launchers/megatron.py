"""Megatron-LM: the choices of a layout as arguments of ``pretrain_gpt.py``, and back.

Each part is written and read side by side: what ``say_...`` writes, ``hear_...`` reads.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

from costmodel.layout import MODULES, NO_RECOMPUTE, Axis, ContextComm, Recompute, RecomputeKind
from executor.launchers.job import FULL, Heard
from executor.launchers.megatronmodel import hear_model, say_model
from profiles.training import AttentionKernel, GradDtype, Optimizer, Precision

if TYPE_CHECKING:
    from executor.launchers.job import Job
    from executor.launchers.told import Told

__all__ = ["hear", "modules_of", "num_chunks", "say", "stage_layers"]

FSDP_STAGES: Final = {"no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}
FP8_RECIPES: Final = {
    Precision.FP8_TENSORWISE: "tensorwise",
    Precision.FP8_BLOCKWISE: "blockwise",
}
SHARDS_GRADIENTS: Final = 2
CP_COMM: Final = {ContextComm.RING: "p2p", ContextComm.GATHER: "all_gather"}


def say(job: Job) -> dict[str, Any]:
    """The facts of a job, by the names of the table of arguments."""
    s = job.setup
    return {
        "tp": s.tp,
        "pp": s.pp,
        "cp": s.cp,
        "cp_comm": (CP_COMM[s.cp_comm],),
        "ep": s.ep,
        **({"expert_tp": s.expert_tp} if job.model.has_experts else {}),
        "sequence_parallel": s.sequence_parallel,
        "stages_between": s.order.index(Axis.PP) < s.order.index(Axis.DP) and min(s.pp, s.dp) > 1,
        "micro_batch": s.micro_batch,
        "global_batch": job.inputs.training.global_batch,
        "seq_len": job.inputs.training.seq_len,
        **_say_cut(job),
        **_say_sharding(job),
        **_say_recompute(job),
        **_say_precision(job),
        **say_model(job),
    }


def hear(told: Told) -> Heard:
    """What arguments say."""
    blocks, chunks = _hear_cut(told)
    inner = told.tp * told.cp * told.pp
    dp = max(1, told.num_gpus // inner)
    copies = told.optimizer_copies
    heard = Heard(
        tp=told.tp,
        cp=told.cp,
        ep=told.ep,
        expert_tp=told.expert_tp,
        pp=told.pp,
        chunks=chunks,
        blocks=blocks,
        micro_batch=told.micro_batch,
        zero=_hear_zero(told),
        shard_group=dp * told.cp // copies if copies > 1 else None,
        sequence_parallel=bool(told.sequence_parallel),
        cp_comm=_hear_context(told),
        stages_between=told.stages_between,
        training=_hear_training(told, dp),
        model_facts=hear_model(told),
    )
    _hear_recompute(told, heard)
    return heard


def _hear_context(told: Told) -> ContextComm:
    """Where layers differ, or exchange heads for sequences, a ring stands in for them."""
    ways = {said: way for way, said in CP_COMM.items()}
    said = set(told.cp_comm)
    if told.cp > 1 and (len(said) > 1 or not said <= ways.keys()):
        words = " ".join(told.cp_comm)
        told.unmodelled.append(f"{told.spelt('cp_comm')} {words}, estimated as p2p")
        return ContextComm.RING
    return ways.get(next(iter(said), ""), ContextComm.RING)


def _say_cut(job: Job) -> dict[str, Any]:
    s = job.setup
    if s.pp == 1:
        return {}
    if job.is_even:
        return {"virtual_stages": s.chunks if s.chunks > 1 else None}
    chunks = [_run("t", size) for size in s.blocks]
    chunks[0], chunks[-1] = "E" + chunks[0], chunks[-1] + "L"
    return {"stage_layout": "|".join(chunks)}


def _run(letter: str, count: int) -> str:
    return f"{letter}*{count}" if count > 1 else letter * count


def stage_layers(text: str) -> list[str]:
    """The letters of every stage of a pipeline layout: ``Et*2|tL`` is ``["Ett", "tL"]``.

    As in ``core/transformer/pipeline_parallel_layer_layout.py``: commas are cosmetic, groups are
    multiplied before single letters.
    """
    text = text.replace(",", "").replace(" ", "")
    for pattern in (r"\(([^)]+)\)\*(\d+)", r"(.)\*(\d+)"):
        text = re.sub(pattern, lambda found: found[1] * min(int(found[2]), _MOST_LAYERS), text)
    return text.split("|")


_MOST_LAYERS: Final = 10_000


def num_chunks(told: Told) -> int:
    """Virtual stages of a rank, 1 without."""
    if told.stage_layout:
        return int(max(1, len(stage_layers(told.stage_layout)) // told.pp))
    if told.virtual_layers and told.num_layers:
        ends = int(told.count_embedding) + int(told.count_loss)
        return int(max(1, (told.num_layers + ends) // told.pp // told.virtual_layers))
    return int(told.virtual_stages or 1)


def _hear_cut(told: Told) -> tuple[tuple[int, ...] | None, int]:
    """Blocks of each chunk (None: even), and chunks a stage."""
    layers, chunks = told.num_layers, num_chunks(told)
    if told.stage_layout:
        return tuple(stage.count("t") for stage in stage_layers(told.stage_layout)), chunks
    ends = int(told.count_embedding) + int(told.count_loss)
    if layers is None:
        return None, chunks
    if told.first_layers or told.last_layers:
        return _with_ends(told, layers, chunks), chunks
    if not ends:
        return None, chunks
    share = (layers + ends) // (told.pp * chunks)
    each = [share] * (told.pp * chunks)
    each[0] -= int(told.count_embedding)
    each[-1] -= int(told.count_loss)
    return tuple(each), chunks


def _with_ends(told: Told, layers: int, chunks: int) -> tuple[int, ...]:
    """Blocks of each chunk where the first or last stage has a number of its own."""
    first, last = told.first_layers or 0, told.last_layers or 0
    inner = told.pp - bool(first) - bool(last)
    share = (layers - first - last) // max(1, inner)
    stages = [*([first] if first else []), *([share] * inner), *([last] if last else [])]
    return tuple(size // chunks for _ in range(chunks) for size in stages)


def _say_sharding(job: Job) -> dict[str, Any]:
    s = job.setup
    replicas = s.dp * s.cp
    zero = s.one_zero
    if zero == 0:
        return {"overlap_grads": replicas > 1}
    facts: dict[str, Any] = {
        "distributed_optimizer": True,
        "overlap_grads": True,
        "overlap_params": True,
        "optimizer_copies": replicas // s.shard_group,
    }
    if zero >= SHARDS_GRADIENTS:
        strategies = {stage: name for name, stage in FSDP_STAGES.items()}
        facts |= {
            "megatron_fsdp": True,
            "fsdp_strategy": strategies[zero],
            "ckpt_format": "fsdp_dtensor",
            "fused_grads": False,
        }
    return facts


def _hear_zero(told: Told) -> int:
    if told.deepspeed_zero is not None:
        return int(told.deepspeed_zero)
    if told.torch_fsdp2:
        return 3 if told.fsdp2_reshards else 2
    if told.megatron_fsdp:
        return FSDP_STAGES[told.fsdp_strategy]
    return int(told.distributed_optimizer)


def _say_recompute(job: Job) -> dict[str, Any]:
    options = set(job.blocks)
    selective = [option for option in options if option.kind is RecomputeKind.SELECTIVE]
    if selective:
        return {"recompute_kind": "selective", "recompute_modules": selective[0].modules}
    if FULL not in options:
        return {}
    return {
        "recompute_kind": "full",
        "recompute_method": "block",
        "recompute_layers": job.full_per_chunk,
    }


def _hear_recompute(told: Told, heard: Heard) -> None:
    if told.recompute_all:  # of Megatron-LM before 2022, and of Megatron-DeepSpeed
        heard.full_first = _MOST_LAYERS
    kind = told.recompute_kind or ("selective" if told.recompute_selective else None)
    if kind == "full":
        uniform = told.recompute_method == "uniform" or told.recompute_layers is None
        heard.full_first = _MOST_LAYERS if uniform else told.recompute_layers
        if uniform and (told.recompute_layers or 1) > 1:
            told.notes.append(
                f"{told.spelt('recompute_layers')} {told.recompute_layers}: inputs are kept once "
                f"for so many layers; estimated as if each layer kept its own"
            )
    elif kind == "selective":
        wanted = set(modules_of(told))
        known = wanted & set(MODULES)
        if told.attention != "unfused" and known == {"core_attn"}:
            known = set()  # flash attention recomputes its scores anyway
        if wanted - set(MODULES):
            names = ", ".join(sorted(wanted - set(MODULES)))
            told.unmodelled.append(f"{told.spelt('recompute_modules')} {names}")
        heard.recompute = (
            Recompute(RecomputeKind.SELECTIVE, tuple(sorted(known))) if known else NO_RECOMPUTE
        )


def modules_of(told: Told) -> tuple[str, ...]:
    """What selective recomputation names, as words or in a list: ``[layernorm, mlp]``."""
    text = " ".join(told.recompute_modules or ("core_attn",))
    return tuple(word for word in re.split(r"[\s,\[\]'\"]+", text) if word)


def _say_precision(job: Job) -> dict[str, Any]:
    training = job.inputs.training
    precision = training.precision
    facts: dict[str, Any] = {"bf16": precision.other == "bf16", "fp16": precision.other == "fp16"}
    if precision in FP8_RECIPES:
        facts |= {"fp8": "hybrid", "fp8_recipe": FP8_RECIPES[precision]}
    elif precision is Precision.NVFP4:
        facts["fp4"] = "e2m1"
    if training.grad_dtype is GradDtype.BF16:
        facts["bf16_grads"] = True
    elif training.grad_dtype is GradDtype.FP32 and facts["fp16"]:
        facts["fp32_grads"] = True
    facts["optimizer"] = "sgd" if training.optimizer is Optimizer.SGD else "adam"
    facts["attention"] = _ATTENTION.get(training.attention, "flash")
    return facts


_ATTENTION: Final = {
    AttentionKernel.FUSED: "fused",
    AttentionKernel.UNFUSED: "unfused",
    AttentionKernel.EAGER: "local",
}


def _hear_training(told: Told, dp: int) -> dict[str, Any]:
    precision = Precision.FP32
    if told.bf16 or told.fp16:
        precision = Precision.BF16 if told.bf16 else Precision.FP16
    if told.fp8:
        recipe = told.fp8_recipe
        precision = Precision.FP8_TENSORWISE
        if recipe in ("blockwise", "mxfp8"):
            precision = Precision.FP8_BLOCKWISE
    if told.fp4:
        precision = Precision.NVFP4
    grads = GradDtype.FP32
    if told.bf16_grads:
        grads = GradDtype.BF16
    elif told.fp16 and not told.fp32_grads:
        grads = GradDtype.FP16
    kernels = {said: kernel for kernel, said in _ATTENTION.items()}
    attention = kernels.get(told.attention, AttentionKernel.FLASH2)
    ramp = told.batch_schedule or told.ramp
    if ramp:
        told.notes.append(
            f"the batch grows during training: {' '.join(ramp)}; its end is estimated"
        )
    batch = told.global_batch
    if batch is None and told.batch_schedule and ":" in told.batch_schedule[-1]:
        last = told.batch_schedule[-1].split()[-1].rpartition(":")[2]
        batch = int(last) if last.isdigit() else None
    if batch is None and told.micro_batch:
        batch = told.micro_batch * dp
    return {
        "global_batch": batch,
        "seq_len": told.seq_len,
        "precision": precision.value,
        "grad_dtype": grads.value,
        "optimizer": "sgd" if told.optimizer == "sgd" else "adamw",
        "attention": attention.value,
    }
