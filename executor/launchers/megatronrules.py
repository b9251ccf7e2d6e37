"""Megatron-LM's own rules, as its parser, its configurations and its schedules state them.

Sources are files of Megatron-LM d98e8a6 (2026-08-22). ``validate_args`` was run by hand; what only
a schedule or a process group says is raised when the job has its GPUs already.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from executor.launchers import commonrules as common
from executor.launchers.commonrules import multiples, replicas
from executor.launchers.megatron import num_chunks
from executor.launchers.megatronmodel import layers_of_pattern
from executor.launchers.megatronstages import ARGUMENTS, CONFIG, STAGES
from executor.launchers.rulebook import Broken, Rulebook, divisors, nearest_legal
from profiles.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from executor.launchers.told import Told

__all__ = ["RULES"]

STATE = "core/parallel_state.py"
VISIBLE_PADDING = 0.01
BLACKWELL = 10

RULES = Rulebook(*common.REPLICATED_HEADS, *common.WIDTHS, *common.SEQUENCE, *common.BATCH, *STAGES)


def _fsdp(told: Told) -> bool:
    return bool(told.torch_fsdp2 or told.megatron_fsdp)


@RULES.fails(ARGUMENTS)
def world_divides(told: Told) -> Iterator[Broken]:
    """The number of GPUs is a multiple of tp x pp x cp."""
    inner = told.tp * told.pp * told.cp
    if told.num_gpus % inner:
        message = f"{told.num_gpus} GPUs for tp {told.tp} x pp {told.pp} x cp {told.cp} = {inner}"
        yield Broken("tp", message, f"{multiples(told.num_gpus, inner)} GPUs")


@RULES.fails(STATE)
def expert_world_divides(told: Told) -> Iterator[Broken]:
    """The number of GPUs is a multiple of expert tp x ep x pp."""
    if not told.num_experts:
        return
    inner = (told.expert_tp or told.tp) * told.ep * told.pp
    if told.num_gpus % inner:
        split = told.expert_tp or told.tp
        message = (
            f"{told.num_gpus} GPUs for expert tp {split} x ep {told.ep} x pp {told.pp} = {inner}"
        )
        room = told.num_gpus // (split * told.pp)
        legal = [ep for ep in divisors(told.num_experts) if room and room % ep == 0]
        yield Broken("ep", message, f"ep {nearest_legal(told.ep, legal)}")


@RULES.fails(STATE)
def optimizer_copies_divide(told: Told) -> Iterator[Broken]:
    """Optimizer instances divide dp x cp, and the replicas of experts."""
    copies, ranks = told.optimizer_copies, replicas(told) * told.cp
    if ranks % copies:
        message = f"{copies} optimizer instances for dp x cp = {ranks}"
        yield Broken("optimizer_copies", message, nearest_legal(copies, divisors(ranks)))
    elif told.num_experts:
        experts = ranks * told.tp // ((told.expert_tp or told.tp) * told.ep) or 1
        if experts % copies:
            message = f"{copies} optimizer instances for {experts} replicas of the experts"
            yield Broken("optimizer_copies", message, nearest_legal(copies, divisors(experts)))


@RULES.fails(ARGUMENTS)
def experts_divide(told: Told) -> Iterator[Broken]:
    """Expert parallelism needs experts, and divides them."""
    if told.ep > 1 and not told.num_experts:
        yield Broken("ep", f"ep {told.ep} and no {told.spelt('num_experts')}", "1")
    elif told.num_experts and told.num_experts % told.ep:
        message = f"{told.num_experts} experts do not divide by ep {told.ep}"
        yield Broken("ep", message, nearest_legal(told.ep, divisors(told.num_experts)))


@RULES.fails("core/transformer/moe/moe_layer.py, in the first forward pass")
def experts_need_sequence_parallel(told: Told) -> Iterator[Broken]:
    """Experts with tensor parallelism need sequence parallelism."""
    if told.num_experts and told.tp > 1 and not told.sequence_parallel:
        message = f"experts with tp {told.tp} and without sequence parallelism"
        yield Broken("sequence_parallel", message, told.spelt("sequence_parallel"))


@RULES.trap(ARGUMENTS)
def sequence_parallel_without_tensor(told: Told) -> Iterator[Broken]:
    """Sequence parallelism without tensor parallelism is turned off."""
    if told.sequence_parallel and told.tp == 1:
        message = f"{told.spelt('sequence_parallel')} is turned off at tp 1"
        yield Broken("sequence_parallel", message, "tp at least 2, or leave it out")


@RULES.fails(ARGUMENTS)
def overlaps_build_on_one_another(told: Told) -> Iterator[Broken]:
    """Overlapped gathers need overlapped reduction and a sharded optimizer; tensor parallel
    overlap needs sequence parallelism.
    """
    sharded = told.distributed_optimizer or told.megatron_fsdp or told.optimizer == "dist_muon"
    if told.overlap_params and not told.overlap_grads:
        message = f"{told.spelt('overlap_params')} without {told.spelt('overlap_grads')}"
        yield Broken("overlap_params", message, told.spelt("overlap_grads"))
    if told.overlap_params and not sharded:
        message = f"{told.spelt('overlap_params')} without {told.spelt('distributed_optimizer')}"
        yield Broken("overlap_params", message, told.spelt("distributed_optimizer"))
    if told.overlap_tp and not (told.sequence_parallel and told.tp > 1):
        message = f"{told.spelt('overlap_tp')} without sequence parallelism"
        yield Broken("overlap_tp", message, told.spelt("sequence_parallel"))
    if told.overlap_step and not (sharded and told.overlap_params and num_chunks(told) > 1):
        message = f"{told.spelt('overlap_step')} without overlapped gathers and virtual stages"
        yield Broken("overlap_step", message, "leave it out")


@RULES.fails(ARGUMENTS)
def torch_fsdp2_alone(told: Told) -> Iterator[Broken]:
    """Torch FSDP2 has no pipeline, no experts in parallel, no distributed optimizer, no fused
    gradient accumulation, untied embeddings, no fp16, and checkpoints of torch_dist or torch_dcp.
    """
    if not told.torch_fsdp2:
        return
    for wrong, fact, message, valid in (
        (told.pp > 1, "pp", f"pp {told.pp}", "1"),
        (told.ep > 1, "ep", f"ep {told.ep}", "1"),
        (
            told.distributed_optimizer,
            "distributed_optimizer",
            "the distributed optimizer",
            "without",
        ),
        (told.fused_grads, "fused_grads", "fused gradient accumulation", told.spelt("fused_grads")),
        (told.tied, "tied", "tied embeddings", told.spelt("tied")),
        (told.fp16, "fp16", "fp16", "bf16"),
        (
            told.ckpt_format not in ("torch_dist", "torch_dcp"),
            "ckpt_format",
            f"checkpoints of {told.ckpt_format}",
            "torch_dist or torch_dcp",
        ),
    ):
        if wrong:
            yield Broken(fact, f"torch FSDP2 with {message}", valid)


@RULES.fails(ARGUMENTS)
def megatron_fsdp_checkpoints(told: Told) -> Iterator[Broken]:
    """Megatron-FSDP writes fsdp_dtensor checkpoints and knows Adam and SGD; that format is for it
    alone.
    """
    if told.megatron_fsdp and told.ckpt_format != "fsdp_dtensor":
        message = f"Megatron-FSDP with checkpoints of {told.ckpt_format}"
        yield Broken("ckpt_format", message, "fsdp_dtensor")
    if told.megatron_fsdp and told.optimizer not in ("adam", "sgd"):
        yield Broken("optimizer", f"Megatron-FSDP with {told.optimizer}", "adam or sgd")
    if told.ckpt_format == "fsdp_dtensor" and not told.megatron_fsdp:
        message = "fsdp_dtensor checkpoints without Megatron-FSDP"
        yield Broken("ckpt_format", message, "torch_dist")


@RULES.fails(ARGUMENTS)
def connections_with_fsdp(told: Told) -> Iterator[Broken]:
    """Every FSDP needs CUDA_DEVICE_MAX_CONNECTIONS unset or above 1 (torchtitan#1147)."""
    if _fsdp(told) and told.environment.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1":
        message = "CUDA_DEVICE_MAX_CONNECTIONS is 1 with FSDP"
        yield Broken("megatron_fsdp", message, "unset, or more than 1")


@RULES.trap(f"{ARGUMENTS}; asserted before Blackwell")
def connections_with_tensor_or_context(told: Told) -> Iterator[Broken]:
    """Before Blackwell tensor and context parallelism need CUDA_DEVICE_MAX_CONNECTIONS=1; beside
    FSDP, which needs the opposite, one of the two loses its overlap.
    """
    fact = "tp" if told.tp > 1 else "cp"
    if max(told.tp, told.cp) == 1 or told.compute_capability >= BLACKWELL:
        return
    value = told.environment.get("CUDA_DEVICE_MAX_CONNECTIONS")
    if _fsdp(told):
        message = (
            f"{fact} {getattr(told, fact)} beside FSDP: they want opposite numbers of connections"
        )
        yield Broken(fact, message, "one of the two")
    elif value != "1" and not told.overlap_ep:
        shown = "is not set" if value is None else f"is {value}"
        message = f"CUDA_DEVICE_MAX_CONNECTIONS {shown} with {fact} {getattr(told, fact)}"
        yield Broken(fact, message, "export CUDA_DEVICE_MAX_CONNECTIONS=1")


@RULES.fails(ARGUMENTS)
def batch_is_stated_once(told: Told) -> Iterator[Broken]:
    """A micro-batch is stated; a schedule of batches excludes a global batch."""
    if told.micro_batch is None:
        yield Broken("micro_batch", f"no {told.spelt('micro_batch')}", "at least 1")
    if told.batch_schedule and told.says("global_batch"):
        message = f"{told.spelt('global_batch')} with {told.spelt('batch_schedule')}"
        yield Broken("global_batch", message, "one of them")


@RULES.fails(ARGUMENTS)
def one_precision(told: Told) -> Iterator[Broken]:
    """bf16 and fp16 exclude one another, and so do fp8 and fp4."""
    if told.bf16 and told.fp16:
        yield Broken("fp16", "bf16 and fp16 together", "one of them")
    if told.fp8 and told.fp4:
        yield Broken("fp4", "fp8 and fp4 together", "one of them")


@RULES.trap("training/arguments.py: params_dtype is fp32 without either")
def stated_precision(told: Told) -> Iterator[Broken]:
    """Without bf16 or fp16 everything runs in fp32."""
    if not (told.bf16 or told.fp16):
        yield Broken("bf16", "neither --bf16 nor --fp16: trains in fp32", "--bf16")


@RULES.fails(ARGUMENTS)
def positions_reach(told: Told) -> Iterator[Broken]:
    """There are at least as many positions as a sequence has tokens."""
    if told.max_positions and told.seq_len and told.max_positions < told.seq_len:
        message = f"sequences of {told.seq_len} tokens and {told.max_positions} positions"
        yield Broken("max_positions", message, f"at least {told.seq_len}")


@RULES.fails(ARGUMENTS)
def heads_divide_width(told: Told) -> Iterator[Broken]:
    """Without a size of heads, the heads divide the hidden size."""
    if told.head_dim is None and told.hidden and told.heads and told.hidden % told.heads:
        message = f"hidden size {told.hidden} over {told.heads} heads"
        legal = nearest_legal(told.heads, divisors(told.hidden))
        yield Broken("heads", message, f"{legal}, or {told.spelt('head_dim')}")


@RULES.fails(ARGUMENTS)
def latent_or_grouped(told: Told) -> Iterator[Broken]:
    """Latent attention and grouped queries exclude one another."""
    if told.latent and told.grouped_queries:
        yield Broken("latent", "latent attention with grouped queries", "one of them")


@RULES.trap(f"{ARGUMENTS}: num_query_groups is only read with --group-query-attention")
def groups_without_grouping(told: Told) -> Iterator[Broken]:
    """A number of query groups counts only beside the flag that groups queries."""
    if told.says("groups") and not told.grouped_queries and told.groups != told.heads:
        message = f"{told.spelt('groups')} {told.groups} without {told.spelt('grouped_queries')}"
        yield Broken("groups", message, told.spelt("grouped_queries"))


@RULES.fails(f"{CONFIG}: moe_layer_freq")
def expert_pattern_fits(told: Told) -> Iterator[Broken]:
    """The pattern of expert layers has one entry for each layer."""
    if told.num_experts and told.num_layers and told.says("expert_pattern"):
        try:
            layers_of_pattern(told)
        except InputError as error:
            problem = error.problems[0]
            yield Broken("expert_pattern", problem.message, problem.expected)


@RULES.trap("training/tokenizer: _vocab_size_with_padding")
def vocabulary_is_padded(told: Told) -> Iterator[Broken]:
    """The vocabulary is padded to a multiple of 128 x tp: told where that adds a percent."""
    if not told.vocab:
        return
    unit = told.vocab_multiple * told.tp
    padded = -(-told.vocab // unit) * unit
    if padded - told.vocab > VISIBLE_PADDING * told.vocab:
        message = f"a vocabulary of {told.vocab} becomes {padded}"
        smaller = max(1, told.vocab_multiple // 2)
        yield Broken("vocab", message, f"{told.spelt('vocab_multiple')} {smaller}")
