"""From the way one layer holds an activation to the way the next one wants it."""

from __future__ import annotations

import pytest

from costmodel.collectives import collective_seconds, exchange_seconds
from costmodel.estimate import LayoutCost, estimate
from costmodel.layout import Chunk, LayerSpan, Layout, Mesh, Strategy
from costmodel.resharding import (
    PARTIAL,
    REPLICATE,
    Held,
    Split,
    collective,
    conversion,
    leaving,
    piece,
    reshard_s,
)
from costmodel.work import CollectiveKind
from planner import load_inputs

NONE, SPLIT = None, Split(0)


@pytest.mark.parametrize(
    ("have", "want", "collective"),
    [
        (REPLICATE, REPLICATE, NONE),
        (REPLICATE, SPLIT, NONE),  # each rank takes its part
        (REPLICATE, PARTIAL, NONE),  # one rank keeps it, the others add nothing
        (SPLIT, REPLICATE, CollectiveKind.ALL_GATHER),
        (SPLIT, SPLIT, NONE),
        (SPLIT, PARTIAL, NONE),
        (PARTIAL, REPLICATE, CollectiveKind.ALL_REDUCE),
        (PARTIAL, SPLIT, CollectiveKind.REDUCE_SCATTER),
        (PARTIAL, PARTIAL, NONE),
        (Split(0), Split(1), CollectiveKind.ALL_TO_ALL),
    ],
)
def test_producer_and_consumer_give_the_collective(have, want, collective):
    """The table of nnScaler (OSDI 2024): nine pairs, and a change of the split dim."""
    assert conversion(have, want) is collective


def mixed(*strategies: Strategy, micro_batch=4, layers=14) -> Layout:
    first, share = strategies[0], layers // len(strategies)
    spans = [
        LayerSpan(k * share, layers if k == len(strategies) - 1 else (k + 1) * share, own)
        for k, own in enumerate(strategies)
    ]
    return Layout(
        mesh=Mesh(tp=first.tp, dp=first.dp),
        schedule="1f1b",
        num_chunks=1,
        micro_batch=micro_batch,
        num_microbatches=64 // (micro_batch * first.dp),
        chunks=(Chunk(0, 0, tuple(spans)),),
    )


def strategy(tp, *, sp=True, zero=1):
    dp = 8 // tp
    return Strategy(tp=tp, dp=dp, zero=zero, shard_group=dp, sequence_parallel=sp and tp > 1)


@pytest.fixture(scope="module")
def context():
    sizes = {"global_batch": 64, "seq_len": 1024}
    return load_inputs("gpt2", "1x8xh100-80g", overrides=sizes).context


def test_layers_that_hold_activations_alike_pay_nothing(context):
    layout = mixed(strategy(4), strategy(4, zero=3))
    assert reshard_s(context, layout, *layout.strategies) == (0.0, 0.0)


HELD = [Held(tp, sequence) for tp in (1, 2, 4, 8) for sequence in (False, True)[:tp]]
PAIRS = [(have, want) for have in HELD for want in HELD if have != want]


@pytest.mark.parametrize(("have", "want"), PAIRS)
def test_each_rank_takes_all_that_it_wants_once_from_ranks_that_have_it(have, want):
    size, moved = max(have.tp, want.tp), 0
    for taker in range(size):
        rows, positions = want.part(taker, size)
        taken = []
        for giver in range(size):
            part = piece(have, want, giver, taker)
            cells = {(row, position) for row in part[0] for position in part[1]}
            assert cells <= {(r, p) for r in have.part(giver, size)[0] for p in range(size)}
            assert cells <= {(r, p) for r in range(size) for p in have.part(giver, size)[1]}
            taken += cells
            moved += len(cells) if giver != taker else 0
        assert sorted(taken) == [(row, position) for row in rows for position in positions]
    assert (collective(have, want) is None) == (moved == 0)


