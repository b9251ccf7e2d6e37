"""Money, energy and time to a target: what is best is not always what is fastest."""

from __future__ import annotations

from dataclasses import replace

import pytest

from planner import load_inputs
from planner.objective import Objective, plan_for
from planner.spend import spend_of
from profiles.cluster import NodeGroup
from profiles.errors import InputError
from profiles.target import Target


def inputs(cluster="2x8xh100-80g", price=3.0, batch=64):
    own = load_inputs("gpt2", cluster, overrides={"global_batch": batch, "seq_len": 1024})
    groups = tuple(
        NodeGroup(replace(each.node, price_per_gpu_hour=price), each.count)
        for each in own.cluster.groups
    )
    return replace(own, cluster=replace(own.cluster, groups=groups), cluster_ref="")


def test_price_and_energy_of_a_step_are_those_of_the_gpus_it_uses():
    own = inputs()
    (best, *_) = plan_for(Objective.COST, own)
    plan = best.planned.plan
    used, step_s = plan.layout.mesh.num_ranks, plan.estimate.step_s
    spend = spend_of(plan)
    assert spend.price_per_step == pytest.approx(used * 3.0 * step_s / 3600)
    assert spend.price_per_million_tokens == pytest.approx(spend.price_per_step / (64 * 1024) * 1e6)
    watts = own.cluster.slowest_device.watts
    assert spend.kwh_per_step == pytest.approx(used * watts * step_s / 3.6e6)


def test_the_cheapest_plan_is_slower_and_on_fewer_gpus_than_the_fastest():
    """A small model does not scale to 16 GPUs without loss."""
    choices = plan_for(Objective.COST, inputs())
    cheapest = choices[0]
    fastest = min(choices, key=lambda each: each.step_s)
    assert cheapest.value == min(each.value for each in choices)
    assert cheapest.gpus < fastest.gpus
    assert cheapest.step_s > fastest.step_s
    assert cheapest.on_front
    assert fastest.on_front


def test_the_front_has_no_dominated_point():
    choices = plan_for(Objective.ENERGY, inputs())
    front = [each for each in choices if each.on_front]
    for one in front:
        for other in choices:
            assert not (other.value < one.value and other.step_s < one.step_s)
    for left in (each for each in choices if not each.on_front):
        assert any(f.value <= left.value and f.step_s <= left.step_s for f in front)


def test_a_cluster_without_a_price_says_what_is_missing():
    with pytest.raises(InputError, match="price_per_gpu_hour of"):
        plan_for(Objective.COST, inputs(price=None))


TABLE = {512: 10.0, 1024: 10.0, 2048: 10.0, 4096: 10.0, 8192: 20.0, 16384: 40.0}


def test_with_epochs_that_double_beyond_4096_the_best_batch_is_4096():
    """Pal et al.: flat to 4096, doubling for each doubling beyond; steps halve up to there, then
    stay, while each takes longer.
    """
    target = Target(samples=1_000_000, epochs=TABLE)
    best = plan_for(Objective.TIME_TO_TARGET, inputs("8xh100-80g"), target=target)[0]
    assert best.global_batch == 4096
    hand = best.step_s * 10.0 * 1_000_000 / 4096
    assert best.value == pytest.approx(hand)


def test_with_constant_epochs_the_largest_batch_wins():
    target = Target(samples=1_000_000, epochs=dict.fromkeys(TABLE, 10.0))
    best = plan_for(Objective.TIME_TO_TARGET, inputs("8xh100-80g"), target=target)[0]
    assert best.global_batch == max(TABLE)


def test_epochs_between_two_batches_lie_on_a_line_and_beyond_them_are_not_known():
    target = Target(samples=1000, epochs=TABLE)
    assert target.epochs_at(6144) == 15.0
    assert target.steps(6144) == pytest.approx(15.0 * 1000 / 6144)
    with pytest.raises(ValueError, match="512 to 16384"):
        target.epochs_at(256)


def test_interrupted_it_is_the_best_of_the_choices_so_far():
    searches = []

    def stop():
        return len(searches) > 1

    def tell(visited, _best, _bound_s):
        if visited == 1:
            searches.append(visited)

    (only,) = plan_for(Objective.ENERGY, inputs(), should_stop=stop, on_progress=tell)
    assert only.gpus == 16
    assert not only.planned.plan.search.complete
