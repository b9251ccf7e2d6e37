"""What the search chooses: a grid of ranks, degrees, a candidate, and what the user allows of them.

A *grid* says how ranks and micro-batches are divided, *degrees* add the schedule with its chunks, a
*candidate* ZeRO, the rank order and which recomputations its layers may mix. Only where the chain
is cut and which recomputation each layer takes is left to the solvers.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from costmodel.layout import NO_RECOMPUTE, Axis, ContextComm, Mesh, Recompute, Strategy

if TYPE_CHECKING:
    from collections.abc import Mapping

    from profiles.training import TrainingSpec

__all__ = [
    "CHOICES",
    "ORDERS",
    "ORDER_BY_STAGE",
    "Candidate",
    "Degrees",
    "Grid",
    "Grids",
    "Restrictions",
    "mesh_of",
]

ORDER_BY_STAGE = (Axis.TP, Axis.CP, Axis.EP, Axis.DP, Axis.PP)
ORDER_BY_REPLICA = (Axis.TP, Axis.CP, Axis.EP, Axis.PP, Axis.DP)
ORDERS = {"tp-cp-ep-dp-pp": ORDER_BY_STAGE, "tp-cp-ep-pp-dp": ORDER_BY_REPLICA}

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
    "cp_comm",
)


class Grid(NamedTuple):
    """How the ranks are divided, and the sequences of a pass."""

    tp: int
    cp: int
    ep: int
    expert_tp: int
    pp: int
    dp: int
    micro_batch: int
    sequence_parallel: bool
    cp_comm: ContextComm = ContextComm.RING

    def degrees(self, schedule: str, chunks: int) -> Degrees:
        """The grid with a schedule."""
        return Degrees(*self[:7], chunks, schedule, *self[7:])


class Grids(NamedTuple):
    """Grids on which a rank has the same shard of every layer; of routed experts only
    ``with_experts``.
    """

    alike: list[Grid]
    with_experts: bool


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
    cp_comm: ContextComm = ContextComm.RING


def mesh_of(grid: Grid | Degrees, rank_order: str) -> Mesh:
    """The mesh of some degrees in a rank order."""
    shape = tuple(grid[:4])
    return _mesh(shape, grid.pp, grid.dp, rank_order)


@lru_cache(maxsize=4096)
def _mesh(shape: tuple[int, ...], pp: int, dp: int, rank_order: str) -> Mesh:
    tp, cp, ep, expert_tp = shape
    return Mesh(tp=tp, cp=cp, dp=dp, pp=pp, ep=ep, expert_tp=expert_tp, order=ORDERS[rank_order])


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
        return mesh_of(self.degrees, self.rank_order)

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
            cp_comm=d.cp_comm,
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
