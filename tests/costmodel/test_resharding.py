"""From the way one layer holds an activation to the way the next one wants it."""

from __future__ import annotations

import pytest

from costmodel.collectives import collective_seconds
from costmodel.estimate import LayoutCost, estimate
from costmodel.layout import Chunk, LayerSpan, Layout, Mesh, Strategy
from costmodel.resharding import PARTIAL, REPLICATE, Split, conversion, reshard_s
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


def test_batch_against_sequence_is_an_all_to_all_of_what_a_rank_holds_both_ways(context):
    layout = mixed(strategy(2), strategy(4), micro_batch=2)
    there, back = reshard_s(context, layout, *layout.strategies)
    held = 8 * 1024 * 768 * 2 // 8  # sequences x tokens x width x bytes on 8 ranks
    pairs = context.topology.axis(((2, 2),), num_ranks=8)
    expected = collective_seconds(CollectiveKind.ALL_TO_ALL, held, pairs, context.own)
    assert (there, back) == (expected, expected)


def test_without_sequence_parallelism_it_gathers_one_way_and_slices_the_other(context):
    layout = mixed(strategy(2, sp=False), strategy(4, sp=False), micro_batch=2)
    there, back = reshard_s(context, layout, *layout.strategies)
    pairs = context.topology.axis(((2, 2),), num_ranks=8)
    whole = 4 * 1024 * 768 * 2  # of the two replicas that become one
    expected = collective_seconds(CollectiveKind.ALL_GATHER, whole, pairs, context.own)
    assert (there, back) == (expected, 0.0)


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
