"""Measured collectives in place of formulas: by size, by group, by operation; what is flagged."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from costmodel.collectives import collective_seconds, p2p_seconds
from costmodel.interpolation import Basis
from costmodel.linkcurve import LinkCurve, curve_of
from costmodel.measuredlinks import MeasuredTopology, pair_link, with_overlap
from costmodel.work import CollectiveKind
from executor.profiler.linkpoints import RankGroups, link_groups, link_points
from planner import explain_plan, load_inputs, plan_training
from planner.manual import ManualLayout, layout_from_degrees
from planner.plan import plan_of
from planner.profiled import with_profiles
from profiles import load_cluster, save_text
from profiles.errors import InputError
from profiles.measured import ClusterFacts, CollectiveTime, Operation, Overlap, Profile
from profiles.measuredfile import profile_text
from profiles.topology import Topology
from reports import explain_answer

CLUSTER = "2x8xh100-80g"
NODES, PER_NODE = 2, 8
INPUTS = load_inputs("llama-7b", CLUSTER, overrides={"global_batch": 64, "seq_len": 2048})
OWN = INPUTS.calibration.efficiencies
AR, AG, RS = (CollectiveKind(own) for own in ("all-reduce", "all-gather", "reduce-scatter"))


def facts(nodes=NODES, per_node=PER_NODE, device="h100-80g", name=CLUSTER):
    return ClusterFacts(
        cluster=name, device=device, num_nodes=nodes, gpus_per_node=per_node, backend="nccl"
    )


def row(operation="all-reduce", size=2**20, seconds=1e-3, **how):
    how = {"group": 8, "cluster": CLUSTER} | how
    return CollectiveTime(operation=Operation(operation), num_bytes=size, seconds=seconds, **how)


def profile(*rows, own=None, **how):
    clusters = (own or facts(),)
    return Profile(name="p", source="s", clusters=clusters, collective_times=rows, **how)


def as_the_formula_says(slower=lambda _: 1.0, sizes=tuple(2**n for n in range(10, 31))):
    """A profile of every group of the cluster with the formula's times."""
    cluster = load_cluster(CLUSTER)
    topology, rows = Topology(cluster), []
    for own in link_groups(cluster):
        link = topology.axis(((own.size, own.stride),), num_ranks=NODES * PER_NODE)
        for size in sizes:
            place = {"group": own.size, "stride": own.stride, "size": size}
            for kind in CollectiveKind:
                if kind is not CollectiveKind.RING_EXCHANGE:
                    seconds = collective_seconds(kind, size, link, OWN)
                    rows.append(row(kind.value, seconds=slower(own) * seconds, **place))
            if own.size == 2:
                pair = pair_link(link.levels)
                rate = pair.ring_bytes_per_s * (
                    OWN.nic if pair.levels[-1].leaves_node else OWN.gpu_link
                )
                latency = pair.levels[-1].latency_s + OWN.hand_over_s
                seconds = slower(own) * p2p_seconds(size, bandwidth=rate, latency=latency)
                rows.append(row("p2p", seconds=seconds, **place))
    return profile(*rows)


def under(found, tmp_path, inputs=INPUTS, name="links.yaml"):
    save_text(profile_text(found), tmp_path / name)
    return with_profiles(inputs, [str(tmp_path / name)])


def topology_of(*rows, cluster=CLUSTER, own=None):
    return MeasuredTopology(load_cluster(cluster), profile(*rows, own=own))


def basis_of(topology):
    (found,) = topology.times.shares()
    return found


def axis(topology, size=8, stride=1, ranks=16):
    return topology.axis(((size, stride),), num_ranks=ranks)


# ---- curves


def test_a_curve_goes_through_its_points_and_straight_between_them():
    curve = curve_of([row(size=100, seconds=1.0), row(size=300, seconds=3.0)])
    assert curve.at(100) == (1.0, Basis.MEASURED)
    assert curve.at(200) == (pytest.approx(2.0), Basis.INTERPOLATED)
    assert curve.at(500) == (pytest.approx(5.0), Basis.EXTRAPOLATED)
    assert curve.at(10) == (1.0, Basis.EXTRAPOLATED)


