"""Hetu-Galvatron's rules, as its runtime checks a plan or silently reads it otherwise."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from executor.launchers.galvatron import SCHEDULES, layer_values
from executor.launchers.rulebook import Broken, Rulebook, divisors, nearest_legal

if TYPE_CHECKING:
    from collections.abc import Iterator

    from executor.launchers.told import Told

__all__ = ["RULES"]

RUNTIME: Final = "core/runtime/hybrid_parallel_config.py"
RULES: Final = Rulebook()


@RULES.fails(f"{RUNTIME}: check_hp_config")
def lists_have_a_value_for_each_layer(told: Told) -> Iterator[Broken]:
    """Every list has as many values as the model has layers."""
    if told.tp_sizes is None:
        yield Broken("tp_sizes", "tp_sizes_enc is missing", "one value a layer")
        return
    layers = told.model_facts.get("num_layers") or len(layer_values(told, "tp_sizes"))
    for fact in ("tp_sizes", "consecutive", "dp_types", "checkpoints", "cp_sizes", "ulysses"):
        if told.says(fact) and len(layer_values(told, fact)) != layers:
            message = (
                f"{len(layer_values(told, fact))} values in {told.spelt(fact)} for {layers} layers"
            )
            yield Broken(fact, message, f"{layers} values")


@RULES.fails(f"{RUNTIME}: check_hp_config")
def tensor_divides_the_stage(told: Told) -> Iterator[Broken]:
    """The tensor parallel degree of every layer divides the ranks of a stage."""
    ranks = told.num_gpus // told.pp
    if told.num_gpus % told.pp:
        yield Broken("pp", f"{told.num_gpus} GPUs for {told.pp} stages", f"a multiple of {told.pp}")
        return
    for size in sorted(set(layer_values(told, "tp_sizes"))):
        if size < 1 or ranks % size:
            message = f"tp {size} on the {ranks} ranks of a stage"
            yield Broken("tp_sizes", message, nearest_legal(size, divisors(ranks)))


@RULES.fails(f"{RUNTIME}: get_hybrid_parallel_configs_api")
def batch_divides(told: Told) -> Iterator[Broken]:
    """The batch is a multiple of the ranks of a stage over the least tp and cp, vocabulary
    included.
    """
    if not told.global_batch or told.tp_sizes is None:
        return
    least_tp = min(*layer_values(told, "tp_sizes"), told.vocab_tp)
    least_cp = min(*layer_values(told, "cp_sizes", 1), told.vocab_cp)
    unit = max(1, told.num_gpus // told.pp // max(1, least_tp) // max(1, least_cp))
    if told.global_batch % unit:
        low = told.global_batch // unit * unit
        message = f"global_bsz {told.global_batch} for {unit} data parallel ranks"
        yield Broken("global_batch", message, f"{low or unit} or {low + unit}")


@RULES.fails(RUNTIME)
def runtime_needs_batch_and_chunks(told: Told) -> Iterator[Broken]:
    """The runtime reads global_bsz and chunks, which a plan of another search may lack (it has
    world_size instead).
    """
    for fact in ("global_batch", "chunks"):
        if getattr(told, fact) is None:
            yield Broken(fact, f"{told.spelt(fact)} is missing", "at least 1")


@RULES.fails(f"{RUNTIME}: get_pp_ranks_enc")
def division_covers_the_layers(told: Told) -> Iterator[Broken]:
    """pp_division has one number a stage, and they add up to the layers."""
    if not told.division:
        return
    sizes, layers = layer_values(told, "division"), len(layer_values(told, "tp_sizes"))
    if len(sizes) != told.pp or sum(sizes) != layers or min(sizes) < 1:
        message = f"pp_division {told.division} for {told.pp} stages of {layers} layers"
        yield Broken("division", message, f"{told.pp} numbers that add up to {layers}")


@RULES.fails(f"{RUNTIME}: check_hp_config")
def flags_are_zero_or_one(told: Told) -> Iterator[Broken]:
    """Consecutive, ZeRO and checkpoint flags are 0 or 1."""
    for fact in ("consecutive", "dp_types", "checkpoints", "ulysses"):
        wrong = {value for value in layer_values(told, fact) if value not in (0, 1)}
        if wrong:
            yield Broken(fact, f"{min(wrong)} in {told.spelt(fact)}", "0 or 1")


@RULES.fails("core/runtime/args_schema.py")
def names_exist(told: Told) -> Iterator[Broken]:
    """Pipelines are gpipe or pipedream_flush, data parallelism ddp, zero2 or zero3."""
    if told.pipeline not in SCHEDULES.values():
        yield Broken("pipeline", f"pipeline_type {told.pipeline}", ", ".join(SCHEDULES.values()))
    if told.default_dp not in ("ddp", "zero2", "zero3"):
        yield Broken("default_dp", f"default_dp_type {told.default_dp}", "ddp, zero2 or zero3")


@RULES.trap(f"{RUNTIME}: only vocab_sdp is read")
def old_name_of_vocabulary_sharding(told: Told) -> Iterator[Broken]:
    """embed_sdp, as the search and the example write it, is not read by the runtime."""
    if told.says("embed_sdp") and not told.says("vocab_sdp") and told.embed_sdp:
        message = "embed_sdp is ignored: embedding and head are not sharded"
        yield Broken("embed_sdp", message, "vocab_sdp")


@RULES.trap("core/runtime: micro-batches of unequal size")
def micro_batches_are_equal(told: Told) -> Iterator[Broken]:
    """The batch of a replica is a multiple of its chunks."""
    if not (told.global_batch and told.chunks and told.tp_sizes):
        return
    least = max(1, min(layer_values(told, "tp_sizes")) * min(layer_values(told, "cp_sizes", 1)))
    dp = max(1, told.num_gpus // told.pp // least)
    share = told.global_batch // dp
    if share % told.chunks:
        message = f"{share} sequences of a replica in {told.chunks} chunks"
        yield Broken("chunks", message, nearest_legal(told.chunks, divisors(share)))
