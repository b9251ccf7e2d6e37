"""The mesh: how ranks are numbered, in groups written down by hand and as partitions."""

from __future__ import annotations

from collections import defaultdict
from itertools import chain
from typing import TYPE_CHECKING

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from costmodel.layout import Axis, Chunk, LayerSpan, Layout, Mesh, Strategy, describe_ranks

if TYPE_CHECKING:
    from profiles.topology import Dims

BY_STAGE = (Axis.TP, Axis.CP, Axis.EP, Axis.DP, Axis.PP)
BY_REPLICA = (Axis.TP, Axis.CP, Axis.EP, Axis.PP, Axis.DP)


def groups_of(dims: Dims, num_ranks: int) -> list[list[int]]:
    """The groups of an axis in rank order: ranks that differ only in the places of ``dims``."""
    groups: dict[int, list[int]] = defaultdict(list)
    for rank in range(num_ranks):
        groups[rank - sum(rank // stride % size * stride for size, stride in dims)].append(rank)
    return list(groups.values())


def by_hand(mesh: Mesh, dims: Dims) -> str:
    """Groups as text, ``0 1 | 2 3``."""
    groups = groups_of(dims, mesh.num_ranks)
    return " | ".join(" ".join(str(rank) for rank in group) for group in groups)


SIXTEEN = Mesh(tp=2, dp=4, pp=2, ep=4)


def test_sixteen_ranks_are_numbered_tensor_first_and_stages_last():
    assert by_hand(SIXTEEN, SIXTEEN.dims(Axis.TP)) == (
        "0 1 | 2 3 | 4 5 | 6 7 | 8 9 | 10 11 | 12 13 | 14 15"
    )
    assert by_hand(SIXTEEN, SIXTEEN.dims(Axis.DP)) == "0 2 4 6 | 1 3 5 7 | 8 10 12 14 | 9 11 13 15"
    assert by_hand(SIXTEEN, SIXTEEN.dims(Axis.PP)) == (
        "0 8 | 1 9 | 2 10 | 3 11 | 4 12 | 5 13 | 6 14 | 7 15"
    )
    assert [SIXTEEN.stage_ranks(stage) for stage in (0, 1)] == [(range(8),), (range(8, 16),)]


def test_experts_take_neighbours_when_each_is_whole_on_a_rank():
    """Megatron's expert generator with expert tensor parallel size 1: ep fastest, then the rest."""
    assert by_hand(SIXTEEN, SIXTEEN.ep_dims) == "0 1 2 3 | 4 5 6 7 | 8 9 10 11 | 12 13 14 15"
    assert by_hand(SIXTEEN, SIXTEEN.expert_gradient_dims) == (
        "0 4 | 1 5 | 2 6 | 3 7 | 8 12 | 9 13 | 10 14 | 11 15"
    )
    assert SIXTEEN.expert_tp_dims == ()
    assert SIXTEEN.expert_dp == 2


def test_experts_that_are_split_stand_on_the_tensor_parallel_neighbours():
    """Megatron with expert tensor parallel size 2, its default at tp 2."""
    mesh = Mesh(tp=2, dp=4, pp=2, ep=4, expert_tp=2)
    assert by_hand(mesh, mesh.expert_tp_dims) == by_hand(mesh, mesh.dims(Axis.TP))
    assert by_hand(mesh, mesh.ep_dims) == "0 2 4 6 | 1 3 5 7 | 8 10 12 14 | 9 11 13 15"
    assert mesh.expert_gradient_dims == ()
    assert mesh.expert_dp == 1


def test_stages_inside_replicas_interleave_the_ranks():
    mesh = Mesh(tp=2, dp=4, pp=2, order=BY_REPLICA)
    assert by_hand(mesh, mesh.dims(Axis.PP)) == (
        "0 2 | 1 3 | 4 6 | 5 7 | 8 10 | 9 11 | 12 14 | 13 15"
    )
    assert by_hand(mesh, mesh.dims(Axis.DP)) == "0 4 8 12 | 1 5 9 13 | 2 6 10 14 | 3 7 11 15"
    assert describe_ranks(mesh.stage_ranks(1)) == "2-3,6-7,10-11,14-15"
    assert [mesh.first_rank(stage) for stage in (0, 1)] == [0, 2]


def test_gradients_are_reduced_over_context_and_data_parallel_ranks_together():
    mesh = Mesh(tp=2, cp=2, dp=2, pp=2)
    assert by_hand(mesh, mesh.gradient_dims) == "0 2 4 6 | 1 3 5 7 | 8 10 12 14 | 9 11 13 15"
    assert by_hand(mesh, mesh.shard_dims(2)) == (
        "0 2 | 1 3 | 4 6 | 5 7 | 8 10 | 9 11 | 12 14 | 13 15"
    )
    assert by_hand(mesh, mesh.replica_dims(2)) == (
        "0 4 | 1 5 | 2 6 | 3 7 | 8 12 | 9 13 | 10 14 | 11 15"
    )


@st.composite
def meshes(draw):
    """Any degrees; ep and expert_tp are those that divide the ranks of a stage."""
    tp, cp, dp, pp = (draw(st.integers(1, 6)) for _ in range(4))
    size = tp * cp * dp
    expert_tp = draw(st.sampled_from([e for e in range(1, tp + 1) if tp % e == 0]))
    rest = size // expert_tp
    ep = draw(st.sampled_from([e for e in range(1, rest + 1) if rest % e == 0]))
    order = draw(st.sampled_from([BY_STAGE, BY_REPLICA]))
    return Mesh(tp=tp, cp=cp, dp=dp, pp=pp, ep=ep, expert_tp=expert_tp, order=order)


@given(mesh=meshes())
def test_the_stages_divide_the_ranks(mesh):
    stages = [list(chain(*mesh.stage_ranks(stage))) for stage in range(mesh.pp)]
    assert sorted(chain(*stages)) == list(range(mesh.num_ranks))
    assert [min(ranks) for ranks in stages] == [mesh.first_rank(s) for s in range(mesh.pp)]
    assert {len(ranks) for ranks in stages} == {mesh.stage_size}


def assert_groups_divide_the_stages(mesh: Mesh, dims: Dims, size: int) -> None:
    groups = groups_of(dims, mesh.num_ranks)
    assert {len(group) for group in groups} == {size}
    assert sorted(chain(*groups)) == list(range(mesh.num_ranks))
    stage_of = {r: s for s in range(mesh.pp) for part in mesh.stage_ranks(s) for r in part}
    assert all(len({stage_of[rank] for rank in group}) == 1 for group in groups)


@given(mesh=meshes())
def test_the_groups_of_dense_axes_divide_the_ranks_of_each_stage(mesh):
    for axis in (Axis.TP, Axis.CP, Axis.DP):
        assert_groups_divide_the_stages(mesh, mesh.dims(axis), getattr(mesh, axis.value))
    assert_groups_divide_the_stages(mesh, mesh.gradient_dims, mesh.cp * mesh.dp)
    pipelines = groups_of(mesh.dims(Axis.PP), mesh.num_ranks)
    assert {len(group) for group in pipelines} == {mesh.pp}


# Six of a stage's twelve neighbours are no multiple of tp 4: dims that continue each other
# (1 x 4, 4 x 3) count as one.
@example(mesh=Mesh(tp=4, dp=3, ep=6))
@given(mesh=meshes())
def test_the_groups_of_experts_divide_the_ranks_of_each_stage(mesh):
    """Where stages lie inside replicas, for those meshes that Megatron accepts."""
    assume(mesh.order == BY_STAGE or mesh.pp == 1 or mesh.expert_dp == mesh.dp)
    assert_groups_divide_the_stages(mesh, mesh.expert_tp_dims, mesh.expert_tp)
    assert_groups_divide_the_stages(mesh, mesh.ep_dims, mesh.ep)
    assert_groups_divide_the_stages(mesh, mesh.expert_gradient_dims, mesh.expert_dp)


@given(mesh=meshes())
def test_shards_and_their_replicas_together_are_the_gradient_group(mesh):
    replicas = mesh.cp * mesh.dp
    for shard_group in (n for n in range(1, replicas + 1) if replicas % n == 0):
        if mesh.cp % shard_group == 0 or shard_group % mesh.cp == 0:
            shards, across = mesh.shard_dims(shard_group), mesh.replica_dims(shard_group)
            assert_groups_divide_the_stages(mesh, shards, shard_group)
            assert_groups_divide_the_stages(mesh, across, replicas // shard_group)


def layout(*chunks: Chunk, mesh: Mesh, num_chunks: int = 1) -> Layout:
    return Layout(
        mesh=mesh,
        schedule="1f1b",
        num_chunks=num_chunks,
        micro_batch=1,
        num_microbatches=8,
        chunks=chunks,
    )


WHOLE, HALVES = Strategy(), (LayerSpan(0, 4, Strategy()), LayerSpan(4, 8, Strategy()))


def test_a_sound_layout_has_no_problems():
    found = layout(Chunk(0, 0, HALVES[:1]), Chunk(1, 0, HALVES[1:]), mesh=Mesh(pp=2))
    assert found.problems(8) == []
    assert found.strategies == (WHOLE,)


def test_layers_may_divide_the_ranks_of_a_stage_differently():
    halves = (LayerSpan(0, 4, Strategy(tp=2, dp=4)), LayerSpan(4, 8, Strategy(tp=4, dp=2)))
    found = layout(Chunk(0, 0, halves), mesh=Mesh(tp=2, dp=4))
    assert found.problems(8) == []
    assert found.mesh_of(halves[1].strategy) == Mesh(tp=4, dp=2)
    assert found.micro_batch_of(halves[0].strategy) == 1
    assert found.micro_batch_of(halves[1].strategy) == 2
    back = layout(Chunk(0, 0, halves), mesh=Mesh(tp=4, dp=2))
    assert back.problems(8) == [
        "the 2 sequences of a micro-batch do not divide by dp 4 of a strategy"
    ]
    thirds = (LayerSpan(0, 8, Strategy(tp=3, dp=4)),)
    assert "does not nest" in layout(Chunk(0, 0, thirds), mesh=Mesh(tp=2, dp=6)).problems(8)[0]


@pytest.mark.parametrize(
    ("chunks", "mesh", "said"),
    [
        ((Chunk(0, 0, HALVES),), Mesh(), "cover all 9"),
        ((Chunk(0, 0, (LayerSpan(0, 3, WHOLE), LayerSpan(5, 9, WHOLE))),), Mesh(), "3 to 5"),
        ((Chunk(0, 0, (LayerSpan(0, 9, WHOLE),)),), Mesh(pp=2), "2 (stage, chunk) places"),
        ((Chunk(0, 0, (LayerSpan(0, 9, WHOLE),)),), Mesh(cp=2), "cp 1 of a strategy"),
        ((Chunk(0, 0, (LayerSpan(0, 9, WHOLE),)),), Mesh(tp=2), "tp 1 x dp 1 of a strategy"),
    ],
)
def test_an_unsound_layout_says_what_is_wrong(chunks, mesh, said):
    assert said in "; ".join(layout(*chunks, mesh=mesh).problems(9))
