"""What each launcher can express: the rules by which ``--launcher`` restricts the space.

Sources: the launchers' own argument checks (Megatron-LM ``validate_args`` and
``core/pipeline_parallel/schedules.py``, torchtitan ``ParallelDims``, DeepSpeed
``runtime/pipe/engine.py``, Accelerate ``ParallelismConfig``), read in August 2026.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from costmodel.schedules import SCHEDULES

__all__ = ["LAUNCHERS", "LauncherRules", "Mixing"]

# torch.distributed.pipelining; its split backward passes give wrong gradients beside FSDP2 that
# frees parameters after the forward pass (ZeRO-3), or reduces gradients in every micro-batch
# (ZeRO-2) before the weight passes have made them.
OF_TORCH = (
    "gpipe",
    "1f1b",
    "interleaved-1f1b",
    "interleaved-zb",
    "zbv",
    "dualpipe-v",
)


class Mixing(StrEnum):
    """Which mixes of recomputation one job may have."""

    PER_LAYER = "per-layer"  # any layer its own
    FIRST_OF_CHUNK = "first-of-chunk"  # the first N layers of every chunk in full, N one number
    WHOLE_MODEL = "whole-model"  # all layers alike


@dataclass(frozen=True, slots=True, kw_only=True)
class LauncherRules:
    """Limits of one launcher. ``zero_in_pipeline``: ZeRO stages that may run with pp > 1.

    ``schedules``: those that it runs. Of these the search tries ``searched``, and those whose use
    is narrow only where they may pay (``planner.narrow``); any other where it is asked for.
    ``split_zero``: ZeRO stages that may run beside split backward passes. ``mixes_degrees``:
    layers of one job may differ in tp, dp and ZeRO stage. ``full_pipelines``: 1F1B needs at least
    as many micro-batches as stages. ``planner.native`` has more rules of the native executor.
    """

    name: str
    schedules: tuple[str, ...] = ("1f1b", "interleaved-1f1b", "gpipe")
    searched: tuple[str, ...] = ("1f1b", "interleaved-1f1b")
    split_zero: tuple[int, ...] = (0, 1, 2, 3)
    zero: tuple[int, ...] = (0, 1, 2, 3)
    zero_in_pipeline: tuple[int, ...] = (0, 1, 2, 3)
    shard_subgroups: bool = True
    mixing: Mixing = Mixing.WHOLE_MODEL
    mixes_degrees: bool = False
    full_pipelines: bool = False
    selective: bool = True
    uneven_stages: bool = True
    replicates_kv_heads: bool = False
    tensor: bool = True
    context: bool = True
    pipeline: bool = True
    experts: bool = True
    expert_tensor: bool = True


LAUNCHERS = {
    rules.name: rules
    for rules in (
        LauncherRules(
            name="any",
            schedules=tuple(SCHEDULES),
            searched=("1f1b", "interleaved-1f1b", "zb-h1", "v-half"),
            mixing=Mixing.PER_LAYER,
            mixes_degrees=True,
            replicates_kv_heads=True,
        ),
        LauncherRules(
            name="native",
            schedules=OF_TORCH,
            searched=("1f1b", "interleaved-1f1b", "zbv"),
            split_zero=(0, 1),
            mixing=Mixing.PER_LAYER,
            full_pipelines=True,
            context=False,
            experts=False,
            expert_tensor=False,
        ),
        LauncherRules(
            name="megatron",
            schedules=("1f1b", "interleaved-1f1b"),
            zero_in_pipeline=(0, 1),
            mixing=Mixing.FIRST_OF_CHUNK,
            replicates_kv_heads=True,
        ),
        LauncherRules(
            name="megatron-bridge",
            schedules=("1f1b", "interleaved-1f1b"),
            zero_in_pipeline=(0, 1),
            mixing=Mixing.FIRST_OF_CHUNK,
            replicates_kv_heads=True,
        ),
        LauncherRules(
            name="torchtitan",
            schedules=OF_TORCH,
            searched=("1f1b", "interleaved-1f1b", "zbv"),
            split_zero=(0, 2),
            zero=(0, 2, 3),
            expert_tensor=False,
        ),
        LauncherRules(
            name="deepspeed",
            schedules=("1f1b",),
            searched=("1f1b",),
            zero_in_pipeline=(0, 1),
            selective=False,
            uneven_stages=False,
            context=False,
            expert_tensor=False,
        ),
        LauncherRules(
            name="accelerate",
            schedules=("1f1b",),
            searched=("1f1b",),
            zero=(0, 2, 3),
            selective=False,
            pipeline=False,
            experts=False,
            expert_tensor=False,
        ),
        LauncherRules(
            name="galvatron",
            schedules=("1f1b", "gpipe"),
            searched=("1f1b",),
            zero=(0, 2, 3),
            shard_subgroups=False,
            mixing=Mixing.PER_LAYER,
            mixes_degrees=True,
            selective=False,
            expert_tensor=True,
        ),
    )
}
