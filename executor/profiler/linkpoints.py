"""What of a cluster's links is measured: every operation, over every kind of group that the
topology tells apart, from small messages to large ones, the most valuable points first.

All groups of a kind communicate at once, as those of a layout's axis do. Kinds that see the same
links with the same shares are one: of tp 2 and dp 2 inside a node with a switch, one is measured.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from profiles.measured import Operation
from profiles.topology import Topology

if TYPE_CHECKING:
    from profiles.cluster import ClusterSpec

__all__ = ["ELEMENT", "LinkPoint", "RankGroups", "link_groups", "link_points"]

# From 1 KiB to 1 GiB; the middle says most, what lies between two others less, the dearest is last.
SIZES: Final = tuple(2**power for power in (20, 24, 16, 10, 26, 22, 18, 12, 14, 28, 30))
OPERATIONS: Final = (
    Operation.ALL_REDUCE,
    Operation.REDUCE_SCATTER,
    Operation.ALL_GATHER,
    Operation.P2P,
    Operation.ALL_TO_ALL,
)
ELEMENT: Final = 4  # bytes of fp32
OVERLAP_BYTES: Final = 2**23


@dataclass(frozen=True, slots=True)
class RankGroups:
    """Groups of ``size`` ranks, each ``stride`` behind the one before, that tile all ranks."""

    size: int
    stride: int

    def rows(self, num_ranks: int) -> list[list[int]]:
        """The ranks of each group."""
        return [
            [first + place * self.stride for place in range(self.size)]
            for first in range(num_ranks)
            if first // self.stride % self.size == 0
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkPoint:
    """One operation on a message, as ``CollectiveTime`` says it. ``overlap``: beside compute."""

    operation: Operation
    group: int
    stride: int
    num_bytes: int
    overlap: bool = False

    def __str__(self) -> str:
        kib = self.num_bytes / 2**10
        size = f"{kib:g} KiB" if kib < 2**10 else f"{kib / 2**10:g} MiB"
        apart = f" {self.stride} apart" if self.stride > 1 else ""
        what = f"{self.operation}{' beside compute' if self.overlap else ''}"
        return f"{what}, {self.group} ranks{apart}, {size}"

    @property
    def groups(self) -> RankGroups:
        """Those that communicate."""
        return RankGroups(self.group, self.stride)


def link_groups(cluster: ClusterSpec) -> list[RankGroups]:
    """Kinds of groups that see different links: inside a node the whole of it first, then across
    nodes, then smaller ones. Of equal ones, that with the least stride.
    """
    topology, total = Topology(cluster), cluster.num_gpus
    found: dict[object, RankGroups] = {}
    for stride in _divisors(total):
        for size in _divisors(total // stride)[1:]:
            link = topology.axis(((size, stride),), num_ranks=total)
            found.setdefault(link, RankGroups(size, stride))
    node = cluster.gpus_per_node
    return sorted(
        found.values(),
        key=lambda own: (
            own not in (RankGroups(node, 1), RankGroups(total // node, node)),
            own.size * own.stride > node,
            -own.size,
            own.stride,
        ),
    )


def link_points(cluster: ClusterSpec, *, largest: int) -> list[LinkPoint]:
    """The points in the order in which they are measured, of at most ``largest`` bytes."""
    groups = link_groups(cluster)
    pairs = [own for own in groups if own.size == 2]  # noqa: PLR2004 - a pair
    points = [
        LinkPoint(
            operation=operation,
            group=own.size,
            stride=own.stride,
            num_bytes=size // (own.size * ELEMENT) * own.size * ELEMENT,
        )
        for size in SIZES
        if size <= largest
        for operation in OPERATIONS
        for own in (pairs if operation is Operation.P2P else groups)
    ]
    overlaps = [
        LinkPoint(
            operation=Operation.ALL_REDUCE,
            group=own.size,
            stride=own.stride,
            num_bytes=min(largest, OVERLAP_BYTES) // (own.size * ELEMENT) * own.size * ELEMENT,
            overlap=True,
        )
        for own in groups
    ]
    found = [*points[: len(points) // len(SIZES)], *overlaps, *points[len(points) // len(SIZES) :]]
    return [point for point in found if point.num_bytes]


def _divisors(number: int) -> list[int]:
    return [own for own in range(1, number + 1) if number % own == 0]