def test_of_several_samples_of_a_size_the_least_counts_and_a_slow_small_message_is_noise():
    curve = curve_of(
        [row(size=100, seconds=5.0), row(size=100, seconds=4.0), row(size=200, seconds=3.0)]
    )
    assert curve.seconds == (3.0, 3.0)


def test_doubt_about_a_point_reaches_what_lies_beside_it():
    rows = [row(size=n, seconds=n * 1.0, doubtful=n == 200) for n in (100, 200, 300, 400)]
    curve = curve_of(rows)
    assert [curve.at(n)[1] for n in (200, 250, 350)] == [
        Basis.DOUBTFUL, Basis.DOUBTFUL, Basis.INTERPOLATED,
    ]  # fmt: skip


POINTS = st.lists(st.tuples(st.integers(1, 2**30), st.floats(1e-6, 10.0)), min_size=1, max_size=8)


@given(points=POINTS, sizes=st.lists(st.integers(1, 2**32), min_size=2, max_size=2))
def test_a_larger_message_never_takes_less(points, sizes):
    curve = curve_of([row(size=size, seconds=seconds) for size, seconds in points])
    small, large = sorted(sizes)
    assert curve.at(small)[0] <= curve.at(large)[0] * (1 + 1e-9)


@given(points=POINTS)
def test_pieces_stay_within_a_tenth_of_every_point(points):
    curve = curve_of([row(size=size, seconds=seconds) for size, seconds in points])
    pieces, residual = curve.pieces()
    assert residual <= 0.1
    assert [own.num_bytes for own in pieces] == sorted({own.num_bytes for own in pieces})
    for size, seconds in zip(curve.sizes, curve.seconds, strict=True):
        last = [own for own in pieces if own.num_bytes <= size][-1]
        drawn = last.seconds + (size - last.num_bytes) / last.bytes_per_s
        assert drawn == pytest.approx(seconds, rel=residual + 1e-6)


def test_one_line_is_one_piece_with_its_latency_and_bandwidth():
    sizes = (1000, 2000, 4000, 8000)
    pieces, residual = LinkCurve(sizes, tuple(5e-6 + size / 1e9 for size in sizes)).pieces()
    (piece,) = pieces
    assert piece.bytes_per_s == pytest.approx(1e9)
    assert piece.seconds - piece.num_bytes / piece.bytes_per_s == pytest.approx(5e-6)
    assert residual < 1e-9


# ---- groups


def test_a_measured_group_takes_what_was_measured():
    topology = topology_of(row(seconds=0.123))
    assert collective_seconds(AR, 2**20, axis(topology), OWN) == 0.123
    assert basis_of(topology) is Basis.MEASURED


def test_a_group_is_known_by_its_links_in_a_cluster_of_another_size():
    topology = topology_of(row(seconds=0.123), cluster="8x8xh100-80g")
    assert collective_seconds(AR, 2**20, axis(topology, ranks=64), OWN) == 0.123
    strided = topology_of(row(seconds=0.5, group=2, stride=8), cluster="8x8xh100-80g")
    assert collective_seconds(AR, 2**20, axis(strided, 2, 8, ranks=16), OWN) == 0.5


def test_another_number_of_ranks_is_scaled_by_the_formula_and_flagged():
    plain, topology = Topology(load_cluster(CLUSTER)), topology_of(row(seconds=0.8))
    found = collective_seconds(AR, 2**20, axis(topology, size=4), OWN)
    four, eight = (collective_seconds(AR, 2**20, axis(plain, size=n), OWN) for n in (4, 8))
    assert found == pytest.approx(0.8 * four / eight)
    assert basis_of(topology) is Basis.EXTRAPOLATED


def test_what_reaches_further_than_anything_measured_stays_the_formula():
    plain, topology = Topology(load_cluster(CLUSTER)), topology_of(row(seconds=0.8))
    across = {"size": 2, "stride": 8}
    found = collective_seconds(AR, 2**20, axis(topology, **across), OWN)
    assert found == collective_seconds(AR, 2**20, axis(plain, **across), OWN)
    assert basis_of(topology) is Basis.FORMULA


