"""torchtitan's rules: ``ParallelDims``, ``Trainer.Config`` and ``torch.distributed.pipelining``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from executor.launchers import commonrules as common
from executor.launchers.commonrules import multiples
from executor.launchers.rulebook import Broken, Rulebook, divisors, nearest_legal
from executor.launchers.torchtitan import ONE_STAGE, SCHEDULES, hear

if TYPE_CHECKING:
    from collections.abc import Iterator

    from executor.launchers.told import Told

__all__ = ["RULES"]

DIMS = "distributed/parallel_dims.py"
TRAINER = "trainer.py: Trainer.Config"
PIPELINE = "distributed/pipeline_parallel.py"
TORCH = "torch.distributed.pipelining.schedules"
V_SHAPED = ("ZBVZeroBubble", "DualPipeV")
ROUNDS = ("Interleaved1F1B", "InterleavedZeroBubble")
SPLIT = (*V_SHAPED, "InterleavedZeroBubble")

RULES = Rulebook(*common.HEADS, *common.WIDTHS, *common.SEQUENCE)


def _shard(told: Told) -> int:
    inner: int = told.dp_replicate * told.cp * told.tp * told.pp
    stated: int = told.dp_shard
    return stated if stated > 0 else max(1, told.num_gpus // inner)


@RULES.fails(DIMS)
def degrees_fill_the_world(told: Told) -> Iterator[Broken]:
    """dp_replicate x dp_shard x cp x tp x pp is the number of GPUs."""
    product = told.dp_replicate * _shard(told) * told.cp * told.tp * told.pp
    if product != told.num_gpus:
        message = f"replicate x shard x cp x tp x pp = {product} on {told.num_gpus} GPUs"
        inner = told.cp * told.tp * told.pp
        valid = (
            f"{told.num_gpus // inner} data parallel ranks"
            if told.num_gpus % inner == 0
            else (f"{multiples(told.num_gpus, inner)} GPUs")
        )
        yield Broken("dp_shard", message, valid)


@RULES.fails(DIMS)
def experts_inside_shards(told: Told) -> Iterator[Broken]:
    """Expert parallelism divides dp_shard x cp x tp."""
    inside = _shard(told) * told.cp * told.tp
    if inside % told.ep:
        message = f"ep {told.ep} does not divide dp_shard x cp x tp = {inside}"
        yield Broken("ep", message, nearest_legal(told.ep, divisors(inside)))


@RULES.fails("models/common/moe: grouped experts (torchtitan pull 4258)")
def experts_divide(told: Told) -> Iterator[Broken]:
    """Expert parallelism divides the experts."""
    if told.num_experts and told.num_experts % told.ep:
        message = f"{told.num_experts} experts do not divide by ep {told.ep}"
        yield Broken("ep", message, nearest_legal(told.ep, divisors(told.num_experts)))


@RULES.fails(TRAINER)
def no_graphs_in_a_pipeline(told: Told) -> Iterator[Broken]:
    """CUDA graphs, on by default since 0.3.0, do not go with a pipeline."""
    if told.pp > 1 and not told.no_graphs:
        yield Broken("no_graphs", f"pp {told.pp} with CUDA graphs", f"{told.spelt('no_graphs')}")


@RULES.fails(TRAINER)
def pipeline_micro_batches_divide(told: Told) -> Iterator[Broken]:
    """In a pipeline the local batch is a multiple of its micro-batch."""
    if "local_batch" not in told.keys or told.pp == 1:
        return
    if told.local_batch % told.pp_micro_batch:
        message = f"a local batch of {told.local_batch} in micro-batches of {told.pp_micro_batch}"
        legal = nearest_legal(told.pp_micro_batch, divisors(told.local_batch))
        yield Broken("pp_micro_batch", message, legal)


@RULES.fails(TRAINER)
def step_has_whole_batches(told: Told) -> Iterator[Broken]:
    """A step is a multiple of what all data parallel ranks take at once."""
    dp = told.dp_replicate * _shard(told)
    if "local_batch" in told.keys:
        unit, step, fact = told.local_batch * dp, told.batch, "batch"
    else:
        count = told.num_pp_microbatches if told.pp > 1 else 1
        unit, step, fact = told.micro_tokens * dp * count, told.step_tokens, "step_tokens"
    if step > 0 and step % unit:
        message = f"{step} a step for {unit} at once on {dp} data parallel ranks"
        yield Broken(fact, message, multiples(step, unit))


@RULES.fails("components/dataloader: packed sequences")
def tokens_hold_sequences(told: Told) -> Iterator[Broken]:
    """A micro-batch of tokens holds whole sequences."""
    if "micro_tokens" in told.keys and told.micro_tokens % told.seq_len:
        message = f"{told.micro_tokens} tokens in sequences of {told.seq_len}"
        yield Broken("micro_tokens", message, multiples(told.micro_tokens, told.seq_len))


@RULES.fails(TRAINER)
def memory_budget_is_compiled(told: Told) -> Iterator[Broken]:
    """A memory budget for activations needs the model compiled."""
    budget = (told.recompute_mode or told.recompute) in ("memory-budget", "memory_budget")
    if budget and not (told.compile and "model" in told.compiled):
        yield Broken("compile", "a memory budget without a compiled model", told.spelt("compile"))


@RULES.fails("config/configs.py: CompileConfig")
def async_tensor_parallel_is_compiled(told: Told) -> Iterator[Broken]:
    """Asynchronous tensor parallelism needs the model compiled."""
    if told.async_tp and not (told.compile and "model" in told.compiled):
        yield Broken("async_tp", "async tensor parallel without compile", told.spelt("compile"))


@RULES.fails(f"{TORCH}: get_schedule_class")
def schedule_exists(told: Told) -> Iterator[Broken]:
    """The schedule is one of torch's."""
    known = [*SCHEDULES.values(), "LoopedBFS", "PipelineScheduleSingle", "PipelineScheduleMulti"]
    if told.pp > 1 and told.pp_schedule.lower() not in [name.lower() for name in known]:
        message = f"there is no schedule {told.pp_schedule}"
        yield Broken("pp_schedule", message, ", ".join(SCHEDULES.values()))


