"""Megatron-LM's own rules, as its parser, its configurations and its schedules state them.

Sources are files of Megatron-LM d98e8a6 (2026-08-22). ``validate_args`` was run by hand; what only
a schedule or a process group says is raised when the job has its GPUs already.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from executor.launchers import commonrules as common
from executor.launchers.commonrules import multiples, replicas
from executor.launchers.megatron import layers_of_pattern, modules_of, stage_layers
from executor.launchers.rulebook import Broken, Rulebook, divisors, nearest_legal
from profiles.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from executor.launchers.told import Told

__all__ = ["RULES"]

ARGUMENTS = "training/arguments.py: validate_args"
CONFIG = "core/transformer/transformer_config.py"
STATE = "core/parallel_state.py"
SCHEDULES = "core/pipeline_parallel/schedules.py, when training starts"
VISIBLE_PADDING = 0.01
BLACKWELL = 10

RULES = Rulebook(*common.REPLICATED_HEADS, *common.WIDTHS, *common.SEQUENCE, *common.BATCH)


def _chunks(told: Told) -> int:
    """Virtual stages of a rank, 1 without."""
    if told.stage_layout:
        stages: int = len(stage_layers(told.stage_layout))
        return int(max(1, stages // told.pp))
    if told.virtual_layers and told.num_layers:
        ends = int(told.count_embedding) + int(told.count_loss)
        return int(max(1, (told.num_layers + ends) // told.pp // told.virtual_layers))
    return int(told.virtual_stages or 1)


def _microbatches(told: Told) -> int:
    batch = int(told.global_batch or (told.micro_batch or 1) * replicas(told))
    return max(1, batch // ((told.micro_batch or 1) * replicas(told)))


def _fsdp(told: Told) -> bool:
    return bool(told.torch_fsdp2 or told.megatron_fsdp)


# --- ranks -----------------------------------------------------------------------------------


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


# --- the pipeline ----------------------------------------------------------------------------


@RULES.fails(ARGUMENTS)
def one_way_of_virtual_stages(told: Told) -> Iterator[Broken]:
    """Layers per virtual stage, virtual stages per rank and a layout exclude one another."""
    given = [f for f in ("virtual_layers", "virtual_stages", "stage_layout") if told.says(f)]
    if len(given) > 1:
        names = " and ".join(told.spelt(fact) for fact in given)
        yield Broken(given[1], f"{names} together", "one of them")


@RULES.fails(ARGUMENTS)
def layers_divide_by_stages(told: Told) -> Iterator[Broken]:
    """Without a layout or first and last numbers, the layers divide by the stages (releases before
    2025 dropped the rest and trained a smaller model: Megatron-LM#1304).
    """
    uneven = told.stage_layout or told.first_layers or told.last_layers
    if told.num_layers is None or uneven:
        return
    layers = told.num_layers + int(told.count_embedding) + int(told.count_loss)
    if layers % told.pp:
        what = f"{told.num_layers} layers"
        if layers != told.num_layers:
            what += f" and {layers - told.num_layers} for embedding and loss"
        legal = nearest_legal(told.pp, divisors(layers))
        valid = f"pp {legal}, or {told.spelt('stage_layout')} for any cut"
        yield Broken("pp", f"{what} do not divide by pp {told.pp}", valid)


@RULES.fails(CONFIG)
def first_and_last_leave_whole_stages(told: Told) -> Iterator[Broken]:
    """What first and last stage leave divides by the stages between them."""
    first, last = told.first_layers or 0, told.last_layers or 0
    if told.num_layers is None or not (first or last):
        return
    rest = told.num_layers - first - last
    stages = told.pp - bool(first) - bool(last)
    if bool(rest) != bool(stages) or rest < 0 or (stages > 0 and rest % stages):
        message = f"{rest} layers are left for {stages} stages between"
        fact = "first_layers" if first else "last_layers"
        yield Broken(fact, message, f"a rest that divides by {max(1, stages)}")


@RULES.fails(CONFIG)
def cut_flags_exclude_one_another(told: Told) -> Iterator[Broken]:
    """A layout, first and last numbers, and counting embedding or loss exclude one another."""
    ends = bool(told.first_layers or told.last_layers)
    counts = bool(told.count_embedding or told.count_loss)
    if told.stage_layout and (ends or counts):
        other = "first_layers" if told.first_layers else "last_layers"
        other = other if ends else ("count_embedding" if told.count_embedding else "count_loss")
        message = f"{told.spelt('stage_layout')} with {told.spelt(other)}"
        yield Broken("stage_layout", message, "one of them")
    elif ends and counts:
        message = f"numbers of first or last layers with {told.spelt('count_embedding')}"
        yield Broken("count_embedding", message, "one of them")


@RULES.fails("core/transformer/pipeline_parallel_layer_layout.py")
def layout_is_whole(told: Told) -> Iterator[Broken]:
    """A layout begins with its one E, ends with its one L, has a t for each layer of the model, and
    a number of stages that divides by pp.
    """
    if not told.stage_layout:
        return
    stages = stage_layers(told.stage_layout)
    flat = "".join(stages)
    strange = sorted(set(flat) - set("EtLm"))
    if strange:
        message = f"{' '.join(strange)} in a layout"
        yield Broken("stage_layout", message, "E, t, m and L, stages split by |")
        return
    if len(stages) % told.pp:
        message = f"a layout of {len(stages)} stages for pp {told.pp}"
        yield Broken("stage_layout", message, f"{multiples(len(stages), told.pp)} stages")
    if flat[:1] != "E" or flat.count("E") != 1:
        yield Broken("stage_layout", f"{flat.count('E')} E, first is {flat[:1]!r}", "one E, first")
    if flat[-1:] != "L" or flat.count("L") != 1:
        yield Broken("stage_layout", f"{flat.count('L')} L, last is {flat[-1:]!r}", "one L, last")
    if told.num_layers is not None and flat.count("t") != told.num_layers:
        message = f"a layout of {flat.count('t')} layers for a model of {told.num_layers}"
        yield Broken("stage_layout", message, f"{told.num_layers} t")


@RULES.fails(ARGUMENTS)
def virtual_stages_need_a_pipeline(told: Told) -> Iterator[Broken]:
    """Virtual stages need pp of at least 2, and of at least 3 without overlapped hand-over."""
    if _chunks(told) == 1:
        return
    least = 2 if told.overlap_p2p else 3
    if told.pp < least:
        why = "" if told.overlap_p2p else f" and {told.spelt('overlap_p2p')}"
        message = f"{_chunks(told)} virtual stages with pp {told.pp}{why}"
        yield Broken("pp", message, f"pp at least {least}")


@RULES.fails(CONFIG)
def layers_divide_by_virtual_stages(told: Told) -> Iterator[Broken]:
    """The layers of a rank divide by its virtual stages."""
    layers, pp = told.num_layers, told.pp
    if layers is None or told.stage_layout:
        return
    layers += int(told.count_embedding) + int(told.count_loss)
    if told.virtual_layers and layers % pp == 0 and (layers // pp) % told.virtual_layers:
        message = f"{layers // pp} layers of a rank in virtual stages of {told.virtual_layers}"
        legal = nearest_legal(told.virtual_layers, divisors(layers // pp))
        yield Broken("virtual_layers", message, legal)
    chunks = told.virtual_stages or 1
    if chunks == 1:
        return
    first, last = told.first_layers or 0, told.last_layers or 0
    inner = pp - bool(first) - bool(last)
    share = (layers - first - last) // max(1, inner)
    for fact, size in (("first_layers", first), ("last_layers", last), ("virtual_stages", share)):
        if size % chunks:
            message = f"{size} layers of a rank in {chunks} virtual stages"
            yield Broken(fact, message, nearest_legal(chunks, divisors(size)))


@RULES.fails(SCHEDULES)
def enough_microbatches_for_virtual_stages(told: Told) -> Iterator[Broken]:
    """With virtual stages there are at least as many micro-batches as a group holds (pp), and the
    last group is whole or at least pp. The parser accepts anything; the first step fails.
    """
    if _chunks(told) == 1:
        return
    pp, count = told.pp, _microbatches(told)
    group = told.group_size or pp
    unit = (told.micro_batch or 1) * replicas(told)
    if group < pp or group > count:
        message = (
            f"groups of {group} of {count} micro-batches at pp {pp}, accepted and then refused"
        )
        fact = "group_size" if told.group_size else "global_batch"
        valid = f"a group from {pp} to {count}" if count >= pp else f"global batch {unit * pp}"
        yield Broken(fact, message, valid)
    elif 0 < count % group < pp:
        message = f"{count} micro-batches leave {count % group} for the last group of {group}"
        yield Broken("global_batch", message, multiples(unit * count, unit * group))


# --- recomputation ---------------------------------------------------------------------------


@RULES.fails(CONFIG)
def full_recompute_says_how(told: Told) -> Iterator[Broken]:
    """Full recomputation needs a method and a number of layers; selective has neither."""
    if told.recompute_kind == "full":
        for fact in ("recompute_method", "recompute_layers"):
            if getattr(told, fact) is None:
                valid = {"recompute_method": "block or uniform"}.get(fact, "at least 1")
                yield Broken(fact, f"full recomputation without {told.spelt(fact)}", valid)
    elif told.recompute_kind == "selective" or told.recompute_selective:
        for fact in ("recompute_method", "recompute_layers"):
            if getattr(told, fact) is not None:
                message = f"selective recomputation with {told.spelt(fact)}"
                yield Broken(fact, message, "without it")


@RULES.fails(CONFIG)
def recompute_modules_exist(told: Told) -> Iterator[Broken]:
    """Selective recomputation names modules that there are: moe_act with grouped GEMM only,
    mla_up_proj with latent attention only; not layernorm or moe_act under delayed fp8 scaling.
    """
    modules = set(modules_of(told))
    known = {"core_attn", "layernorm", "mlp", "moe", "moe_act", "shared_experts", "mla_up_proj"}
    known |= {"gdn_norm_out", "gdp_in_proj", "gdp_qkv", "mhc"}
    if modules - known:
        message = f"no module {', '.join(sorted(modules - known))}"
        yield Broken("recompute_modules", message, ", ".join(sorted(known)))
    if told.recompute_kind != "selective":
        return
    if "moe_act" in modules and not told.grouped_gemm:
        yield Broken(
            "recompute_modules", "moe_act without grouped GEMM", told.spelt("grouped_gemm")
        )
    if "mla_up_proj" in modules and not told.latent:
        yield Broken("recompute_modules", "mla_up_proj without latent attention", "leave it out")
    if told.fp8 and told.fp8_recipe == "delayed" and modules & {"layernorm", "moe_act"}:
        names = " and ".join(sorted(modules & {"layernorm", "moe_act"}))
        message = f"{names} under delayed fp8 scaling"
        yield Broken("recompute_modules", message, f"{told.spelt('fp8_recipe')} tensorwise")


@RULES.trap(CONFIG)
def recompute_no_more_layers_than_there_are(told: Told) -> Iterator[Broken]:
    """The number of recomputed layers is that of each stage or virtual stage; more is taken as
    all of them.
    """
    if told.recompute_kind != "full" or told.recompute_layers is None or told.num_layers is None:
        return
    if told.stage_layout:
        most = max(stage.count("t") for stage in stage_layers(told.stage_layout))
    else:
        most = max(
            -(-told.num_layers // (told.pp * _chunks(told))),
            (told.first_layers or 0) // _chunks(told),
            (told.last_layers or 0) // _chunks(told),
        )
    if told.recompute_layers > most:
        message = f"{told.recompute_layers} recomputed layers where a stage has {most}"
        yield Broken("recompute_layers", message, f"at most {most}")


@RULES.trap(CONFIG)
def core_attention_with_flash(told: Told) -> Iterator[Broken]:
    """Recomputing core attention gains nothing with a flash or fused kernel, which keeps no scores;
    and full is named by no module.
    """
    selective = told.recompute_kind == "selective" or told.recompute_selective
    if selective and "core_attn" in modules_of(told) and told.attention not in ("unfused", "local"):
        message = f"core_attn recomputed with attention {told.attention}: no memory saved"
        yield Broken("recompute_modules", message, "other modules, or none")


@RULES.fails(ARGUMENTS)
def split_saved_activations(told: Told) -> Iterator[Broken]:
    """Saved activations are distributed over tensor ranks only with full recomputation and
    without sequence parallelism.
    """
    if not told.split_saved:
        return
    if told.tp == 1 or told.recompute_kind != "full" or told.sequence_parallel:
        message = (
            f"{told.spelt('split_saved')} needs tp, full recomputation and no sequence parallelism"
        )
        yield Broken("split_saved", message, "leave it out")


# --- data parallelism ------------------------------------------------------------------------


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
    if told.overlap_step and not (sharded and told.overlap_params and _chunks(told) > 1):
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


# --- batch, precision, model -----------------------------------------------------------------


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
