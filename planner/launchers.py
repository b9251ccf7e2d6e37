"""What each launcher can express: the rules by which ``--launcher`` restricts the space, and by
which an exporter refuses a plan. Both read the same table, so what is found can be exported.

Sources: the launchers' own argument checks, read in August 2026: Megatron-LM d98e8a6
``validate_args``, ``core/parallel_state.py`` and ``core/pipeline_parallel/schedules.py``;
torchtitan 0.3.0 and b5bcd76 ``ParallelDims``, ``Trainer.Config`` and ``distributed/fsdp.py``;
DeepSpeed 0.19.8 ``runtime/config.py``, ``runtime/pipe`` and ``module_inject/auto_ep_folding.py``;
Accelerate 1.15.0 ``ParallelismConfig``; Hetu-Galvatron cea12ff ``hybrid_parallel_config.py``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING

from costmodel.layout import ContextComm, RecomputeKind
from costmodel.schedules import SCHEDULES

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from costmodel.layout import Mesh, Recompute, Strategy

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
ALL_STAGES = (0, 1, 2, 3)
STAGES_INSIDE = "tp-cp-ep-dp-pp"
STAGES_BETWEEN = "tp-cp-ep-pp-dp"


# Rules by which choices that are each legal may not stand together.
REFUSING = (
    "zero",
    "zero_in_pipeline",
    "zero_in_context",
    "zero_in_tensor",
    "fills_stages",
    "rank_orders",
    "sequence_parallel",
    "cp_comm",
    "tensor_in_pipeline",
    "experts_in_pipeline",
    "shard_subgroups",
    "whole_context_shards",
    "copies_are_sharded",
    "experts_in_shard",
    "experts_in_copies",
    "recompute_needs_zero",
)


class Mixing(StrEnum):
    """Which mixes of recomputation one job may have."""

    PER_LAYER = "per-layer"  # any layer its own
    FIRST_OF_CHUNK = "first-of-chunk"  # the first N layers of every chunk in full, N one number
    WHOLE_MODEL = "whole-model"  # all layers alike


@dataclass(frozen=True, slots=True, kw_only=True)
class LauncherRules:
    """Limits of one launcher. ``zero_in_pipeline``: ZeRO stages that may run with pp > 1;
    ``zero_in_context`` with cp > 1, ``zero_in_tensor`` with tp and dp > 1.

    ``schedules``: those that it runs. Of these the search tries ``searched``, and those whose use
    is narrow only where they may pay (``planner.narrow``); any other where it is asked for.
    ``split_zero``: ZeRO stages that may run beside split backward passes. ``fills_stages``:
    schedules that need as many micro-batches as stages. ``rank_orders`` None:
    any. ``sequence_parallel``: what it may be where tp > 1. ``cp_comm``: how keys and values get
    around, the usual way first. ``whole_context_shards``: the ranks
    of a context group always share one shard group. ``copies_are_sharded``: with tp or cp several
    copies of the states need data parallel shards too. ``experts_in_shard``: the groups that
    exchange tokens lie inside a shard group; ``experts_in_copies``: each copy of the states has as
    many replicas of the experts. ``recompute_needs_zero``: the wrapper that shards is the one that
    recomputes. ``empty_stages``: a stage may hold no block. ``mixes_degrees``: layers of one job
    may differ in tp, dp and ZeRO stage; ``tied_alike``: but not an embedding and a head that share
    a matrix.
    """

    name: str
    schedules: tuple[str, ...] = ("1f1b", "interleaved-1f1b", "gpipe")
    searched: tuple[str, ...] = ("1f1b", "interleaved-1f1b")
    split_zero: tuple[int, ...] = ALL_STAGES
    fills_stages: tuple[str, ...] = ()
    zero: tuple[int, ...] = ALL_STAGES
    zero_in_pipeline: tuple[int, ...] = ALL_STAGES
    zero_in_context: tuple[int, ...] = ALL_STAGES
    zero_in_tensor: tuple[int, ...] = ALL_STAGES
    rank_orders: tuple[str, ...] | None = (STAGES_INSIDE,)
    sequence_parallel: tuple[bool, ...] = (False, True)
    cp_comm: tuple[ContextComm, ...] = (ContextComm.RING, ContextComm.GATHER)
    shard_subgroups: bool = True
    whole_context_shards: bool = False
    copies_are_sharded: bool = False
    experts_in_shard: bool = False
    experts_in_copies: bool = False
    mixing: Mixing = Mixing.WHOLE_MODEL
    mixes_degrees: bool = False
    tied_alike: bool = False
    selective: bool = True
    recompute_needs_zero: bool = False
    uneven_stages: bool = True
    empty_stages: bool = True
    replicates_kv_heads: bool = False
    tensor: bool = True
    tensor_in_pipeline: bool = True
    context: bool = True
    pipeline: bool = True
    experts: bool = True
    experts_in_pipeline: bool = True
    expert_tensor: bool = True

    @property
    def refuses(self) -> bool:
        """Whether ``refusals`` can find anything."""
        usual = LauncherRules(name=self.name, rank_orders=None)
        return any(getattr(self, name) != getattr(usual, name) for name in REFUSING)

    def refusals(
        self,
        mesh: Mesh,
        plain: Strategy,
        recomputes: Iterable[Recompute] = (),
        *,
        schedule: str,
        microbatches: int,
    ) -> Iterator[tuple[str, str]]:
        """(choice, why) of what the launcher cannot express among choices that are each legal.

        ``plain`` is the strategy of a layer, ``recomputes`` are what layers may recompute.
        """
        zero = plain.zero
        for others, allowed in (
            (f"pp {mesh.pp}" if mesh.pp > 1 else "", self.zero_in_pipeline),
            (f"cp {mesh.cp}" if mesh.cp > 1 else "", self.zero_in_context),
            (f"tp {mesh.tp}" if mesh.tp > 1 and mesh.dp > 1 else "", self.zero_in_tensor),
            ("no other choice", self.zero),
        ):
            if others and zero not in allowed:
                yield "zero", f"ZeRO-{zero} with {others}"
                break
        if schedule in self.fills_stages and microbatches < mesh.pp:
            yield "schedule", f"{schedule} with {microbatches} micro-batches for {mesh.pp} stages"
        order = "-".join(axis.value for axis in mesh.order)
        if self.rank_orders is not None and not _same_numbering(mesh, order, self.rank_orders):
            yield "rank_order", f"ranks in the order {order}"
        yield from self._sequences(mesh, plain)
        if mesh.tp > 1 and mesh.pp > 1 and not self.tensor_in_pipeline:
            yield "tp", f"tp {mesh.tp} with pp {mesh.pp}"
        if mesh.ep > 1 and mesh.pp > 1 and not self.experts_in_pipeline:
            yield "ep", f"ep {mesh.ep} with pp {mesh.pp}"
        yield from self._sharding(mesh, plain)
        if self.recompute_needs_zero and zero == 0:
            kinds = {option.kind for option in recomputes}
            if kinds and RecomputeKind.NONE not in kinds:
                yield "recompute", "recomputation without sharding"

    def _sequences(self, mesh: Mesh, plain: Strategy) -> Iterator[tuple[str, str]]:
        if mesh.tp > 1 and plain.sequence_parallel not in self.sequence_parallel:
            what = "with" if plain.sequence_parallel else "without"
            yield "sequence_parallel", f"tp {what} sequence parallelism"
        if mesh.cp > 1 and plain.cp_comm not in self.cp_comm:
            yield "cp_comm", f"cp {mesh.cp} by {plain.cp_comm}"

    def _sharding(self, mesh: Mesh, plain: Strategy) -> Iterator[tuple[str, str]]:
        replicas = mesh.dp * mesh.cp
        group = plain.shard_group if plain.zero else 1
        inside, copies = group * mesh.tp, replicas // group
        if plain.zero and group < replicas and not self.shard_subgroups:
            yield "shard_group", f"states sharded over {group} of {replicas} replicas"
        elif plain.zero and self.whole_context_shards and group % mesh.cp:
            yield "shard_group", f"a shard group of {group} that cuts cp {mesh.cp} apart"
        elif self.copies_are_sharded and copies > 1 and mesh.tp * mesh.cp > 1 and group <= mesh.cp:
            yield "shard_group", f"{copies} copies of states that no data parallel ranks share"
        elif self.experts_in_shard and inside % mesh.ep:
            over = f"the {inside} ranks that share states" if inside > 1 else "one rank's states"
            yield "ep", f"ep {mesh.ep} beyond {over}"
        elif plain.zero and self.experts_in_copies and mesh.expert_dp % copies:
            message = f"{copies} copies of the states with {mesh.expert_dp} replicas of the experts"
            yield "shard_group", message


def _same_numbering(mesh: Mesh, order: str, allowed: tuple[str, ...]) -> bool:
    """Whether an allowed order numbers the ranks alike: axes of size one may stand anywhere."""
    sizes = {"tp": mesh.tp, "cp": mesh.cp, "dp": mesh.dp, "pp": mesh.pp}

    def walked(text: str) -> list[str]:
        return [axis for axis in text.split("-") if sizes.get(axis, 1) > 1]

    return any(walked(order) == walked(each) for each in allowed)


MEGATRON = LauncherRules(
    name="megatron",
    schedules=("1f1b", "interleaved-1f1b"),
    zero_in_pipeline=(0, 1),
    experts_in_copies=True,
    rank_orders=(STAGES_INSIDE, STAGES_BETWEEN),
    mixing=Mixing.FIRST_OF_CHUNK,
    replicates_kv_heads=True,
)
LAUNCHERS = {
    rules.name: rules
    for rules in (
        LauncherRules(
            name="any",
            schedules=tuple(SCHEDULES),
            searched=("1f1b", "interleaved-1f1b", "zb-h1", "v-half"),
            rank_orders=None,
            mixing=Mixing.PER_LAYER,
            mixes_degrees=True,
            replicates_kv_heads=True,
        ),
        LauncherRules(
            name="native",
            schedules=OF_TORCH,
            searched=("1f1b", "interleaved-1f1b", "zbv"),
            split_zero=(0, 1),
            fills_stages=("1f1b",),
            rank_orders=None,
            mixing=Mixing.PER_LAYER,
            mixes_degrees=True,
            tied_alike=True,
        ),
        MEGATRON,
        replace(MEGATRON, name="megatron-bridge"),
        LauncherRules(
            name="torchtitan",
            schedules=OF_TORCH,
            searched=("1f1b", "interleaved-1f1b", "zbv"),
            split_zero=(0, 2),
            fills_stages=("1f1b",),
            zero=(0, 2, 3),
            zero_in_context=(2, 3),
            cp_comm=(ContextComm.GATHER,),  # rotates by torch's default since 0.3
            whole_context_shards=True,
            experts_in_shard=True,
            selective=False,  # its own kind is by operator, not by module
            expert_tensor=False,
        ),
        LauncherRules(
            name="deepspeed",
            schedules=("1f1b",),
            searched=("1f1b",),
            zero_in_pipeline=(0, 1),
            sequence_parallel=(False,),
            shard_subgroups=False,  # MiCS was removed; hpZ shards weights a second time
            selective=False,
            uneven_stages=False,
            empty_stages=False,
            tensor_in_pipeline=False,
            context=False,
            experts_in_pipeline=False,
            expert_tensor=False,
        ),
        LauncherRules(
            name="accelerate",
            schedules=("1f1b",),
            searched=("1f1b",),
            zero=(0, 2, 3),
            zero_in_context=(2, 3),
            zero_in_tensor=(2, 3),
            sequence_parallel=(False,),
            whole_context_shards=True,
            copies_are_sharded=True,
            selective=False,
            recompute_needs_zero=True,
            pipeline=False,
            experts=False,
            expert_tensor=False,
        ),
        LauncherRules(
            name="galvatron",
            schedules=("1f1b", "gpipe"),
            searched=("1f1b",),
            zero=(0, 2, 3),
            sequence_parallel=(True,),
            cp_comm=(ContextComm.RING,),
            shard_subgroups=False,
            mixing=Mixing.PER_LAYER,
            mixes_degrees=True,
            selective=False,
            empty_stages=False,
            expert_tensor=True,
        ),
    )
}
