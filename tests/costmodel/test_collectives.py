"""Collectives: bytes over links by hand, and never faster than the links that they cross."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

import networkx as nx
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from costmodel.collectives import DEPTH, MOST_FILLING, collective_seconds, p2p_seconds
from costmodel.work import CollectiveKind
from profiles import load_calibration, load_cluster
from profiles.cluster import ClusterSpec, FabricLevel, NodeGroup
from profiles.topology import Dims, GroupLink, Level, Topology

ALL_REDUCE, ALL_GATHER = CollectiveKind.ALL_REDUCE, CollectiveKind.ALL_GATHER
REDUCE_SCATTER, ALL_TO_ALL = CollectiveKind.REDUCE_SCATTER, CollectiveKind.ALL_TO_ALL
RING_EXCHANGE = CollectiveKind.RING_EXCHANGE
DATASHEET = load_calibration(None, load_cluster("8xh100"))[0].efficiencies
IDEAL = replace(DATASHEET, gpu_link=1.0, nic=1.0)
RATE, LATENCY = 100e9, 2e-6


def flat(n: int, rate: float = RATE, latency: float = 0.0) -> GroupLink:
    """``n`` GPUs of one node."""
    return GroupLink(n, (Level(n, 1, rate, latency, leaves_node=False),))


sizes = st.integers(1, 10**10)
counts = st.integers(2, 512)


@given(n=counts, size=sizes)
def test_ring_all_reduce_moves_two_n_minus_one_over_n_of_the_bytes(n, size):
    seconds = collective_seconds(ALL_REDUCE, size, flat(n), IDEAL)
    assert seconds * RATE == pytest.approx(2 * (n - 1) / n * size)


@given(n=counts, size=sizes)
def test_all_gather_and_reduce_scatter_together_are_an_all_reduce(n, size):
    parts = [collective_seconds(k, size, flat(n), IDEAL) for k in (ALL_GATHER, REDUCE_SCATTER)]
    assert sum(parts) == pytest.approx(collective_seconds(ALL_REDUCE, size, flat(n), IDEAL))


@given(n=counts, size=sizes)
def test_an_all_reduce_never_takes_longer_than_gathering_and_scattering(n, size):
    """It may have a tree's latency."""
    link = flat(n, latency=LATENCY)
    parts = [collective_seconds(k, size, link, IDEAL) for k in (ALL_GATHER, REDUCE_SCATTER)]
    assert collective_seconds(ALL_REDUCE, size, link, IDEAL) <= sum(parts) * (1 + 1e-12)


def test_a_ring_of_eight_waits_for_seven_hops_and_a_tree_for_three_each_way():
    link = flat(8, latency=LATENCY)
    assert collective_seconds(ALL_GATHER, 1, link, IDEAL) == pytest.approx(7 * LATENCY, rel=5e-3)
    assert collective_seconds(ALL_REDUCE, 1, link, IDEAL) == pytest.approx(6 * LATENCY, rel=5e-3)


def test_filling_the_pipeline_costs_what_the_best_number_of_pieces_leaves():
    """Counted out: k pieces pass s steps in s + k - 1 turns of the least duration."""
    link, size, steps = flat(8, latency=LATENCY), 4 * 10**6, 1000
    depth, transfer = 2 * DEPTH * LATENCY, 2 * 7 / 8 * size / RATE
    counted = min((steps + k - 1) * (depth / steps + transfer / k) for k in range(1, 20_000))
    seconds = collective_seconds(ALL_REDUCE, size, link, IDEAL)
    assert seconds == pytest.approx(counted + (6 - 2 * DEPTH) * LATENCY, rel=0.02)


def test_large_messages_fill_the_pipeline_with_pieces_of_bounded_size():
    link, size = flat(8, latency=LATENCY), 10**10
    seconds = collective_seconds(ALL_REDUCE, size, link, IDEAL)
    beside = (6 + 2 * MOST_FILLING) * LATENCY
    assert seconds == pytest.approx(2 * 7 / 8 * size / RATE + beside)


def test_a_switch_that_reduces_helps_many_ranks_and_not_few():
    """H200 by nccl-tests: 480 GB/s on 8 ranks against 366 by rings, no gain on 4."""
    for n, gain in ((8, 480 / 366), (6, 435.6 / 365), (4, 1.0)):
        levels = flat(n).levels
        reduces = GroupLink(n, (replace(levels[0], reduces=True),))
        plain = collective_seconds(ALL_REDUCE, 10**9, flat(n), IDEAL)
        assert plain / collective_seconds(ALL_REDUCE, 10**9, reduces, IDEAL) == pytest.approx(
            gain, rel=0.04
        )