def test_an_operation_that_was_not_measured_is_predicted_from_one_alike():
    plain, topology = Topology(load_cluster(CLUSTER)), topology_of(row(seconds=0.8))
    found = collective_seconds(RS, 2**20, axis(topology), OWN)
    scatter, reduce = (collective_seconds(own, 2**20, axis(plain), OWN) for own in (RS, AR))
    assert found == pytest.approx(0.8 * scatter / reduce)
    assert basis_of(topology) is Basis.EXTRAPOLATED
    exchange = collective_seconds(CollectiveKind.ALL_TO_ALL, 2**20, axis(topology), OWN)
    assert exchange == collective_seconds(CollectiveKind.ALL_TO_ALL, 2**20, axis(plain), OWN)


def test_links_of_another_device_or_of_nodes_that_differ_say_nothing():
    other = topology_of(row(), own=facts(device="a100-80g"))
    assert other.times.shares() == {}
    collective_seconds(AR, 2**20, axis(other), OWN)
    assert basis_of(other) is Basis.FORMULA
    smaller = topology_of(row(group=2), row(group=2, stride=4), own=facts(nodes=4, per_node=4))
    assert collective_seconds(AR, 2**20, axis(smaller, size=2), OWN) == 1e-3  # inside a node
    collective_seconds(AR, 2**20, axis(smaller, size=2, stride=8), OWN)
    assert Basis.FORMULA in smaller.times.shares()  # across nodes of 4: not of these


def test_groups_that_see_the_same_links_are_measured_once():
    one = link_groups(load_cluster("8xh100-80g"))
    assert sorted(own.size for own in one) == [2, 4, 8]
    both = link_groups(load_cluster(CLUSTER))
    assert both[:2] == [RankGroups(8, 1), RankGroups(2, 8)]
    assert RankGroups(16, 1) in both
    assert RankGroups(2, 8).rows(16) == [[n, n + 8] for n in range(8)]
    assert RankGroups(4, 1).rows(8) == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_points_cover_every_operation_and_size_the_middle_first():
    points = link_points(load_cluster(CLUSTER), largest=2**30)
    assert {own.operation for own in points} == set(Operation)
    sizes = {own.num_bytes for own in points if own.group == 8}
    assert (min(sizes), max(sizes)) == (2**10, 2**30)
    assert points[0].num_bytes == 2**20
    assert all(own.group == 2 for own in points if own.operation is Operation.P2P)
    assert sum(own.overlap for own in points) == len(link_groups(load_cluster(CLUSTER)))
    small = link_points(load_cluster(CLUSTER), largest=2**16)
    assert max(own.num_bytes for own in small) == 2**16
    assert any(own.overlap for own in small)


# ---- estimates and plans


def estimate_of(inputs, **how):
    manual = ManualLayout(**({"tp": 8, "micro_batch": 1} | how))
    return plan_of(inputs, layout_from_degrees(inputs, manual)).estimate


@pytest.mark.parametrize(
    "how", [{"tp": 8}, {"tp": 2, "zero": 3}, {"tp": 4, "pp": 2}, {"tp": 1, "pp": 4, "zero": 1}]
)
def test_a_profile_that_says_what_the_formula_says_changes_nothing(tmp_path, how):
    inputs = under(as_the_formula_says(), tmp_path)
    assert estimate_of(inputs, **how).step_s == pytest.approx(
        estimate_of(INPUTS, **how).step_s, rel=0.01
    )


def test_a_link_ten_times_slower_changes_the_estimate_where_it_is_used(tmp_path):
    inside = under(as_the_formula_says(lambda own: 10.0 if own.size * own.stride <= 8 else 1.0),
                   tmp_path)  # fmt: skip
    before, after = (estimate_of(own, tp=8, zero=0) for own in (INPUTS, inside))
    assert 9 < after.split.tp_s / before.split.tp_s < 12  # less of it hides
    assert after.split.compute_s == before.split.compute_s
    assert after.step_s > 1.5 * before.step_s
    across = under(as_the_formula_says(lambda own: 10.0 if own.size * own.stride > 8 else 1.0),
                   tmp_path, name="across.yaml")  # fmt: skip
    slow = estimate_of(across, tp=8, zero=0)
    assert slow.split.tp_s == pytest.approx(before.split.tp_s, rel=0.05)
    assert slow.split.gradient_s > 2 * before.split.gradient_s


