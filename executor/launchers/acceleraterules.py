"""Accelerate's rules: ``ParallelismConfig``, its FSDP plugin, and torch's own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from executor.launchers.accelerate import DDP, FSDP, FSDP2, STRATEGIES
from executor.launchers.rulebook import Broken, Rulebook, divisors, nearest_legal

if TYPE_CHECKING:
    from collections.abc import Iterator

    from executor.launchers.told import Told

__all__ = ["RULES"]

PARALLEL: Final = "parallelism_config.py"
PLUGIN: Final = "utils/dataclasses.py: FullyShardedDataParallelPlugin"
RULES: Final = Rulebook()


def _product(told: Told) -> int:
    return int(told.dp_replicate * told.dp_shard * told.tp * told.cp * told.ulysses)


def _states_axes(told: Told) -> bool:
    return any(told.says(axis) for axis in ("dp_replicate", "dp_shard", "tp", "cp", "ulysses"))


@RULES.fails(f"{PARALLEL}: _validate_accelerator")
def axes_fill_the_processes(told: Told) -> Iterator[Broken]:
    """The product of the axes is the number of processes."""
    if not _states_axes(told) or told.ulysses > 1 or _product(told) == 1:
        return
    for count in (told.processes, told.num_gpus):
        if count and _product(told) != count:
            message = f"replicate x shard x tp x cp = {_product(told)} for {count} processes"
            inner = told.dp_replicate * told.tp * told.cp
            valid = f"{told.spelt('dp_shard')} {count // inner}" if count % inner == 0 else ""
            yield Broken("processes", message, valid)
            return


@RULES.fails(PARALLEL)
def replicas_with_tensor_or_context(told: Told) -> Iterator[Broken]:
    """Replicas with tensor or context parallelism need sharding too."""
    if max(told.tp, told.cp) > 1 and told.dp_replicate > 1 and told.dp_shard == 1:
        message = f"dp_replicate {told.dp_replicate} with tp {told.tp}, cp {told.cp} and no shards"
        yield Broken("dp_replicate", message, "dp_shard above 1, or dp_replicate 1")


@RULES.fails(PARALLEL)
def context_or_ulysses(told: Told) -> Iterator[Broken]:
    """Context parallelism and Ulysses sequence parallelism exclude one another."""
    if told.cp > 1 and told.ulysses > 1:
        yield Broken("ulysses", f"cp {told.cp} with sp {told.ulysses}", "one of them")


@RULES.fails(PARALLEL)
def backends(told: Told) -> Iterator[Broken]:
    """Context parallelism is torch's, sequence parallelism DeepSpeed's."""
    if told.cp_backend != "torch":
        yield Broken("cp_backend", f"cp_backend {told.cp_backend}", "torch")
    if told.ulysses_backend != "deepspeed":
        yield Broken("ulysses_backend", f"sp_backend {told.ulysses_backend}", "deepspeed")


@RULES.fails(f"{PARALLEL}: _validate_accelerator")
def axes_need_the_second_fsdp(told: Told) -> Iterator[Broken]:
    """Axes of parallelism need FSDP of version 2, plain data parallelism or DeepSpeed."""
    kind = str(told.kind).upper()
    if _product(told) == 1:
        return
    if kind == FSDP and told.fsdp_version < FSDP2:
        yield Broken("fsdp_version", "axes of parallelism with FSDP of version 1", "2")
    elif kind not in (FSDP, DDP, "DEEPSPEED", "MULTI_XPU", "MULTI_CPU"):
        yield Broken(
            "kind", f"axes of parallelism with {told.kind}", "FSDP, MULTI_GPU or DEEPSPEED"
        )


@RULES.fails(PLUGIN)
def resharding_as_the_version_wants(told: Told) -> Iterator[Broken]:
    """FSDP2 says true or false of resharding, FSDP1 names a strategy; FSDP2 has no forward
    prefetch.
    """
    if str(told.kind).upper() != FSDP:
        return
    text = str(told.reshard).lower()
    if told.fsdp_version >= FSDP2:
        if told.says("reshard") and text not in ("true", "false"):
            yield Broken("reshard", f"reshard_after_forward {told.reshard}", "true or false")
        if told.prefetch:
            yield Broken("prefetch", "forward prefetch with FSDP2", "false")
    elif told.says("reshard") and text in ("true", "false"):
        yield Broken("reshard", "a resharding flag with FSDP of version 1", ", ".join(STRATEGIES))


@RULES.fails("big_modeling, transformers' tp_plan: key/value heads")
def tensor_divides_heads(told: Told) -> Iterator[Broken]:
    """Tensor parallelism divides the key/value heads."""
    heads = told.kv_heads
    if heads and heads % told.tp:
        message = f"{heads} key/value heads do not divide by tp {told.tp}"
        yield Broken("tp", message, nearest_legal(told.tp, divisors(heads)))


@RULES.fails("torch.distributed.tensor.experimental.context_parallel")
def context_divides_the_sequence(told: Told) -> Iterator[Broken]:
    """The sequence length is a multiple of twice the context parallel degree."""
    if told.cp > 1 and told.seq_len and told.seq_len % (2 * told.cp):
        message = f"{told.seq_len} tokens do not divide by 2 x cp {told.cp}"
        yield Broken("seq_len", message, f"a multiple of {2 * told.cp}")


@RULES.trap(PLUGIN)
def sharding_strategy_in_the_second_fsdp(told: Told) -> Iterator[Broken]:
    """FSDP2 does not read a sharding strategy: only reshard_after_forward counts."""
    fsdp2 = str(told.kind).upper() == FSDP and told.fsdp_version >= FSDP2
    if fsdp2 and told.says("strategy") and not told.says("reshard"):
        message = f"{told.spelt('strategy')} {told.strategy} with FSDP2"
        yield Broken("strategy", message, told.spelt("reshard"))


@RULES.trap(f"{PARALLEL}: ParallelismConfig")
def only_axes_no_fsdp_section(told: Told) -> Iterator[Broken]:
    """Without axes FSDP shards over all processes."""
    hybrid = "HYBRID" in str(told.strategy).upper() or str(told.strategy) in ("4", "5")
    if str(told.kind).upper() == FSDP and told.fsdp_version >= FSDP2 and hybrid:
        message = "hybrid sharding with FSDP2 is said by its axes"
        yield Broken(
            "strategy", message, f"{told.spelt('dp_replicate')} and {told.spelt('dp_shard')}"
        )
