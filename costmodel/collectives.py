"""Collectives on a group's link -> seconds.

Every formula is a bandwidth term over the narrowest link plus latencies. Which links a group
crosses, and what share it has of each, is the topology's answer. Ignored: protocol switches of
the library below about 1 MB, in-network reduction, congestion beyond the stated shares.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, assert_never

from costmodel.work import CollectiveKind

if TYPE_CHECKING:
    from profiles.calibration import Efficiencies
    from profiles.topology import GroupLink

__all__ = ["collective_seconds", "p2p_seconds"]


def collective_seconds(
    kind: CollectiveKind, size: int, link: GroupLink, own: Efficiencies, *, copies: int = 1
) -> float:
    """Seconds of one collective of ``size`` bytes (see ``work.Collective``) in a group."""
    n = link.size
    if n == 1 or size == 0:
        return 0.0
    match kind:
        case CollectiveKind.ALL_GATHER | CollectiveKind.REDUCE_SCATTER:
            return _ring(size, link, own)
        case CollectiveKind.ALL_REDUCE:
            return _all_reduce(size, link, own)
        case CollectiveKind.ALL_TO_ALL:
            return _all_to_all(size, link, own, copies)
        case CollectiveKind.RING_EXCHANGE:
            latency = max(level.latency_s for level in link.levels)
            return (n - 1) * (size / _bandwidth(link, own) + latency)
        case _:
            assert_never(kind)


def p2p_seconds(size: int, *, bandwidth: float, latency: float) -> float:
    """Seconds to send ``size`` bytes to one partner."""
    return latency + size / bandwidth


def _ring(size: int, link: GroupLink, own: Efficiencies) -> float:
    """(n-1)/n * size / bandwidth + n-1 hops: Thakur et al. 2005, ring algorithm."""
    n = link.size
    return (n - 1) / n * size / _bandwidth(link, own) + _ring_latency(link)


def _all_reduce(size: int, link: GroupLink, own: Efficiencies) -> float:
    """2 (n-1)/n * size / bandwidth, plus the latency of a ring or of a tree, the smaller."""
    n = link.size
    tree = sum(2 * math.ceil(math.log2(level.fanout)) * level.latency_s for level in link.levels)
    latency = min(2 * _ring_latency(link), tree)
    return 2 * (n - 1) / n * size / _bandwidth(link, own) + latency


def _all_to_all(size: int, link: GroupLink, own: Efficiencies, copies: int) -> float:
    """The most loaded level: a sub-tree of ``members`` sends members * size * (n-members)/n.

    What goes to several ranks of one sub-tree goes there once and is passed on inside (as DeepEP
    dispatches tokens): of ``copies`` to random ranks, that is the share of distinct sub-trees.
    """
    n = link.size
    transfer = max(
        level.members * size * (n - level.members) / n / rate * _distinct(n / level.members, copies)
        for level, rate in zip(link.levels, _rates(link, own), strict=True)
    )
    latency = sum(level.latency_s for level in link.levels)
    return transfer + latency * (1 + math.log2(n))


def _distinct(trees: float, copies: int) -> float:
    """Distinct sub-trees among those of ``copies`` random ranks, as a part of ``copies``."""
    return trees * (1 - (1 - 1 / trees) ** copies) / copies


def _ring_latency(link: GroupLink) -> float:
    """Hops of a ring: each sub-tree joined at a level costs one hop at that level's latency."""
    hops, latency, trees = link.size, 0.0, link.size
    for level in link.levels:
        hops = trees - max(1, trees // level.fanout)
        latency += hops * level.latency_s
        trees = max(1, trees // level.fanout)
    return latency


def _rates(link: GroupLink, own: Efficiencies) -> tuple[float, ...]:
    return tuple(
        level.bytes_per_s * (own.nic if level.leaves_node else own.gpu_link)
        for level in link.levels
    )


def _bandwidth(link: GroupLink, own: Efficiencies) -> float:
    return min(_rates(link, own))
