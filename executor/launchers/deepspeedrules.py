"""DeepSpeed's rules: its configuration, its pipeline engine, and the groups of its ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from executor.launchers.rulebook import Broken, Rulebook, divisors, nearest_legal

if TYPE_CHECKING:
    from collections.abc import Iterator

    from executor.launchers.told import Told

__all__ = ["RULES"]

CONFIG: Final = "runtime/config.py"
GATHERS, SHARDS_GRADIENTS = 3, 2  # stages of ZeRO
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
