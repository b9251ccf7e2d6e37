"""The legal space: which layouts are considered at all, and why others are not.

A *candidate* fixes everything but where the chain is cut and which recomputation each layer
takes: degrees, micro-batch, chunks, ZeRO stage, rank order. The rules are the launchers' and the
model's divisibility, stated one by one in the order in which they are tried.
"""

from __future__ import annotations

from collections import Counter
from functools import cached_property
from itertools import product
from typing import TYPE_CHECKING

from costmodel.layout import NO_RECOMPUTE, ContextComm, Recompute
from costmodel.schedules import SCHEDULES, Shape
from planner.choices import Candidate, Degrees, Grid, Restrictions, mesh_of
from planner.degreerules import DegreeRules
from planner.families import mixed_recomputes, selective_sets
from planner.launchers import LAUNCHERS, LauncherRules
from planner.narrow import NARROW, Pipeline
from profiles.layers import Block, ExpertFeedForward

if TYPE_CHECKING:
    from collections.abc import Iterator

    from profiles.cluster import ClusterSpec
    from profiles.model import ModelSpec
    from profiles.training import TrainingSpec

__all__ = ["SearchSpace"]

LARGEST_MICRO_BATCH = 16
LARGEST_CHUNKS = 16
LARGEST_CP = 64
WEIGHTS_SHARDED = 3