def test_a_ring_over_two_nodes_pays_the_long_hop_for_each_node_once():
    link = GroupLink(
        16, (Level(8, 1, RATE, 2e-6, leaves_node=False), Level(2, 8, RATE, 6e-6, leaves_node=True))
    )
    expected = 14 * 2e-6 + 1 * 6e-6
    assert collective_seconds(ALL_GATHER, 1, link, IDEAL) == pytest.approx(expected, rel=5e-3)


def test_the_narrowest_level_sets_the_pace_of_a_ring():
    link = GroupLink(
        16, (Level(8, 1, 450e9, 0.0, leaves_node=False), Level(2, 8, 50e9, 0.0, leaves_node=True))
    )
    seconds = collective_seconds(ALL_REDUCE, 10**9, link, IDEAL)
    assert seconds == pytest.approx(2 * 15 / 16 * 10**9 / 50e9)


@given(n=counts, size=sizes)
def test_in_one_node_an_all_to_all_sends_all_but_the_own_share(n, size):
    seconds = collective_seconds(ALL_TO_ALL, size, flat(n), IDEAL)
    assert seconds * RATE == pytest.approx((n - 1) / n * size)


@pytest.mark.parametrize("copies", [1, 2, 8, 64])
def test_a_token_for_several_experts_of_a_node_crosses_to_it_once(copies):
    """Of ``copies`` to random ranks of four nodes, those in distinct nodes go through the NIC."""
    link = GroupLink(
        32, (Level(8, 1, 450e9, 0.0, leaves_node=False), Level(4, 8, 10e9, 0.0, leaves_node=True))
    )
    seconds = collective_seconds(ALL_TO_ALL, 10**9 * copies, link, IDEAL, copies=copies)
    nodes = 4 * (1 - 0.75**copies)
    assert seconds == pytest.approx(8 * 10**9 * nodes * 24 / 32 / 10e9)


@given(n=counts, size=sizes)
def test_a_ring_exchange_brings_every_other_ranks_block(n, size):
    seconds = collective_seconds(RING_EXCHANGE, size, flat(n), IDEAL)
    assert seconds * RATE == pytest.approx((n - 1) * size)


@pytest.mark.parametrize("kind", CollectiveKind)
def test_nothing_is_sent_by_one_rank_or_of_no_bytes(kind):
    assert collective_seconds(kind, 10**9, GroupLink(1, ()), IDEAL) == 0
    assert collective_seconds(kind, 0, flat(8), IDEAL) == 0


def test_a_transfer_is_its_latency_and_its_bytes():
    assert p2p_seconds(10**9, bandwidth=RATE, latency=LATENCY) == pytest.approx(0.01 + LATENCY)


LEAF = FabricLevel(name="leaf", nodes_per_switch=4, oversubscription=4.0)


def on(ref: str, *fabric: FabricLevel) -> ClusterSpec:
    return replace(load_cluster(ref), fabric=fabric)


def few_nics(spec: ClusterSpec) -> ClusterSpec:
    groups = tuple(NodeGroup(replace(g.node, num_nics=1), g.count) for g in spec.groups)
    return replace(spec, groups=groups)


CLUSTERS = {
    "eights": on("8x8xh100"),
    "leaf": on("8x8xa100", LEAF),
    "one nic": few_nics(on("6x8xh100", LEAF)),
    "sixty": on("60xh100"),
    "fours": on("16x4xh100", LEAF),
}
GROUPS: list[Dims] = [
    ((8, 1),),
    ((4, 2),),
    ((16, 1),),
    ((8, 8),),
    ((4, 1), (2, 8)),
    ((20, 1),),
    ((12, 1),),
    ((6, 8),),
    ((3, 16),),
]


