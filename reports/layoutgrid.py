"""A layout as a grid: one line a stage, its layers by strategy, and the ranks of its replicas."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from costmodel.layout import Axis, describe_ranks
from planner.plan import layer_ranges
from planner.plandocument import plan_document

if TYPE_CHECKING:
    from costmodel.layout import Chunk, Mesh, Strategy
    from planner.plan import Plan

__all__ = ["Grid", "layout_grid"]

MOST_REPLICAS: Final = 6
MOST_RANGES: Final = 2


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive layers of one strategy, by its position among those of the layout."""

    layers: str
    count: int
    strategy: int
    name: str


@dataclass(frozen=True, slots=True)
class Row:
    """A stage: the segments of each of its chunks, and the ranks of its first replicas."""

    stage: int
    chunks: tuple[tuple[Segment, ...], ...]
    replicas: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """The rows, the strategies in words by name, and what a replica is."""

    rows: tuple[Row, ...]
    strategies: tuple[tuple[str, str], ...]
    replica: str
    more_replicas: int


def layout_grid(plan: Plan) -> Grid:
    """The grid of a plan; strategies are called as in its file."""
    mesh, layout = plan.layout.mesh, plan.layout
    names = list(plan_document(plan)["strategies"])
    called = dict(zip(layout.strategies, zip(range(len(names)), names, strict=True), strict=True))
    rows = tuple(
        Row(
            stage,
            tuple(_segments(plan, chunk, called) for chunk in layout.stage_chunks(stage)),
            tuple(_ranks(mesh, stage, at) for at in range(min(mesh.dp, MOST_REPLICAS))),
        )
        for stage in range(layout.num_stages)
    )
    size = mesh.tp * mesh.cp
    ranks = f"{size} ranks" if size > 1 else "one rank"
    return Grid(
        rows=rows,
        strategies=tuple(
            (name, _words(own)) for own, name in zip(layout.strategies, names, strict=True)
        ),
        replica=f"{mesh.dp:,} replicas of {ranks} (tp {mesh.tp} x cp {mesh.cp})",
        more_replicas=max(0, mesh.dp - MOST_REPLICAS),
    )


def _segments(
    plan: Plan, chunk: Chunk, called: dict[Strategy, tuple[int, str]]
) -> tuple[Segment, ...]:
    return tuple(
        Segment(
            ", ".join(layer_ranges(plan.inputs.model, span.first, span.stop)),
            span.stop - span.first,
            *called[span.strategy],
        )
        for span in chunk.spans
    )


def _ranks(mesh: Mesh, stage: int, replica: int) -> str:
    """Ranks of one replica of a stage: ``0-7``, ``0-1,8-9``, shortened where they are scattered."""
    starts = [mesh.first_rank(stage) + _offset(mesh.dims(Axis.DP), replica)]
    for size, stride in mesh.dims(Axis.TP, Axis.CP):
        starts = [start + at * stride for at in range(size) for start in starts]
    ranges: list[range] = []
    for rank in sorted(starts):
        if ranges and ranges[-1].stop == rank:
            ranges[-1] = range(ranges[-1].start, rank + 1)
        else:
            ranges.append(range(rank, rank + 1))
    more = ",..." if len(ranges) > MOST_RANGES else ""
    return describe_ranks(tuple(ranges[:MOST_RANGES])) + more


def _offset(dims: tuple[tuple[int, int], ...], position: int) -> int:
    """Distance of the ``position``-th member of a group from its first."""
    offset = 0
    for size, stride in dims:
        position, at = divmod(position, size)
        offset += at * stride
    return offset


def _words(own: Strategy) -> str:
    """A strategy in words; what is not used is left out."""
    degrees = [f"{name} {getattr(own, name)}" for name in ("tp", "cp", "dp")]
    if own.ep > 1 or own.expert_tp > 1:
        degrees.append(f"experts ep {own.ep} x tp {own.expert_tp}")
    degrees.append(f"ZeRO-{own.zero}" if own.zero else "no ZeRO")
    if own.zero:
        degrees.append(f"sharded over {own.shard_group}")
    if own.sequence_parallel:
        degrees.append("sequence parallel")
    degrees.append(f"recompute {own.recompute}")
    return ", ".join(degrees)