@pytest.mark.parametrize(
    ("have", "want", "kind"),
    [
        (Held(1, False), Held(4, True), CollectiveKind.ALL_TO_ALL),
        (Held(4, True), Held(2, True), CollectiveKind.ALL_TO_ALL),
        (Held(1, False), Held(4, False), CollectiveKind.ALL_GATHER),
        (Held(2, True), Held(2, False), CollectiveKind.ALL_GATHER),
        (Held(2, False), Held(4, False), CollectiveKind.ALL_TO_ALL),  # between counterparts
        (Held(2, False), Held(2, True), NONE),
        (Held(4, False), Held(1, False), NONE),
    ],
)
def test_layers_of_different_tp_run_one_collective_or_none(have, want, kind):
    assert collective(have, want) is kind


def test_neighbours_in_tp_keep_what_they_share():
    """Of tp 2 against tp 4 the ranks at the ends of a sequence keep half, the inner ones nothing;
    as two pairs they give each other nothing of what both halves already had.
    """
    assert leaving(Held(1, False), Held(2, True), 1) == 1 / 4
    assert leaving(Held(1, False), Held(8, True), 1) == 7 / 64
    assert leaving(Held(2, True), Held(4, True), 1) == 1 / 4
    assert leaving(Held(2, True), Held(4, True), 2) == 1 / 4
    assert leaving(Held(2, False), Held(4, False), 2) == 1


def pairs(context):
    return context.topology.axis(((2, 1),), num_ranks=8)


def test_batch_against_sequence_is_an_all_to_all_of_what_a_rank_holds_both_ways(context):
    layout = mixed(strategy(1), strategy(2), micro_batch=1)
    there, back = reshard_s(context, layout, *layout.strategies)
    held = 8 * 1024 * 768 * 2 // 8  # sequences x tokens x width x bytes on 8 ranks
    expected = collective_seconds(CollectiveKind.ALL_TO_ALL, held, pairs(context), context.own)
    assert (there, back) == (pytest.approx(expected), pytest.approx(expected))


def test_without_sequence_parallelism_it_gathers_one_way_and_slices_the_other(context):
    layout = mixed(strategy(1), strategy(2, sp=False), micro_batch=1)
    there, back = reshard_s(context, layout, *layout.strategies)
    whole = 2 * 1024 * 768 * 2  # of the two replicas that become one
    expected = collective_seconds(CollectiveKind.ALL_GATHER, whole, pairs(context), context.own)
    assert (there, back) == (expected, 0.0)


def test_two_layers_that_both_split_pay_for_the_busiest_rank(context):
    layout = mixed(strategy(2), strategy(4), micro_batch=2)
    held = 8 * 1024 * 768 * 2 // 8
    fours = context.topology.axis(((4, 1),), num_ranks=8)
    expected = exchange_seconds(lambda _: held, fours, context.own)
    assert reshard_s(context, layout, *layout.strategies) == (expected, expected)


def test_a_step_of_mixed_layers_lies_between_those_of_equal_ones_but_for_the_resharding(context):
    pure = {tp: estimate(context, mixed(strategy(tp), micro_batch=tp)).step_s for tp in (1, 2)}
    layout = mixed(strategy(1), strategy(2), micro_batch=1)
    step = estimate(context, layout).step_s
    extra = sum(reshard_s(context, layout, *layout.strategies)) * layout.num_microbatches
    assert min(pure.values()) < step < max(pure.values()) + 1.5 * extra
    assert step > min(pure.values()) + 0.5 * extra


def test_memory_of_mixed_layers_is_the_sum_of_their_states(context):
    layout = mixed(strategy(1, zero=0), strategy(2, zero=0), micro_batch=1)
    (memory,) = LayoutCost(context, layout).memory
    pure = [
        LayoutCost(context, mixed(strategy(tp, zero=0), micro_batch=tp)).memory[0] for tp in (1, 2)
    ]
    assert pure[1].parameters < memory.parameters < pure[0].parameters
    assert memory.context > pure[1].context  # one more group to communicate in
