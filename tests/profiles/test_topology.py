"""Shares of links against an independent count: every hop of every ring is routed over the graph.

The topology derives its shares level by level with arrays. Here each group is a ring in rank
order, each hop a shortest path in networkx, and a link is divided among the groups that cross it.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from math import inf, prod

import networkx as nx
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from costmodel.layout import Axis, Mesh
from profiles import load_cluster
from profiles.cluster import (
    ClusterSpec,
    DeviceSpec,
    FabricLevel,
    Island,
    NodeGroup,
    NodeSpec,
)
from profiles.topology import Dims, Topology

BY_STAGE = (Axis.TP, Axis.CP, Axis.EP, Axis.DP, Axis.PP)
BY_REPLICA = (Axis.TP, Axis.CP, Axis.EP, Axis.PP, Axis.DP)
DEVICE = DeviceSpec(
    name="chip",
    memory_bytes=10**10,
    memory_bytes_per_s=1e12,
    peak_flop_per_s={"bf16": 1e14},
    num_sms=100,
)


def node(
    num_gpus: int = 8,
    num_nics: int = 8,
    gpu: float = 450e9,
    nic: float = 50e9,
    islands: dict[int, float] | None = None,
) -> NodeSpec:
    own = [
        Island(num_gpus=size, bytes_per_s=rate, latency_s=1e-6)
        for size, rate in (islands or {}).items()
    ]
    return NodeSpec(
        islands=tuple(own),
        name=f"{num_gpus}x{num_nics}",
        device=DEVICE,
        num_gpus=num_gpus,
        gpu_bytes_per_s=gpu,
        gpu_latency_s=2e-6,
        num_nics=num_nics,
        nic_bytes_per_s=nic,
        nic_latency_s=6e-6,
    )


def cluster(*groups: tuple[NodeSpec, int], fabric: tuple[FabricLevel, ...] = ()) -> ClusterSpec:
    return ClusterSpec(name="test", groups=tuple(NodeGroup(*g) for g in groups), fabric=fabric)


LEAF = FabricLevel(name="leaf", nodes_per_switch=4, oversubscription=4.0, latency_s=1e-6)
POD = FabricLevel(name="pod", nodes_per_switch=8, oversubscription=2.0, latency_s=1e-6)
EIGHTS = cluster((node(), 6))
CLUSTERS = {
    "eights": EIGHTS,
    "four nics": cluster((node(num_nics=4, nic=25e9), 4)),
    "leaf": cluster((node(), 8), fabric=(LEAF,)),
    "two levels": cluster((node(4, 1), 16), fabric=(LEAF, POD)),
    "part of a leaf": cluster((node(), 6), fabric=(LEAF,)),
    "nvl72": cluster((node(72, 72, gpu=900e9), 2)),
    "sixty": cluster((node(), 7), (node(4, 4), 1)),
    "two kinds": cluster((node(), 2), (node(4, 1, nic=10e9), 4), (node(2, 1), 8)),
    "slow gpu links": cluster((node(gpu=12e9), 3)),
    "pairs": cluster((node(4, 1, gpu=20e9, islands={2: 300e9}), 6)),
    "pairs under bridges": cluster((node(8, 2, gpu=8e9, islands={2: 56e9, 4: 20e9}), 5)),
    "pairs beside switches": cluster((node(islands={2: 600e9}), 2), (node(), 4)),
    "an odd one out": cluster((node(3, 1, gpu=20e9, islands={2: 300e9}), 9)),
    "part of a 5,128": cluster((node(), 641), fabric=(POD,)),
}


def groups_of(dims: Dims, num_ranks: int) -> list[list[int]]:
    """The groups of an axis in rank order: ranks that differ only in the places of ``dims``."""
    groups: dict[int, list[int]] = defaultdict(list)
    for rank in range(num_ranks):
        base = rank - sum(rank // stride % size * stride for size, stride in dims)
        groups[base].append(rank)
    return list(groups.values())


def routed(topology: Topology, groups: list[list[int]]) -> float:
    """The least of capacity / groups over all directed links that any ring crosses."""
    tree = topology.graph.to_undirected()
    crossed = defaultdict(set)
    for number, ranks in enumerate(groups):
        hops = zip(ranks, [*ranks[1:], ranks[0]], strict=True) if len(ranks) > 1 else ()
        for rank, following in hops:
            path = nx.shortest_path(tree, ("gpu", rank), ("gpu", following))
            for link in nx.utils.pairwise(path):
                crossed[link].add(number)
    shares = [tree.edges[link]["bytes_per_s"] / len(over) for link, over in crossed.items()]
    return min(shares, default=inf)


def axes_of(mesh: Mesh) -> dict[str, Dims]:
    axes = {axis.value: mesh.dims(axis) for axis in (Axis.TP, Axis.CP, Axis.DP, Axis.PP)}
    axes |= {"gradient": mesh.gradient_dims, "ep": mesh.ep_dims, "etp": mesh.expert_tp_dims}
    return axes | {"expert gradient": mesh.expert_gradient_dims}


def assert_shares_are_the_routed_ones(spec: ClusterSpec, mesh: Mesh) -> None:
    topology, ranks = Topology(spec), mesh.num_ranks
    shares = {
        name: topology.axis(dims, num_ranks=ranks).ring_bytes_per_s
        for name, dims in axes_of(mesh).items()
    }
    assert shares == pytest.approx(
        {name: routed(topology, groups_of(dims, ranks)) for name, dims in axes_of(mesh).items()}
    )


MESHES = [
    {"tp": 8},
    {"tp": 4, "dp": 4, "pp": 2},
    {"tp": 2, "cp": 2, "dp": 2, "pp": 4},
    {"tp": 16, "dp": 2},
    {"tp": 2, "dp": 8, "pp": 2, "ep": 4},
    {"tp": 2, "dp": 8, "pp": 2, "ep": 8, "expert_tp": 2},
    {"dp": 12, "pp": 2},
    {"tp": 3, "dp": 2, "pp": 4},
]


@pytest.mark.parametrize("order", [BY_STAGE, BY_REPLICA], ids=["stages", "replicas"])
@pytest.mark.parametrize("name", CLUSTERS)
def test_the_share_of_every_axis_is_what_routing_its_rings_gives(name, order):
    meshes_that_fit = [
        mesh
        for degrees in MESHES
        if (mesh := Mesh(**degrees, order=order)).num_ranks <= CLUSTERS[name].num_gpus
    ]
    assert len(meshes_that_fit) >= 3
    for mesh in meshes_that_fit:
        assert_shares_are_the_routed_ones(CLUSTERS[name], mesh)


@st.composite
def clusters(draw):
    """Equal or unequal nodes, under none to two levels of switches that need not be full."""
    kinds = draw(st.integers(1, 2))
    groups = []
    for _ in range(kinds):
        size, nics = draw(st.sampled_from([1, 2, 4, 8])), draw(st.sampled_from([1, 2, 4, 8]))
        islands = {2: 600e9} if size > 2 and draw(st.booleans()) else {}
        kind = node(size, nics, gpu=draw(st.sampled_from([20e9, 300e9])), islands=islands)
        groups.append((kind, draw(st.integers(1, 10))))
    per_switch = draw(st.integers(2, 4))
    ratio = draw(st.sampled_from([1, 4]))
    leaf = replace(LEAF, nodes_per_switch=per_switch, oversubscription=ratio)
    pod = replace(POD, nodes_per_switch=per_switch * draw(st.integers(2, 3)))
    return cluster(*groups, fabric=(leaf, pod)[: draw(st.integers(0, 2))])


@st.composite
def meshes(draw):
    tp, cp = draw(st.sampled_from([1, 2, 3, 4, 8])), draw(st.sampled_from([1, 2, 4]))
    dp, pp = draw(st.integers(1, 12)), draw(st.integers(1, 6))
    order = draw(st.sampled_from([BY_STAGE, BY_REPLICA]))
    ep = draw(st.sampled_from([e for e in (1, 2, 4, 8) if tp * cp * dp % e == 0]))
    if ep > 1 and prod((tp, cp, dp)) & (prod((tp, cp, dp)) - 1):
        ep = 1  # experts are laid over powers of two
    return Mesh(tp=tp, cp=cp, dp=dp, pp=pp, ep=ep, order=order)


# The fifth node of the last group stands alone under a leaf switch whose uplink is a quarter of
# the others'.
# The leaf that is not full lies beyond the first period of the pattern.
LONELY_NODE = cluster((node(), 25), fabric=(LEAF,))


@settings(max_examples=60, deadline=None)
@example(spec=LONELY_NODE, mesh=Mesh(tp=8, dp=5, pp=5))
@given(spec=clusters(), mesh=meshes())
def test_the_share_of_any_axis_on_any_cluster_is_the_routed_one(spec, mesh):
    assume(mesh.num_ranks <= spec.num_gpus)
    assert_shares_are_the_routed_ones(spec, mesh)


def test_eight_strided_groups_get_an_eighth_of_the_nodes_uplink_each():
    link = Topology(EIGHTS).axis(((6, 8),), num_ranks=48)
    assert link.ring_bytes_per_s == pytest.approx(8 * 50e9 / 8)
    alone = Topology(EIGHTS).axis(((48, 1),), num_ranks=48)
    assert alone.ring_bytes_per_s == pytest.approx(8 * 50e9)


def test_half_the_nics_halve_the_share():
    shares = [
        Topology(cluster((node(num_nics=nics), 4))).axis(((4, 8),), num_ranks=32).ring_bytes_per_s
        for nics in (8, 4)
    ]
    assert shares[0] == pytest.approx(2 * shares[1])


def test_an_oversubscribed_leaf_narrows_only_the_groups_that_leave_it():
    topology = Topology(CLUSTERS["leaf"])
    inside = topology.axis(((4, 8),), num_ranks=64)
    across = topology.axis(((8, 8),), num_ranks=64)
    assert inside.ring_bytes_per_s == pytest.approx(50e9)
    assert across.ring_bytes_per_s == pytest.approx(4 * 400e9 / 4 / 8)


def test_groups_inside_a_node_see_the_gpu_links_alone():
    link = Topology(CLUSTERS["nvl72"]).axis(((72, 1),), num_ranks=144)
    assert link.ring_bytes_per_s == 900e9
    assert not any(level.leaves_node for level in link.levels)
    assert Topology(EIGHTS).axis(((16, 1),), num_ranks=48).levels[-1].leaves_node


def test_a_group_of_one_has_no_link():
    link = Topology(EIGHTS).axis((), num_ranks=48)
    assert (link.size, link.levels, link.ring_bytes_per_s) == (1, (), inf)


def test_the_levels_of_a_group_multiply_to_its_size_where_it_is_regular():
    topology = Topology(CLUSTERS["two levels"])
    link = topology.axis(((64, 1),), num_ranks=64)
    assert [level.fanout for level in link.levels] == [4, 4, 2, 2]
    assert [level.members for level in link.levels] == [1, 4, 16, 32]


def test_a_pair_under_a_bridge_is_fast_and_two_pairs_meet_over_the_host():
    topology = Topology(CLUSTERS["pairs"])
    pair, node_of_four, strided = (
        topology.axis(dims, num_ranks=24) for dims in (((2, 1),), ((4, 1),), ((2, 2),))
    )
    assert pair.ring_bytes_per_s == 300e9
    assert node_of_four.ring_bytes_per_s == 2 * 20e9  # both GPUs of a pair have a way out
    assert strided.ring_bytes_per_s == 20e9  # and two rings share it
    links = (pair, node_of_four, strided)
    assert not any(level.leaves_node for link in links for level in link.levels)
    assert [level.fanout for level in node_of_four.levels] == [2, 2]
    assert [level.latency_s for level in node_of_four.levels] == [1e-6, 2e-6]


def test_gpus_with_a_link_to_each_other_one_use_those_to_their_own_group():
    topology = Topology(load_cluster("2x8xmi300x"))
    rates = {
        dims: topology.axis(dims, num_ranks=16).ring_bytes_per_s / 64e9
        for dims in (((2, 1),), ((4, 1),), ((4, 2),), ((8, 1),))
    }
    assert list(rates.values()) == pytest.approx([1, 3, 3, 7])
    across = topology.axis(((2, 1), (2, 8)), num_ranks=16)
    assert [level.bytes_per_s for level in across.levels] == pytest.approx([64e9, 100e9])
    alone = topology.axis(((2, 8),), num_ranks=16)
    assert [level.bytes_per_s for level in alone.levels] == pytest.approx([7 * 64e9, 50e9])


def test_a_part_of_such_a_node_keeps_the_links_among_its_gpus():
    node = load_cluster("1x4xmi300x").groups[0].node
    assert node.gpu_bytes_per_s == pytest.approx(3 * 64e9)
    pairs = Topology(load_cluster("1x4xmi300x")).axis(((2, 1),), num_ranks=4)
    assert pairs.ring_bytes_per_s == pytest.approx(64e9)
    assert load_cluster("1x1xmi300x").groups[0].node.gpu_bytes_per_s > 0


@pytest.mark.parametrize("used", [5128, 5120, 4100])
def test_any_part_of_a_cluster_of_5128_has_links(used):
    topology = Topology(load_cluster("5128xh100"))
    assert topology.axis(((8, 1),), num_ranks=used).ring_bytes_per_s == 450e9
    across = topology.axis(((used // 8, 8),), num_ranks=used)
    assert across.ring_bytes_per_s == pytest.approx(50e9)


def test_the_graph_is_a_tree_from_every_gpu_to_one_core():
    for spec in CLUSTERS.values():
        graph = Topology(spec).graph
        assert nx.is_arborescence(graph.reverse())
        assert sum(kind == "gpu" for kind, _ in graph) == spec.num_gpus
        assert graph.out_degree(("core", 0)) == 0


@settings(max_examples=60, deadline=None)
@given(spec=clusters(), mesh=meshes(), part=st.sampled_from(["gpu_bytes_per_s", "nic_bytes_per_s"]))
def test_twice_the_bandwidth_never_narrows_a_link(spec, mesh, part):
    assume(mesh.num_ranks <= spec.num_gpus)
    groups = tuple(
        NodeGroup(replace(g.node, **{part: 2 * getattr(g.node, part)}), g.count)
        for g in spec.groups
    )
    slow, fast = Topology(spec), Topology(replace(spec, groups=groups))
    for dims in axes_of(mesh).values():
        before, after = (t.axis(dims, num_ranks=mesh.num_ranks) for t in (slow, fast))
        assert after.ring_bytes_per_s >= before.ring_bytes_per_s
        for narrow, wide in zip(before.levels, after.levels, strict=True):
            assert wide.bytes_per_s >= narrow.bytes_per_s


def test_a_message_crosses_the_levels_up_to_where_two_ranks_meet():
    topology = Topology(load_cluster("60xh100"))
    assert topology.num_levels(0, 0) == 0
    assert topology.num_levels(0, 7) == topology.num_levels(56, 59) == 1
    assert topology.num_levels(7, 8) == 2
