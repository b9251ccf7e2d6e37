"""Measured times of collectives in place of the formula's, where a profile has them.

A measured group is known by what it sees of the topology: two groups of as many ranks with the same
share of the same links at every level are one, whatever the sizes of their clusters. Where a group
was not measured, the nearest that reaches as far was, and its time is scaled by the ratio of the
formula's; where an operation was not, one that moves data alike (all-gather and reduce-scatter are
the halves of an all-reduce). Both are called extrapolated. A profile is used for clusters of its
device; of nodes of another size only what lies inside a node.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import TYPE_CHECKING, Final

from costmodel.interpolation import Basis
from costmodel.linkcurve import curve_of
from costmodel.work import CollectiveKind
from profiles.cluster import NodeGroup
from profiles.measured import Operation
from profiles.topology import GroupLink, Topology

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    import numpy as np
    from numpy.typing import NDArray

    from costmodel.linkcurve import LinkCurve
    from profiles.calibration import Calibration
    from profiles.cluster import ClusterSpec
    from profiles.measured import ClusterFacts, CollectiveTime, Profile
    from profiles.topology import Level

    Kind = CollectiveKind | Operation
    Formula = Callable[[Kind, float, GroupLink], float]

__all__ = [
    "LinkTimes",
    "MeasuredLink",
    "MeasuredTopology",
    "link_curves",
    "pair_link",
    "tells_of",
    "with_overlap",
]

# What an operation that was not measured is predicted from, the nearest first.
ALIKE: Final = {
    CollectiveKind.ALL_REDUCE: ("reduce-scatter", "all-gather"),
    CollectiveKind.ALL_GATHER: ("reduce-scatter", "all-reduce"),
    CollectiveKind.REDUCE_SCATTER: ("all-gather", "all-reduce"),
    CollectiveKind.RING_EXCHANGE: ("p2p",),
}


def tells_of(facts: ClusterFacts, cluster: ClusterSpec) -> bool:
    """Whether links of one cluster say anything of another's."""
    return cluster.is_uniform and facts.device == cluster.slowest_device.name


def with_overlap(profile: Profile, cluster: ClusterSpec, base: Calibration) -> Calibration:
    """``base`` with the slow-down of compute and communication beside each other that was measured
    on such a cluster, the mean of several. Both take c times as long while they overlap: of what
    hides, c - 1 comes back.
    """
    names = {facts.cluster for facts in profile.clusters if tells_of(facts, cluster)}
    found = [own.slowdown for own in profile.overlaps if own.cluster in names]
    if not found:
        return base
    changed = replace(base.efficiencies, overlap_slowdown=fmean(found) - 1)
    return replace(base, efficiencies=changed)


def pair_link(levels: tuple[Level, ...]) -> GroupLink:
    """The link of two ranks that ``levels`` join, whatever else is on them."""
    top = len(levels) - 1
    return GroupLink(
        2,
        tuple(
            replace(level, fanout=2 if depth == top else 1, members=1, reduces=False)
            for depth, level in enumerate(levels)
        ),
    )


def link_curves(
    profile: Profile, cluster: ClusterSpec
) -> dict[tuple[Operation, GroupLink], LinkCurve]:
    """The measured curves by what their groups see of a cluster's topology."""
    rows: dict[tuple[Operation, GroupLink], list[CollectiveTime]] = defaultdict(list)
    for facts in profile.clusters:
        if not tells_of(facts, cluster):
            continue
        for row, link in _placed(profile, facts, cluster):
            own = pair_link(link.levels) if row.operation is Operation.P2P else link
            rows[row.operation, own].append(row)
    return {key: curve_of(own) for key, own in rows.items()}


