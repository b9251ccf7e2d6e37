"""Collectives on a group's link -> seconds.

Every formula is a transfer over the narrowest link plus the latency of its steps, and what
pipelining the one through the other costs. Which links a group crosses, and what share it has of
each, is the topology's answer. Ignored: protocols of the library for messages below about 1 MB,
reduction in switches between nodes, congestion beyond the stated shares.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, assert_never

from costmodel.measuredlinks import MeasuredLink
from costmodel.work import CollectiveKind
from profiles.measured import Operation

if TYPE_CHECKING:
    from collections.abc import Callable

    from profiles.calibration import Efficiencies
    from profiles.topology import GroupLink

__all__ = ["DEPTH", "MOST_FILLING", "collective_seconds", "exchange_seconds", "p2p_seconds"]

# In hops for each pass over the data (all-reduce makes two): what is under way in one pipeline, and
# what filling all of it costs at most. With the hops of a GPU link (2 us) all-reduce on A100, H100
# and H200 comes within a few per cent of what nccl-tests prints from 1 MB to 16 GB (Bekman,
# "Machine Learning Engineering").
DEPTH = 2.5
MOST_FILLING = 20
# Of a ring's rate that a switch keeps which reduces what passes (nccl-tests on H200 and B200 with
# and without NVLS, same source).
IN_SWITCH = 0.82


def collective_seconds(
    kind: CollectiveKind, size: int, link: GroupLink, own: Efficiencies, *, copies: int = 1
) -> float:
    """Seconds of one collective of ``size`` bytes (see ``work.Collective``) in a group: measured
    ones where the link knows any, else those of a formula.
    """
    if link.size == 1 or size == 0:
        return 0.0
    if not isinstance(link, MeasuredLink):
        return _formula(kind, size, link, own, copies)

    def formula(kind: CollectiveKind | Operation, size: float, link: GroupLink) -> float:
        if kind != Operation.P2P:
            return _formula(CollectiveKind(kind.value), size, link, own)
        rate, latency = _bandwidth(link, own), link.levels[-1].latency_s
        return p2p_seconds(size, bandwidth=rate, latency=latency)

    seconds = link.times.seconds(kind, size, link.bare, formula)
    if copies == 1:
        return seconds
    fewer = _formula(kind, size, link, own, copies) / _formula(kind, size, link, own)
    return seconds * fewer


def _formula(
    kind: CollectiveKind, size: float, link: GroupLink, own: Efficiencies, copies: int = 1
) -> float:
    match kind:
        case CollectiveKind.ALL_GATHER | CollectiveKind.REDUCE_SCATTER:
            return _ring(size, link, own)
        case CollectiveKind.ALL_REDUCE:
            return _all_reduce(size, link, own)
        case CollectiveKind.ALL_TO_ALL:
            return _all_to_all(size, link, own, copies)
        case CollectiveKind.RING_EXCHANGE:
            latency = max(level.latency_s for level in link.levels)
            hops = link.size - 1
            return _piped(link, hops * latency, hops * size / _bandwidth(link, own))
        case _:
            assert_never(kind)


def p2p_seconds(size: float, *, bandwidth: float, latency: float) -> float:
    """Seconds to send ``size`` bytes to one partner."""
    return latency + size / bandwidth


def _piped(link: GroupLink, latency_s: float, transfer_s: float, *, passes: int = 1) -> float:
    """Seconds of a message that goes through the buffers of the library in pieces.

    The best number of pieces for a pipeline of latency a leaves transfer + 2 sqrt(a * transfer)
    (Johnsson and Ho 1989); pieces do not grow beyond the buffers, which bounds the second term.
    """
    hop = passes * max(level.latency_s for level in link.levels)
    filling = min(2 * math.sqrt(DEPTH * hop * transfer_s), MOST_FILLING * hop)
    return latency_s + transfer_s + filling


def _ring(size: float, link: GroupLink, own: Efficiencies) -> float:
    """(n-1)/n * size / bandwidth over n-1 steps: Thakur et al. 2005, ring algorithm."""
    n = link.size
    return _piped(link, _ring_latency(link), (n - 1) / n * size / _bandwidth(link, own))


def _all_reduce(size: float, link: GroupLink, own: Efficiencies) -> float:
    """2 (n-1)/n * size / bandwidth over the steps of a ring or of a tree, whichever are fewer.

    Through a switch that reduces (NVLink SHARP), where that is faster, each rank's data go up once,
    and its n-th of the sum comes down and up again: (1 + 1/n) * size / bandwidth in two steps.
    """
    n = link.size
    tree = sum(2 * math.ceil(math.log2(level.fanout)) * level.latency_s for level in link.levels)
    bandwidth = _bandwidth(link, own)
    steps = min(2 * _ring_latency(link), tree)
    seconds = _piped(link, steps, 2 * (n - 1) / n * size / bandwidth, passes=2)
    if len(link.levels) == 1 and link.levels[0].reduces:
        transfer = (1 + 1 / n) * size / (IN_SWITCH * bandwidth)
        steps = 2 * link.levels[0].latency_s
        seconds = min(seconds, _piped(link, steps, transfer, passes=2))
    return seconds


def _all_to_all(size: float, link: GroupLink, own: Efficiencies, copies: int) -> float:
    """A sub-tree of ``members`` sends members * size * (n-members)/n.

    What goes to several ranks of one sub-tree goes there once and is passed on inside (as DeepEP
    dispatches tokens): of ``copies`` to random ranks, that is the share of distinct sub-trees.
    """
    n = link.size

    def leaving(members: int) -> float:
        return members * size * (n - members) / n * _distinct(n / members, copies)

    return exchange_seconds(leaving, link, own)


def exchange_seconds(leaving: Callable[[int], float], link: GroupLink, own: Efficiencies) -> float:
    """An all-to-all whose parts may differ: the most loaded level counts, where sub-trees of so
    many members send ``leaving`` bytes to the others of the group.
    """
    transfer = max(
        leaving(level.members) / rate
        for level, rate in zip(link.levels, _rates(link, own), strict=True)
    )
    latency = sum(level.latency_s for level in link.levels)
    return _piped(link, latency * (1 + math.log2(link.size)), transfer)


def _distinct(trees: float, copies: int) -> float:
    """Distinct sub-trees among those of ``copies`` random ranks, as a part of ``copies``."""
    return trees * (1 - (1 - 1 / trees) ** copies) / copies


def _ring_latency(link: GroupLink) -> float:
    """Of the steps of a ring: each sub-tree joined at a level costs one hop at its latency."""
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