def test_a_link_ten_times_slower_changes_the_plan(tmp_path):
    slow = under(as_the_formula_says(lambda own: 10.0 if own.size * own.stride > 8 else 1.0),
                 tmp_path)  # fmt: skip
    before, after = (plan_training(own).plan for own in (INPUTS, slow))
    assert after.layout != before.layout
    assert after.estimate.step_s > before.estimate.step_s
    kept = plan_of(slow, before.layout).estimate
    assert after.estimate.step_s < kept.step_s


def test_what_is_extrapolated_is_told_and_is_less_sure(tmp_path):
    exact = under(as_the_formula_says(), tmp_path)
    far = under(as_the_formula_says(sizes=(2**10, 2**12)), tmp_path, name="far.yaml")
    sure, told = (
        plan_of(own, layout_from_degrees(own, ManualLayout(tp=8, micro_batch=1)))
        for own in (exact, far)
    )
    words = "communication lies beyond the points of the profile"
    assert words in str(explain_answer(explain_plan(told, ())))
    assert "communication" not in "".join(sure.estimate.notes)

    def width(own):
        fast, slow = own.estimate.interval_s
        return slow / fast

    assert width(told) > width(sure)


def test_doubtful_points_are_told(tmp_path):
    found = as_the_formula_says()
    rows = tuple(replace(own, doubtful=True) for own in found.collective_times)
    doubtful = under(replace(found, collective_times=rows), tmp_path)
    assert any("communication rests on doubtful" in note for note in estimate_of(doubtful).notes)


def test_overlap_that_was_measured_replaces_the_usual_one(tmp_path):
    overlap = Overlap(cluster=CLUSTER, slowdown=1.6, operation=Operation.ALL_REDUCE, group=8)
    found = replace(as_the_formula_says(), overlaps=(overlap,))
    assert under(found, tmp_path).calibration.efficiencies.overlap_slowdown == pytest.approx(0.6)
    none = with_overlap(profile(), INPUTS.cluster, INPUTS.calibration)
    assert none is INPUTS.calibration
    elsewhere = profile(own=facts(device="a100-80g"), overlaps=(overlap,))
    assert with_overlap(elsewhere, INPUTS.cluster, INPUTS.calibration) is INPUTS.calibration


@pytest.mark.parametrize(
    ("found", "message"),
    [
        (profile(row(), own=facts(device="a100-80g")), "has links of a100-80g; the devices of"),
        (replace(profile(row()), clusters=()), "has links of no cluster that it names"),
    ],
)
def test_links_of_something_else_are_refused(tmp_path, found, message):
    with pytest.raises(InputError, match=message):
        under(found, tmp_path)


def test_links_say_nothing_of_a_cluster_of_several_kinds_of_nodes(tmp_path):
    uneven = replace(INPUTS, cluster=load_cluster("9xh100-80g"))
    with pytest.raises(InputError, match="several kinds"):
        under(profile(row()), tmp_path, inputs=uneven)


def test_a_hand_over_takes_what_pairs_took(tmp_path):
    rows = [row("p2p", size=2**n, seconds=0.25, group=2, stride=8) for n in (10, 30)]
    inputs = under(profile(*rows), tmp_path)
    layout = layout_from_degrees(inputs, ManualLayout(tp=8, pp=2, micro_batch=1))
    strategy = layout.strategies[0]
    seconds = inputs.context.hand_overs.seconds(layout.mesh, strategy, 1)
    assert seconds == pytest.approx((0.25, 0.25))
    assert not math.isclose(INPUTS.context.hand_overs.seconds(layout.mesh, strategy, 1)[0], 0.25)