@RULES.fails(PIPELINE)
def stages_divide(told: Told) -> Iterator[Broken]:
    """The number of stages is a multiple of pp: one each for GPipe and 1F1B, two each for the
    V-shaped schedules, at least two each for the others.
    """
    if told.pp == 1 or not told.stage_modules:
        return
    stages, pp, schedule = len(told.stage_modules), told.pp, told.pp_schedule
    each, rest = divmod(stages, pp)
    if rest:
        yield Broken("stage_modules", f"{stages} stages for pp {pp}", multiples(stages, pp))
    elif schedule in ONE_STAGE and each != 1:
        yield Broken("stage_modules", f"{each} stages a rank with {schedule}", f"{pp} stages")
    elif schedule in V_SHAPED and each != 2:  # noqa: PLR2004 - down and up
        yield Broken("stage_modules", f"{each} stages a rank with {schedule}", f"{2 * pp} stages")
    elif schedule in ROUNDS and each == 1:
        message = f"one stage a rank with {schedule}"
        yield Broken("stage_modules", message, f"{2 * pp} or {3 * pp} stages")


@RULES.fails(PIPELINE)
def stages_hold_each_layer_once(told: Told) -> Iterator[Broken]:
    """Every layer of the model stands in one stage."""
    if told.pp == 1 or not told.stage_modules or told.num_layers is None:
        return
    sizes = hear(told).blocks or ()
    if sum(sizes) != told.num_layers:
        message = f"{sum(sizes)} layers in the stages of a model of {told.num_layers}"
        yield Broken(
            "stage_modules", message, f"layers.0 to layers.{told.num_layers - 1}, each once"
        )


@RULES.fails(TORCH)
def enough_micro_batches(told: Told) -> Iterator[Broken]:
    """1F1B needs as many micro-batches as stages, Interleaved1F1B and InterleavedZeroBubble a
    multiple of the rounds that they make of them, DualPipeV twice as many as pp.
    """
    if told.pp == 1:
        return
    heard = hear(told)
    if "local_batch" in told.keys:
        count = max(1, told.local_batch // (heard.micro_batch or 1))
        fact = "local_batch"
    else:
        count, fact = told.num_pp_microbatches, "num_pp_microbatches"
    pp, schedule = told.pp, told.pp_schedule
    rounds = max(1, count // pp)
    if schedule == "1F1B" and count < pp:
        yield Broken(fact, f"{count} micro-batches for {pp} stages of 1F1B", f"at least {pp}")
    elif schedule in ROUNDS and count % rounds:
        message = f"{count} micro-batches do not divide by {rounds} rounds"
        yield Broken(fact, message, multiples(count, pp))
    elif schedule == "DualPipeV" and count < 2 * pp:
        yield Broken(fact, f"{count} micro-batches for DualPipeV at pp {pp}", f"at least {2 * pp}")


@RULES.trap("torch's FSDP2 beside split backward passes (measured with torch 2.13)")
def split_backward_with_resharding(told: Told) -> Iterator[Broken]:
    """Schedules that split the backward pass give wrong gradients where FSDP frees parameters
    after the forward pass.
    """
    sharded = _shard(told) * told.cp > 1
    if told.pp > 1 and told.pp_schedule in SPLIT and sharded and told.reshard == "always":
        message = f"{told.pp_schedule} with parameters freed after the forward pass"
        yield Broken("reshard", message, "never")


@RULES.trap(f"{PIPELINE}: _get_pipeline_metadata")
def first_and_last_stage_have_fewer_layers(told: Told) -> Iterator[Broken]:
    """Without a list of modules the first and last stage get one layer less each, by default."""
    unstated = not (told.stage_modules or told.split_points or told.says("first_less"))
    if told.pp > 1 and unstated and told.num_layers:
        sizes = hear(told).blocks or ()
        if len(set(sizes)) > 1:
            message = f"stages of {', '.join(map(str, sizes))} layers"
            valid = f"{told.spelt('first_less')} 0 and {told.spelt('last_less')} 0 for an even cut"
            yield Broken("pp", message, valid)


@RULES.trap("distributed/fsdp.py: get_fsdp_reshard_after_forward_policy")
def default_resharding_in_a_pipeline(told: Told) -> Iterator[Broken]:
    """By default parameters stay gathered after the forward pass of a pipeline: ZeRO-2, not 3."""
    if told.pp > 1 and _shard(told) * told.cp > 1 and told.reshard == "default":
        yield Broken(
            "reshard", "parameters stay gathered in a pipeline (ZeRO-2)", "always or never"
        )


@RULES.fails("tyro: a subcommand ends the options before it")
def recomputation_stands_last(told: Told) -> Iterator[Broken]:
    """activation_checkpoint:KIND stands behind all other flags; those behind it are refused."""
    if told.given.get("recompute_last") is False:
        yield Broken("recompute", "flags behind activation_checkpoint:KIND", "in front of it")


@RULES.fails("torchtitan#1147")
def connections(told: Told) -> Iterator[Broken]:
    """FSDP needs CUDA_DEVICE_MAX_CONNECTIONS unset or above 1."""
    if told.environment.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1":
        yield Broken("dp_shard", "CUDA_DEVICE_MAX_CONNECTIONS is 1 with FSDP", "unset")