def _placed(
    profile: Profile, facts: ClusterFacts, cluster: ClusterSpec
) -> Iterator[tuple[CollectiveTime, GroupLink]]:
    """The rows of a measured cluster with the links of their groups."""
    (node, *_) = cluster.nodes
    alike = facts.gpus_per_node == node.num_gpus
    count = facts.num_nodes if alike else 1
    topology = Topology(replace(cluster, groups=(NodeGroup(node, count),)))
    ranks = count * min(facts.gpus_per_node, node.num_gpus)
    for row in profile.collective_times:
        tile = row.group * row.stride
        if row.cluster == facts.cluster and row.group > 1 and tile <= ranks and row.seconds > 0:
            dims = ((row.group, row.stride),)
            yield row, topology.axis(dims, num_ranks=ranks // tile * tile)


class LinkTimes:
    """Looks up times; remembers what it was asked, and what the answers rest on."""

    def __init__(self, curves: Mapping[tuple[Operation, GroupLink], LinkCurve]) -> None:
        """Nothing is looked up yet."""
        self._curves = curves
        self.asked: dict[tuple[Kind, float, GroupLink], tuple[float, Basis]] = {}

    def seconds(self, kind: Kind, size: float, link: GroupLink, formula: Formula) -> float:
        """Seconds of ``size`` bytes; the formula's where nothing measured is near."""
        key = (kind, size, link)
        if key not in self.asked:
            self.asked[key] = self._look_up(kind, size, link, formula)
        return self.asked[key][0]

    def _look_up(
        self, kind: Kind, size: float, link: GroupLink, formula: Formula
    ) -> tuple[float, Basis]:
        own = formula(kind, size, link)
        found = self._nearest(kind, link)
        if found is None:
            return own, Basis.FORMULA
        operation, there = found
        curve = self._curves[found]
        seconds, basis = curve.at(size)
        if size < curve.sizes[0]:
            seconds *= formula(operation, size, there) / formula(operation, curve.sizes[0], there)
        if (operation, there) == (kind, link):
            return seconds, basis
        return seconds * own / formula(operation, size, there), Basis.EXTRAPOLATED

    def _nearest(self, kind: Kind, link: GroupLink) -> tuple[Operation, GroupLink] | None:
        """What was measured nearest to an operation in a group."""
        usable = [str(kind), *ALIKE.get(kind, ())] if isinstance(kind, CollectiveKind) else [kind]
        near = [
            (there != link, usable.index(operation), _distance(link, there), place)
            for place, (operation, there) in enumerate(self._curves)
            if operation in usable and _top(link) == _top(there)
        ]
        if not near:
            return None
        return list(self._curves)[min(near)[-1]]

    def shares(self) -> dict[Basis, float]:
        """Parts of the time of all that was asked by what they rest on."""
        found: dict[Basis, float] = defaultdict(float)
        for seconds, basis in self.asked.values():
            found[basis] += seconds
        total = sum(found.values())
        return {basis: own / total for basis, own in found.items()} if total else {}


def _top(link: GroupLink) -> tuple[bool, float]:
    """How far a group reaches."""
    return link.levels[-1].leaves_node, link.levels[-1].latency_s


def _distance(link: GroupLink, other: GroupLink) -> float:
    """In the logarithms of the number of ranks and of the bandwidth."""
    rate = link.ring_bytes_per_s / other.ring_bytes_per_s
    return abs(math.log(link.size / other.size)) + abs(math.log(rate))


@dataclass(frozen=True, slots=True)
class MeasuredLink(GroupLink):
    """A link with what was measured on it and on others."""

    times: LinkTimes = field(compare=False, repr=False)

    @property
    def bare(self) -> GroupLink:
        """The link alone."""
        return GroupLink(self.size, self.levels)


class MeasuredTopology(Topology):
    """A topology whose links know measured times."""

    def __init__(self, cluster: ClusterSpec, profile: Profile) -> None:
        """Place the profile's groups on the cluster."""
        super().__init__(cluster)
        self.times = LinkTimes(link_curves(profile, cluster))

    def groups(self, groups: NDArray[np.int64]) -> MeasuredLink:
        """As everywhere, with times."""
        own = super().groups(groups)
        return MeasuredLink(own.size, own.levels, self.times)