# Schedules that one stage may be said to have.
WITHOUT_PIPELINE = ("1f1b", "gpipe")


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
        self.degree_rules = DegreeRules(model, training, self.rules)
        self.restrictions = restrictions or Restrictions()
        self.num_gpus = min(
            cluster.num_gpus, self.restrictions.at_most.get("gpus", cluster.num_gpus)
        )
        self.refused: Counter[str] = Counter()
        self._refuses = self.rules.refuses
        self._found_schedules: dict[Pipeline, tuple[tuple[str, int], ...]] = {}
        self._found_runnable: dict[tuple[int, int], tuple[tuple[str, int], ...]] = {}
        self._found_shardings: dict[object, tuple[tuple[int, int], ...]] = {}
        self._found_orders: dict[object, tuple[str, ...]] = {}
        self._found_tilings: dict[object, bool] = {}
        self._found_families: dict[bool, list[tuple[Recompute, ...]]] = {}
        self._found_sizes: dict[Grid, int] = {}
        self._found_experts: dict[tuple[int, int], tuple[tuple[int, int], ...]] = {}
        self._num_of_grid: dict[object, int] = {}
        self._blocks = [run.layer for run in model.runs if isinstance(run.layer, Block)]
        self._experts = [
            block.feed_forward
            for block in self._blocks
            if isinstance(block.feed_forward, ExpertFeedForward)
        ]

    def grids(self) -> Iterator[Grid]:
        """Every legal division of the ranks, each with as many replicas as the cluster has room
        for.
        """
        for tp, cp in product(self.tp_degrees(), self.cp_degrees()):
            sequence_parallel = tp > 1 and self.sequence_splits(tp, cp)
            sequence_parallel &= True in self.rules.sequence_parallel
            if not self.restrictions.allows("sequence_parallel", sequence_parallel):
                sequence_parallel = False
                if not self.restrictions.allows("sequence_parallel", sequence_parallel):
                    self.refused["sequence_parallel"] += 1
                    continue
            if self._experts and tp > 1 and not sequence_parallel:
                self.refused["experts with tp need sequence parallelism"] += 1
                continue
            cp_comm = self.cp_comm(cp)
            if cp_comm is None:
                self.refused["cp_comm"] += 1
                continue
            how = (sequence_parallel, cp_comm)
            for pp in self.pp_degrees(tp * cp):
                for dp, micro_batch in self._batches(tp * cp * pp):
                    for expert in self._expert_degrees(tp, cp * dp):
                        yield Grid(tp, cp, *expert, pp, dp, micro_batch, *how)

    def degrees(self) -> Iterator[Degrees]:
        """Every legal combination of degrees."""
        for grid in self.grids():
            yield from self.degrees_of(grid)

    def degrees_of(self, grid: Grid) -> Iterator[Degrees]:
        """A grid with each schedule and number of chunks."""
        for schedule, chunks in self._schedules(grid):
            yield grid.degrees(schedule, chunks)

    def num_candidates(self, node: Grid | Degrees) -> int:
        """How many candidates a grid, or some degrees, have."""
        if isinstance(node, Degrees):
            return len(self._orders(node)) * self._num_in_order(node)
        if node not in self._found_sizes:
            self._found_sizes[node] = len(self._orders(node)) * self._num_of_schedules(node)
        return self._found_sizes[node]

    def _num_of_schedules(self, node: Grid) -> int:
        """Candidates of a grid with one rank order."""
        key = (node.tp, node.cp, node.pp, node.dp, node.micro_batch)
        if key not in self._num_of_grid:
            chunkings = Counter(schedule for schedule, _ in self._schedules(node))
            self._num_of_grid[key] = sum(
                number * self._num_in_order(node.degrees(schedule, 1))
                for schedule, number in chunkings.items()
            )
        return self._num_of_grid[key]

    def _num_in_order(self, degrees: Degrees) -> int:
        """Candidates with one rank order."""
        families = self.recompute_families(splits=SCHEDULES[degrees.schedule].splits)
        return len(self._shardings(degrees)) * len(families)

    def tp_degrees(self) -> list[int]:
        """Degrees that divide heads, key/value heads and widths, inside a node."""
        limit = self.num_gpus
        if not self.restrictions.tp_across_nodes:
            limit = min(limit, self.cluster.gpus_per_node)
        return [tp for tp in range(1, limit + 1) if self._allows_tp(tp)]

    def _allows_tp(self, tp: int) -> bool:
        if not self.restrictions.allows("tp", tp):
            return False
        problem = self.degree_rules.tp_problem(tp)
        if problem:
            self.refused["tp does not divide the model"] += 1
        return problem is None

    def cp_degrees(self) -> list[int]:
        """Degrees that cut each sequence into 2 cp equal pieces (for causal balance)."""
        limit = min(LARGEST_CP, self.num_gpus)
        return [
            cp
            for cp in range(1, limit + 1)
            if self.degree_rules.cp_problem(cp) is None and self.restrictions.allows("cp", cp)
        ]

    def cp_comm(self, cp: int) -> ContextComm | None:
        """How keys and values get around: the first of the launcher's ways that is legal."""
        legal = (
            way
            for way in self.rules.cp_comm
            if self.restrictions.allows("cp_comm", way)
            and self.degree_rules.cp_comm_problem(way) is None
        )
        return next(legal, None) if cp > 1 else ContextComm.RING

    def sequence_splits(self, tp: int, cp: int) -> bool:
        """Whether sequence parallelism divides what context parallelism leaves of a sequence."""
        return -(-self.training.seq_len // cp) % tp == 0

    def pp_degrees(self, ranks: int) -> list[int]:
        """Stages: at most one per block, and within the cluster."""
        most = min(max(1, self.model.num_blocks), self.num_gpus // ranks)
        return [pp for pp in range(1, most + 1) if self._allows_pp(pp)]

    def _allows_pp(self, pp: int) -> bool:
        if not self.restrictions.allows("pp", pp):
            return False
        problem = self.degree_rules.pp_problem(pp)
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

    def _expert_degrees(self, tp: int, replicas: int) -> tuple[tuple[int, int], ...]:
        """(ep, expert_tp) that divide the experts and the ranks of a stage."""
        if (tp, replicas) not in self._found_experts:
            self._found_experts[tp, replicas] = tuple(self._legal_experts(tp, replicas))
        return self._found_experts[tp, replicas]

    def _legal_experts(self, tp: int, replicas: int) -> Iterator[tuple[int, int]]:
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

    def _schedules(self, grid: Grid) -> tuple[tuple[str, int], ...]:
        """(schedule, chunks). Chunks divide the blocks of the fullest stage, since interleaved
        passes of unequal length wait for one another, and hold a layer each. One stage has no
        schedule but 1F1B.
        """
        microbatches = self.training.global_batch // (grid.dp * grid.micro_batch)
        job = Pipeline(
            grid.tp,
            grid.pp,
            microbatches,
            grid.micro_batch,
            self.training.seq_len,
            self.model.hidden,
        )
        if job not in self._found_schedules:
            self._found_schedules[job] = tuple(
                (name, chunks)
                for name, chunks in self._runnable(grid.pp, microbatches)
                if name not in NARROW or NARROW[name](job)
            )
        return self._found_schedules[job]

    def _runnable(self, pp: int, microbatches: int) -> tuple[tuple[str, int], ...]:
        """(schedule, chunks) that so many stages and micro-batches allow."""
        if (pp, microbatches) not in self._found_runnable:
            share = -(-self.model.num_blocks // pp) if self._interleaves else 1
            most = max(1, min(LARGEST_CHUNKS, share, self.model.num_layers // pp))
            names = [name for name in self._schedule_names if pp > 1 or name in WITHOUT_PIPELINE]
            if microbatches < pp and not set(self.rules.fills_stages).isdisjoint(names):
                self.refused["fewer micro-batches than stages"] += 1
                names = [name for name in names if name not in self.rules.fills_stages]
            self._found_runnable[pp, microbatches] = tuple(
                (name, chunks)
                for name in names
                for chunks in SCHEDULES[name].chunks or range(2, most + 1)
                if share % chunks == 0
                and chunks <= most
                and self.restrictions.allows("chunks", chunks)
                and SCHEDULES[name].problem(Shape(pp, chunks, microbatches)) is None
            )
        return self._found_runnable[pp, microbatches]

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

    def candidates(self, degrees: Degrees) -> Iterator[Candidate]:
        """ZeRO stages, shard groups, rank orders and recomputations for some degrees."""
        families = self.recompute_families(splits=SCHEDULES[degrees.schedule].splits)
        orders = self._orders(degrees)
        for (zero, group), order, family in product(self._shardings(degrees), orders, families):
            candidate = Candidate(degrees, zero, group, order, family)
            if not self._refuses or self._expressible(candidate):
                yield candidate

    def _expressible(self, candidate: Candidate) -> bool:
        """Whether the launcher can express a candidate; what it cannot is counted."""
        refusals = self.rules.refusals(
            candidate.mesh,
            candidate.strategy(),
            candidate.recomputes,
            schedule=candidate.degrees.schedule,
            microbatches=candidate.microbatches(self.training),
        )
        choice, _ = next(refusals, ("", ""))
        if choice:
            self.refused[f"{choice} that {self.rules.name} cannot express"] += 1
        return not choice

    def _shardings(self, degrees: Degrees) -> tuple[tuple[int, int], ...]:
        """(ZeRO stage, shard group)."""
        key = (degrees.tp, degrees.cp, degrees.dp, degrees.pp > 1, degrees.schedule)
        if key not in self._found_shardings:
            self._found_shardings[key] = tuple(self._legal_shardings(degrees))
        return self._found_shardings[key]

    def _legal_shardings(self, degrees: Degrees) -> Iterator[tuple[int, int]]:
        replicas = degrees.dp * degrees.cp
        stages = self.rules.zero if degrees.pp == 1 else self.rules.zero_in_pipeline
        for zero in stages:
            if zero not in self.rules.zero or not self.restrictions.allows("zero", zero):
                continue
            if zero and replicas == 1:
                continue  # nothing to shard over
            if self._zero_fits_schedule(degrees, zero):
                yield from ((zero, group) for group in self._shard_groups(degrees, zero))

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

    def _orders(self, grid: Grid | Degrees) -> tuple[str, ...]:
        """Rank orders in which expert groups tile the ranks."""
        key = (*grid[:4], grid.pp, grid.dp)
        if key not in self._found_orders:
            names = ["tp-cp-ep-dp-pp"]
            if grid.pp > 1 and grid.dp > 1:
                names.append("tp-cp-ep-pp-dp")
            allowed = [name for name in names if self.restrictions.allows("rank_order", name)]
            tiled = tuple(name for name in allowed if self._tiles(grid, name))
            if len(tiled) < len(allowed):
                rule = "expert groups do not tile the ranks in this order"
                self.refused[rule] += len(allowed) - len(tiled)
            self._found_orders[key] = tiled
        return self._found_orders[key]

    def _tiles(self, grid: Grid | Degrees, rank_order: str) -> bool:
        """Whether expert groups tile the ranks of a stage: a matter of how many ranks stand
        together, and of whether the stages stand between them.
        """
        key = (grid.tp * grid.cp, grid.ep, grid.expert_tp, grid.pp > 1, grid.dp, rank_order)
        if key not in self._found_tilings:
            self._found_tilings[key] = mesh_of(grid, rank_order).divides_experts
        return self._found_tilings[key]

    def recompute_families(self, *, splits: bool = False) -> list[tuple[Recompute, ...]]:
        """Sets of recomputations that the layers of one job may mix; only blocks take part. None
        beside split backward passes (``splits``), which would compute again for each half.
        """
        if splits not in self._found_families:
            selective = selective_sets(
                experts=bool(self._experts), stores_scores=self.training.attention.stores_scores
            )
            found = mixed_recomputes(self.rules, self.restrictions, selective, splits=splits)
            self._found_families[splits] = found if self._blocks else [(NO_RECOMPUTE,)]
        return self._found_families[splits]
