"""The legal space: which layouts are considered at all, and why others are not.

A *candidate* fixes everything but where the chain is cut and which recomputation each layer
takes: degrees, micro-batch, chunks, ZeRO stage, rank order. The rules are the launchers' and the
model's divisibility, stated one by one in the order in which they are tried.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product
from typing import TYPE_CHECKING, NamedTuple

from costmodel.layout import NO_RECOMPUTE, Axis, Mesh, Recompute, RecomputeKind, Strategy
from costmodel.schedules import SCHEDULES, Shape
from planner.launchers import LAUNCHERS, LauncherRules, Mixing
from planner.narrow import NARROW, Pipeline
from profiles.layers import Block, CustomLayer, ExpertFeedForward

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from profiles.cluster import ClusterSpec
    from profiles.model import ModelSpec
    from profiles.training import TrainingSpec

__all__ = ["CHOICES", "Candidate", "Degrees", "Restrictions", "SearchSpace"]

ORDER_BY_STAGE = (Axis.TP, Axis.CP, Axis.EP, Axis.DP, Axis.PP)
ORDER_BY_REPLICA = (Axis.TP, Axis.CP, Axis.EP, Axis.PP, Axis.DP)
ORDERS = {"tp-cp-ep-dp-pp": ORDER_BY_STAGE, "tp-cp-ep-pp-dp": ORDER_BY_REPLICA}
LARGEST_MICRO_BATCH = 16
LARGEST_CHUNKS = 16
LARGEST_CP = 64
WEIGHTS_SHARDED = 3

# Schedules that one stage may be said to have.
WITHOUT_PIPELINE = ("1f1b", "gpipe")

# What --fix, --max and --exclude may name.
CHOICES = (
    "gpus",
    "tp",
    "cp",
    "ep",
    "expert_tp",
    "dp",
    "pp",
    "chunks",
    "micro_batch",
    "schedule",
    "zero",
    "shard_group",
    "recompute",
    "rank_order",
    "sequence_parallel",
)


class Degrees(NamedTuple):
    """The part of a candidate that decides its compute: everything before ZeRO."""

    tp: int
    cp: int
    ep: int
    expert_tp: int
    pp: int
    dp: int
    micro_batch: int
    chunks: int
    schedule: str
    sequence_parallel: bool


class Candidate(NamedTuple):
    """Degrees with ZeRO, rank order and the recomputations that its layers may mix."""

    degrees: Degrees
    zero: int
    shard_group: int
    rank_order: str
    recomputes: tuple[Recompute, ...]

    @property
    def mesh(self) -> Mesh:
        """How its ranks are numbered."""
        d = self.degrees
        return Mesh(
            tp=d.tp,
            cp=d.cp,
            dp=d.dp,
            pp=d.pp,
            ep=d.ep,
            expert_tp=d.expert_tp,
            order=ORDERS[self.rank_order],
        )

    @property
    def num_ranks(self) -> int:
        """GPUs that it uses."""
        d = self.degrees
        return d.tp * d.cp * d.dp * d.pp

    def microbatches(self, training: TrainingSpec) -> int:
        """Micro-batches of one replica in a step."""
        return training.global_batch // (self.degrees.dp * self.degrees.micro_batch)

    def strategy(self, recompute: Recompute = NO_RECOMPUTE) -> Strategy:
        """The strategy of a layer with ``recompute``."""
        d = self.degrees
        return Strategy(
            tp=d.tp,
            cp=d.cp,
            ep=d.ep,
            expert_tp=d.expert_tp,
            dp=d.dp,
            zero=self.zero,
            shard_group=self.shard_group,
            sequence_parallel=d.sequence_parallel,
            recompute=recompute,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Restrictions:
    """The user's own: values that a choice must have, at most, or must not have.

    Values are compared as text, so ``zero=3`` and ``schedule=1f1b`` are said alike.
    """

    fixed: Mapping[str, frozenset[str]] = field(default_factory=dict)
    at_most: Mapping[str, int] = field(default_factory=dict)
    excluded: Mapping[str, frozenset[str]] = field(default_factory=dict)
    tp_across_nodes: bool = False

    def allows(self, name: str, value: object) -> bool:
        """Whether ``name`` may have ``value``."""
        text = str(value).lower()
        if name in self.fixed and text not in self.fixed[name]:
            return False
        if text in self.excluded.get(name, ()):
            return False
        return not (isinstance(value, int) and value > self.at_most.get(name, value))


class SearchSpace:
    """All candidates of one problem. ``refused`` counts, by rule, what was left out."""

    def __init__(
        self,
        model: ModelSpec,
        cluster: ClusterSpec,
        training: TrainingSpec,
        *,
        launcher: str = "any",
        restrictions: Restrictions | None = None,
    ) -> None:
        """Read off the model what divisibility needs."""
        self.model = model
        self.cluster = cluster
        self.training = training
        self.rules: LauncherRules = LAUNCHERS[launcher]
        self.restrictions = restrictions or Restrictions()
        self.num_gpus = min(
            cluster.num_gpus, self.restrictions.at_most.get("gpus", cluster.num_gpus)
        )
        self.refused: Counter[str] = Counter()
        self._blocks = [run.layer for run in model.runs if isinstance(run.layer, Block)]
        self._experts = [
            block.feed_forward
            for block in self._blocks
            if isinstance(block.feed_forward, ExpertFeedForward)
        ]

    # --- degrees -----------------------------------------------------------------------------

    def degrees(self) -> Iterator[Degrees]:
        """Every legal combination, each with as many replicas as the cluster has room for."""
        for tp, cp in product(self.tp_degrees(), self.cp_degrees()):
            sequence_parallel = tp > 1 and self.sequence_splits(tp, cp)
            if not self.restrictions.allows("sequence_parallel", sequence_parallel):
                sequence_parallel = False
                if not self.restrictions.allows("sequence_parallel", sequence_parallel):
                    self.refused["sequence_parallel"] += 1
                    continue
            if self._experts and tp > 1 and not sequence_parallel:
                self.refused["experts with tp need sequence parallelism"] += 1
                continue
            for pp in self.pp_degrees(tp * cp):
                for dp, micro_batch in self._batches(tp * cp * pp):
                    for expert in self._expert_degrees(tp, cp * dp):
                        for schedule, chunks in self._schedules(tp, pp, dp, micro_batch):
                            yield Degrees(
                                tp, cp, *expert, pp, dp, micro_batch, chunks, schedule,
                                sequence_parallel,
                            )  # fmt: skip

    def tp_degrees(self) -> list[int]:
        """Degrees that divide heads, key/value heads and widths, inside a node."""
        limit = self.num_gpus
        if not self.restrictions.tp_across_nodes:
            limit = min(limit, self.cluster.gpus_per_node)
        return [tp for tp in range(1, limit + 1) if self._allows_tp(tp)]

    def tp_problem(self, tp: int) -> str | None:
        """The rule that forbids a tensor parallel degree, None if it is legal."""
        if tp == 1:
            return None
        if not self.rules.tensor:
            return f"{self.rules.name} has no tensor parallelism"
        if not self._blocks and not any(isinstance(r.layer, CustomLayer) for r in self.model.runs):
            return "tensor parallelism needs transformer blocks"
        problems = (self._undivided(block, tp) for block in self._blocks)
        return next((problem for problem in problems if problem), None)

    def _undivided(self, block: Block, tp: int) -> str | None:
        """What of a block a tensor parallel degree does not divide."""
        attention, feed_forward = block.attention, block.feed_forward
        if attention.heads % tp:
            return f"{attention.heads} heads do not divide by tp {tp}"
        kv = attention.heads if attention.latent else attention.kv_heads
        if kv % tp and not (self.rules.replicates_kv_heads and tp % kv == 0):
            return f"{kv} key/value heads do not divide by tp {tp} on {self.rules.name}"
        width = (
            feed_forward.shared_hidden
            if isinstance(feed_forward, ExpertFeedForward)
            else feed_forward.ffn_hidden
        )
        return f"feed-forward width {width} does not divide by tp {tp}" if width % tp else None

    def _allows_tp(self, tp: int) -> bool:
        if not self.restrictions.allows("tp", tp):
            return False
        problem = self.tp_problem(tp)
        if problem:
            self.refused["tp does not divide the model"] += 1
        return problem is None

    def cp_degrees(self) -> list[int]:
        """Degrees that cut each sequence into 2 cp equal pieces (for causal balance)."""
        limit = min(LARGEST_CP, self.num_gpus)
        return [
            cp
            for cp in range(1, limit + 1)
            if self.cp_problem(cp) is None and self.restrictions.allows("cp", cp)
        ]

    def cp_problem(self, cp: int) -> str | None:
        """The rule that forbids a context parallel degree, None if it is legal."""
        if cp == 1:
            return None
        if not self.rules.context:
            return f"{self.rules.name} has no context parallelism"
        if not self._blocks:
            return "context parallelism needs transformer blocks"
        if self.training.seq_len % (2 * cp):
            return f"seq_len {self.training.seq_len} does not divide by 2 x cp {cp}"
        return None

    def sequence_splits(self, tp: int, cp: int) -> bool:
        """Whether sequence parallelism divides what context parallelism leaves of a sequence."""
        return -(-self.training.seq_len // cp) % tp == 0

    def pp_degrees(self, ranks: int) -> list[int]:
        """Stages: at most one per block, and within the cluster."""
        most = min(max(1, self.model.num_blocks), self.num_gpus // ranks)
        return [pp for pp in range(1, most + 1) if self._allows_pp(pp)]

    def pp_problem(self, pp: int) -> str | None:
        """The rule that forbids a number of stages, None if it is legal."""
        blocks = max(1, self.model.num_blocks)
        if pp == 1:
            return None
        if not self.rules.pipeline:
            return f"{self.rules.name} has no pipeline"
        if pp > blocks:
            return f"pp {pp} stages for {blocks} layers"
        if not self.rules.uneven_stages and blocks % pp:
            return f"{blocks} layers do not divide by pp {pp}, which {self.rules.name} needs"
        return None

    def _allows_pp(self, pp: int) -> bool:
        if not self.restrictions.allows("pp", pp):
            return False
        problem = self.pp_problem(pp)
        if problem:
            self.refused["layers do not divide by pp"] += 1
        return problem is None

    def _batches(self, ranks: int) -> Iterator[tuple[int, int]]:
        """(dp, micro-batch): the most replicas with which the global batch divides."""
        batch = self.training.global_batch
        allows, room = self.restrictions.allows, min(self.num_gpus // ranks, batch)
        dp = next(
            (
                n
                for n in range(room, 0, -1)
                if batch % n == 0 and allows("dp", n) and allows("gpus", n * ranks)
            ),
            None,
        )
        if dp is None:
            self.refused["global batch does not divide"] += 1
            return
        share = batch // dp
        wanted = self.training.micro_batch
        sizes = range(1, min(share, LARGEST_MICRO_BATCH) + 1) if wanted is None else (wanted,)
        for size in sizes:
            if share % size:
                self.refused["global batch does not divide"] += 1
            elif allows("micro_batch", size):
                yield dp, size

    def _expert_degrees(self, tp: int, replicas: int) -> Iterator[tuple[int, int]]:
        """(ep, expert_tp) that divide the experts and the ranks of a stage."""
        if not self._experts or not self.rules.experts:
            if self.restrictions.allows("ep", 1):
                yield 1, tp if self._experts else 1
            return
        experts = min(layer.num_experts for layer in self._experts)
        widths = {layer.expert_hidden for layer in self._experts}
        tensor = {1, tp} if self.rules.expert_tensor else {1}
        for expert_tp in sorted(tensor):
            if any(width % expert_tp for width in widths):
                continue
            for ep in range(1, min(experts, tp * replicas // expert_tp) + 1):
                if experts % ep or tp * replicas % (ep * expert_tp):
                    continue
                if self.restrictions.allows("ep", ep) and self.restrictions.allows(
                    "expert_tp", expert_tp
                ):
                    yield ep, expert_tp

    def _schedules(self, tp: int, pp: int, dp: int, micro_batch: int) -> Iterator[tuple[str, int]]:
        """(schedule, chunks). Chunks divide the blocks of the fullest stage: interleaved passes of
        unequal length wait for one another. One stage has no schedule but 1F1B.
        """
        microbatches = self.training.global_batch // (dp * micro_batch)
        share = -(-self.model.num_blocks // pp) if self._interleaves else 1
        for name in self._schedule_names:
            if pp == 1 and name not in WITHOUT_PIPELINE:
                continue
            job = Pipeline(
                tp, pp, microbatches, micro_batch, self.training.seq_len, self.model.hidden
            )
            if name in NARROW and not NARROW[name](job):
                continue
            if self.rules.full_pipelines and name == "1f1b" and microbatches < pp:
                self.refused["fewer micro-batches than stages"] += 1
                continue
            for chunks in SCHEDULES[name].chunks or range(2, min(LARGEST_CHUNKS, share) + 1):
                if share % chunks or not self.restrictions.allows("chunks", chunks):
                    continue
                if SCHEDULES[name].problem(Shape(pp, chunks, microbatches)) is None:
                    yield name, chunks

    @cached_property
    def _schedule_names(self) -> list[str]:
        """Schedules to try: what the launcher searches, or the ones asked for."""
        allowed = [n for n in self.rules.schedules if self.restrictions.allows("schedule", n)]
        if "schedule" in self.restrictions.fixed:
            return allowed
        tried = [n for n in allowed if n in self.rules.searched or n in NARROW]
        return tried or allowed

    @cached_property
    def _interleaves(self) -> bool:
        """Whether chunks can be dealt out: transformer blocks in one row, with other layers only
        before the first and behind the last of them.
        """
        is_block = [isinstance(run.layer, Block) for run in self.model.runs]
        return any(is_block) and all(
            is_block[is_block.index(True) : len(is_block) - is_block[::-1].index(True)]
        )

    # --- candidates --------------------------------------------------------------------------

    def candidates(self, degrees: Degrees) -> Iterator[Candidate]:
        """ZeRO stages, shard groups, rank orders and recomputations for some degrees."""
        replicas = degrees.dp * degrees.cp
        stages = self.rules.zero if degrees.pp == 1 else self.rules.zero_in_pipeline
        for zero in stages:
            if zero not in self.rules.zero or not self.restrictions.allows("zero", zero):
                continue
            if zero and replicas == 1:
                continue  # nothing to shard over
            if not self._zero_fits_schedule(degrees, zero):
                continue
            families = self.recompute_families(splits=SCHEDULES[degrees.schedule].splits)
            for group, order, family in product(
                self._shard_groups(degrees, zero), self._orders(degrees), families
            ):
                candidate = Candidate(degrees, zero, group, order, family)
                if degrees.ep * degrees.expert_tp == 1 or candidate.mesh.divides_experts:
                    yield candidate
                else:
                    self.refused["expert groups do not tile the ranks in this order"] += 1

    def _zero_fits_schedule(self, degrees: Degrees, zero: int) -> bool:
        """ZeroPP shards parameters; some launchers cannot split backward passes beside ZeRO-3."""
        if degrees.schedule == "zeropp" and zero != WEIGHTS_SHARDED:
            return False
        return not SCHEDULES[degrees.schedule].splits or zero in self.rules.split_zero

    def _shard_groups(self, degrees: Degrees, zero: int) -> list[int]:
        """All replicas, or those of one node where there are more (HSDP)."""
        replicas = degrees.dp * degrees.cp
        groups = [replicas]
        inside = self.cluster.gpus_per_node // degrees.tp
        divides = (
            inside > 1
            and replicas % inside == 0
            and (inside % degrees.cp == 0 or degrees.cp % inside == 0)
        )
        if zero and self.rules.shard_subgroups and inside < replicas and divides:
            groups.append(inside)
        return [group for group in groups if self.restrictions.allows("shard_group", group)]

    def _orders(self, degrees: Degrees) -> list[str]:
        names = ["tp-cp-ep-dp-pp"]
        if degrees.pp > 1 and degrees.dp > 1:
            names.append("tp-cp-ep-pp-dp")
        return [name for name in names if self.restrictions.allows("rank_order", name)]

    def recompute_families(self, *, splits: bool = False) -> list[tuple[Recompute, ...]]:
        """Sets of recomputations that the layers of one job may mix; only blocks take part. None
        beside split backward passes (``splits``), which would compute again for each half.
        """
        if not self._blocks:
            return [(NO_RECOMPUTE,)]
        if splits:
            allowed = self.restrictions.allows("recompute", RecomputeKind.NONE.value)
            return [(NO_RECOMPUTE,)] if allowed else []
        full = Recompute(RecomputeKind.FULL)
        selective = self._selective() if self.rules.selective else []
        options = [
            option
            for option in (NO_RECOMPUTE, *selective, full)
            if self.restrictions.allows("recompute", option.kind.value)
        ]
        if self.rules.mixing is Mixing.PER_LAYER:
            return [tuple(options)]
        if self.rules.mixing is Mixing.WHOLE_MODEL:
            return [(option,) for option in options]
        blocks = [option for option in (NO_RECOMPUTE, full) if option in options]
        families = [tuple(blocks)] if blocks else []
        families += [(option,) for option in options if option.kind is RecomputeKind.SELECTIVE]
        return families

    def _selective(self) -> list[Recompute]:
        """Module sets worth trying, from cheap to thorough."""
        if not self._blocks:
            return []
        inner = "moe_act" if self._experts else "mlp"
        sets = [("layernorm",), (inner,), ("layernorm", inner)]
        if self.training.attention.stores_scores:
            core = [tuple(sorted((*modules, "core_attn"))) for modules in sets]
            sets = [("core_attn",), *core]
        return [Recompute(RecomputeKind.SELECTIVE, tuple(sorted(modules))) for modules in sets]
