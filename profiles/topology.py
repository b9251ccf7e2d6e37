"""The topology as a graph, and what any set of groups of ranks gets out of it.

The graph is a tree: GPUs hang on their island, if the node has islands, islands on their node,
nodes on the fabric. Every link's share is *derived*: when all groups of an axis communicate at
once, the links that several of them cross are divided among them. NIC sharing, rank order and
oversubscription all come out of this one rule, so no case is special. Only where GPUs, or islands
of them, have a link to each other one (``direct_links``), a group uses those to its own members.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from profiles.cluster import Island

if TYPE_CHECKING:
    import networkx as nx
    from numpy.typing import NDArray

    from profiles.cluster import ClusterSpec, NodeSpec

__all__ = ["Dims", "GroupLink", "Level", "Topology"]

Dims = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Level:
    """One level that a group crosses: how many sub-trees it joins there, and its share.

    ``fanout``: sub-trees of the group joined at this level (GPUs in a node, nodes in a switch).
    ``members``: ranks of the group below one of those sub-trees, the one with most traffic to the
    others. ``bytes_per_s``: what *one*
    group gets of one sub-tree's link, one direction, while all groups of the axis are active.
    ``leaves_node``: whether the links are NICs and cables between nodes. ``reduces``: whether the
    switch adds up what it carries.
    """

    fanout: int
    members: int
    bytes_per_s: float
    latency_s: float
    leaves_node: bool
    reduces: bool = False


@dataclass(frozen=True, slots=True)
class GroupLink:
    """What one group of ``size`` ranks sees, level by level from the GPUs up."""

    size: int
    levels: tuple[Level, ...]

    @property
    def ring_bytes_per_s(self) -> float:
        """Bandwidth of a ring through the group: its narrowest link."""
        return min((level.bytes_per_s for level in self.levels), default=math.inf)


class Topology:
    """The tree of a cluster. ``levels`` 0 are the GPUs' links, then those of islands where any
    node has some, the nodes' uplinks, and the switches' uplinks.
    """

    def __init__(self, cluster: ClusterSpec) -> None:
        """Number the vertices of each level; the graph itself is built when asked for."""
        self.cluster = cluster
        nodes = cluster.nodes
        gpus = np.array([node.num_gpus for node in nodes])
        node_of_rank = np.repeat(np.arange(len(nodes)), gpus)
        self._names = ["gpu"]
        self._ancestors: list[NDArray[np.int64]] = [np.arange(cluster.num_gpus)]
        self._capacity: list[NDArray[np.float64]] = []
        self._latency: list[float] = []
        self._add_islands(node_of_rank, gpus)
        self._node_depth = len(self._ancestors)
        self._names.append("node")
        self._ancestors.append(node_of_rank)
        uplinks = np.array([node.uplink_bytes_per_s for node in nodes])
        self._capacity.append(uplinks)
        self._latency.append(max(node.nic_latency_s for node in nodes))
        for level in cluster.fabric:
            switch_of_node = np.arange(len(nodes)) // level.nodes_per_switch
            self._names.append(level.name)
            self._ancestors.append(switch_of_node[node_of_rank])
            whole = np.bincount(switch_of_node, weights=uplinks)
            self._capacity.append(whole / level.oversubscription)
            self._latency.append(self._latency[-1] + level.latency_s)
        self._cache: dict[tuple[Dims, int], GroupLink] = {}

    def _add_islands(self, node_of_rank: NDArray[np.int64], gpus: NDArray[np.int64]) -> None:
        """The links below the nodes. A node with fewer levels of islands than others counts as
        one island at the levels that it lacks.
        """
        nodes = self.cluster.nodes
        rank_in_node = np.arange(len(node_of_rank)) - np.repeat(np.cumsum(gpus) - gpus, gpus)
        links = [_links(node) for node in nodes]
        depth = max(len(each) for each in links)
        for level in range(depth):
            own = [each[min(level, len(each) - 1)] for each in links]
            below = self._ancestors[-1]
            per_gpu = np.repeat([link.bytes_per_s for link in own], gpus)
            self._capacity.append(np.bincount(below, weights=per_gpu).astype(np.float64))
            self._latency.append(max(link.latency_s for link in own))
            if level == depth - 1:
                continue
            sizes = np.repeat([link.num_gpus for link in own], gpus)
            place = node_of_rank * gpus.max() + rank_in_node // sizes
            self._names.append(f"island-{level}")
            self._ancestors.append(np.unique(place, return_inverse=True)[1])

    @cached_property
    def graph(self) -> nx.DiGraph[tuple[str, int]]:
        """The tree as a networkx graph: an edge from each vertex up to its parent, with
        ``bytes_per_s`` and ``latency_s``. Vertices are ``("gpu", rank)``, ``("island-0", i)``,
        ``("node", i)``, ``(switch level, i)`` and ``("core", 0)``.
        """
        import networkx as nx  # noqa: PLC0415 - slow to import and only for those who look at it

        graph: nx.DiGraph[tuple[str, int]] = nx.DiGraph()
        names = self._names
        for depth, name in enumerate(names):
            own = self._ancestors[depth]
            _, first = np.unique(own, return_index=True)
            parents = self._ancestors[depth + 1][first] if depth + 1 < len(names) else None
            for vertex, capacity in enumerate(self._capacity[depth]):
                parent = (
                    ("core", 0) if parents is None else (names[depth + 1], int(parents[vertex]))
                )
                graph.add_edge(
                    (name, vertex),
                    parent,
                    bytes_per_s=float(capacity),
                    latency_s=self._latency[depth],
                )
        return graph

    def axis(self, dims: Dims, *, num_ranks: int) -> GroupLink:
        """The link of the groups that tile the first ``num_ranks`` ranks, all active at once.

        ``dims`` are (size, stride) pairs: a group is every sum of one multiple below ``size`` of
        each ``stride``, added to a base rank. ``((8, 1),)`` are eights of neighbours.
        """
        key = (dims, num_ranks)
        if key not in self._cache:
            self._cache[key] = self.groups(self._tiles(dims, num_ranks))
        return self._cache[key]

    def groups(self, groups: NDArray[np.int64]) -> GroupLink:
        """The worst link of ``groups`` (one row of ranks per group), all active at once."""
        size = groups.shape[1]
        if size == 1:
            return GroupLink(1, ())
        levels: list[Level] = []
        for depth, ancestor in enumerate(self._ancestors):
            vertices = np.sort(ancestor[groups], axis=1)
            distinct = 1 + (np.diff(vertices, axis=1) != 0).sum(axis=1)
            spread = int(distinct.max())
            if spread == 1:
                break
            crossing = vertices[distinct > 1]
            first = np.ones(crossing.shape, dtype=bool)
            first[:, 1:] = np.diff(crossing, axis=1) != 0
            crossed = crossing[first]
            load = np.bincount(crossed, minlength=len(self._capacity[depth]))
            shares = self._capacity[depth][crossed] / load[crossed]
            if depth == self._node_depth - 1 and self._has_direct_links:
                shares *= self._used_links(crossing, first, depth)
            starts = np.flatnonzero(first.ravel())
            members = np.diff(starts, append=first.size)
            heaviest = int(members[np.argmax(members * (size - members))])
            levels.append(
                Level(
                    fanout=spread,
                    members=heaviest,
                    bytes_per_s=float(shares.min()),
                    latency_s=self._latency[depth],
                    leaves_node=depth >= self._node_depth,
                    reduces=depth == self._node_depth - 1 and self._reduces,
                )
            )
        return GroupLink(size, _joined(levels))

    @cached_property
    def _has_direct_links(self) -> bool:
        return any(group.node.direct_links for group in self.cluster.groups)

    @cached_property
    def _reduces(self) -> bool:
        return all(group.node.reduces_in_switch for group in self.cluster.groups)

    def _used_links(
        self, groups: NDArray[np.int64], first: NDArray[np.bool_], depth: int
    ) -> NDArray[np.float64]:
        """The part of the links of each GPU, or island, that leads to members of its group: all of
        them through a switch and for those who are alone in their node. ``first`` marks the first
        of each vertex in the rows of ``groups``.
        """
        nodes = self.cluster.nodes
        rank = np.unique(self._ancestors[depth], return_index=True)[1]
        node = self._ancestors[self._node_depth][rank][groups]
        of_group = (node + np.arange(len(groups))[:, None] * len(nodes))[first]
        _, where, counts = np.unique(of_group, return_inverse=True, return_counts=True)
        members, node = counts[where], node[first]
        others = np.bincount(self._ancestors[self._node_depth][rank])[node] - 1
        direct = np.array([each.direct_links for each in nodes])[node] & (members > 1)
        return np.where(direct, (members - 1) / np.maximum(others, 1), 1.0)

    def num_levels(self, rank: int, other: int) -> int:
        """Levels of links that a message from one rank to another crosses."""
        return sum(bool(each[rank] != each[other]) for each in self._ancestors)

    @cached_property
    def _is_periodic(self) -> bool:
        """Whether the tree repeats: equal nodes, and every switch full."""
        return self.cluster.is_uniform and all(
            self.cluster.num_nodes % level.nodes_per_switch == 0 for level in self.cluster.fabric
        )

    def _tiles(self, dims: Dims, num_ranks: int) -> NDArray[np.int64]:
        """Rows of ranks; on a uniform cluster one period of the pattern is enough."""
        period = max((size * stride for size, stride in dims), default=1)
        if self._is_periodic:
            units = [self.cluster.gpus_per_node]
            units += [level.nodes_per_switch * units[0] for level in self.cluster.fabric]
            num_ranks = min(num_ranks, math.lcm(period, *units))
        ranks = np.arange(max(num_ranks - num_ranks % period, period))
        is_base = np.ones(ranks.shape, dtype=bool)
        offsets = np.zeros(1, dtype=np.int64)
        for size, stride in dims:
            is_base &= ranks // stride % size == 0
            offsets = np.add.outer(np.arange(size) * stride, offsets).ravel()
        return np.add.outer(ranks[is_base], offsets)


def _joined(levels: list[Level]) -> tuple[Level, ...]:
    """Turn "distinct vertices per level" into "sub-trees joined at each level".

    A level that joins nothing (one member below each link) still narrows the ring.
    """
    above = [level.fanout for level in levels[1:]] + [1]
    return tuple(
        replace(level, fanout=-(-level.fanout // joined))
        for level, joined in zip(levels, above, strict=True)
    )


def _links(node: NodeSpec) -> tuple[Island, ...]:
    """Levels of links in a node from the GPUs up; the last joins them all."""
    whole = Island(
        num_gpus=node.num_gpus, bytes_per_s=node.gpu_bytes_per_s, latency_s=node.gpu_latency_s
    )
    return (*node.islands, whole)