def groups_of(dims: Dims, num_ranks: int) -> list[list[int]]:
    """The groups of an axis in rank order: ranks that differ only in the places of ``dims``."""
    groups: dict[int, list[int]] = defaultdict(list)
    for rank in range(num_ranks):
        groups[rank - sum(rank // stride % size * stride for size, stride in dims)].append(rank)
    return list(groups.values())


def ranks_for(dims: Dims, spec: ClusterSpec) -> int:
    """The most ranks of a cluster that the groups divide."""
    period = max(size * stride for size, stride in dims)
    return spec.num_gpus // period * period


def least_seconds(topology: Topology, groups: list[list[int]], kind, size: int) -> float:
    """What the links alone allow: for each link up from a sub-tree, bytes that all groups must
    send out of it (and as many, or more, into it) over its rate.

    A sub-tree with m of a group's n ranks must let out, of ``size`` bytes: all-to-all
    m (n - m) / n; all-reduce once; all-gather m / n and, inwards, (n - m) / n.
    """
    graph = topology.graph
    core, least = ("core", 0), 0.0
    under: dict[tuple[str, int], set[int]] = defaultdict(set)
    for rank in range(topology.cluster.num_gpus):
        for vertex in nx.shortest_path(graph, ("gpu", rank), core):
            under[vertex].add(rank)
    for vertex, parent in graph.edges:
        crossing = 0.0
        for group in groups:
            n, m = len(group), len(under[vertex].intersection(group))
            if 0 < m < n:
                parts = {ALL_TO_ALL: m * (n - m) / n, ALL_REDUCE: 1.0}
                crossing += parts.get(kind, max(m, n - m) / n) * size
        least = max(least, crossing / graph.edges[vertex, parent]["bytes_per_s"])
    return least


@pytest.mark.parametrize("kind", [ALL_TO_ALL, ALL_REDUCE, ALL_GATHER])
@pytest.mark.parametrize("name", CLUSTERS)
def test_no_collective_is_faster_than_the_links_that_it_crosses(name, kind):
    topology, size = Topology(CLUSTERS[name]), 10**9
    for dims in GROUPS:
        ranks = ranks_for(dims, topology.cluster)
        if not ranks:
            continue
        link = topology.axis(dims, num_ranks=ranks)
        least = least_seconds(topology, groups_of(dims, ranks), kind, size)
        assert collective_seconds(kind, size, link, IDEAL) >= least * (1 - 1e-9), dims


# 20 ranks under leaf switches that hold 8, 8 and 4 of them: 8 x 12 / 20 of the bytes pass, not
# what the mean of 7 under each would give.
@example(name="fours", dims=((20, 2),))
@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(sorted(CLUSTERS)),
    dims=st.tuples(st.integers(2, 30), st.sampled_from([1, 2, 4, 8])).map(lambda pair: (pair,)),
)
def test_no_all_to_all_of_any_group_is_faster_than_the_links_that_it_crosses(name, dims):
    topology, size = Topology(CLUSTERS[name]), 10**9
    ranks = ranks_for(dims, topology.cluster)
    assume(ranks)
    link = topology.axis(dims, num_ranks=ranks)
    least = least_seconds(topology, groups_of(dims, ranks), ALL_TO_ALL, size)
    assert collective_seconds(ALL_TO_ALL, size, link, IDEAL) >= least * (1 - 1e-9)


@st.composite
def links(draw):
    """A group over one to three levels."""
    fanouts = draw(st.lists(st.integers(1, 9), min_size=1, max_size=3))
    size, levels = 1, []
    for fanout in fanouts:
        rate, latency = draw(st.floats(1e9, 1e12)), draw(st.floats(0, 1e-4))
        levels.append(Level(fanout, size, rate, latency, leaves_node=bool(levels)))
        size *= fanout
    return GroupLink(size, tuple(levels))


@given(link=links(), kind=st.sampled_from(CollectiveKind), size=sizes, level=st.integers(0, 2))
def test_doubling_any_bandwidth_never_makes_a_collective_slower(link, kind, size, level):
    assume(link.size > 1)
    levels = list(link.levels)
    level %= len(levels)
    levels[level] = replace(levels[level], bytes_per_s=2 * levels[level].bytes_per_s)
    faster = GroupLink(link.size, tuple(levels))
    before = collective_seconds(kind, size, link, DATASHEET)
    assert collective_seconds(kind, size, faster, DATASHEET) <= before


@given(link=links(), kind=st.sampled_from(CollectiveKind), size=sizes)
def test_more_bytes_never_take_less_time(link, kind, size):
    assume(link.size > 1)
    more = collective_seconds(kind, 2 * size, link, DATASHEET)
    assert more >= collective_seconds(kind, size, link, DATASHEET)


@given(link=links(), kind=st.sampled_from(CollectiveKind), size=sizes)
def test_calibrated_links_are_never_faster_than_the_datasheets(link, kind, size):
    assume(link.size > 1)
    calibrated = collective_seconds(kind, size, link, DATASHEET)
    assert calibrated >= collective_seconds(kind, size, link, IDEAL)
