"""Inputs a little other than stated: whether the choice stays, and what would make it faster."""

from __future__ import annotations

from dataclasses import replace

import pytest

from planner import ManualLayout, layout_from_degrees, load_inputs, parse_restrictions, plan_of
from planner.planning import plan_training
from planner.sensitivity import Stated, levers, scaled, sensitivity


@pytest.fixture(scope="module")
def planned():
    """A job whose memory is full, so that layers recompute."""
    inputs = load_inputs("llama3-8b", "8xh100", overrides={"global_batch": 64, "seq_len": 8192})
    return plan_training(inputs, restrictions=parse_restrictions(["tp=2"], [], []))


def test_each_input_is_shifted_both_ways_and_estimates_move_as_they_must(planned):
    plans = (planned.plan, *planned.runners_up)
    found = {(each.what, each.factor > 1): each for each in sensitivity(plans)}
    assert len(found) == 6
    step_s = planned.plan.estimate.step_s
    for what in (Stated.BANDWIDTH, Stated.EFFICIENCY):
        assert found[what, True].step_s[0] < step_s < found[what, False].step_s[0]
    assert found[Stated.MEMORY, True].step_s[0] == step_s
    assert found[Stated.MEMORY, True].best == 0


def test_a_plan_that_does_not_fit_any_more_is_laid_out_anew_and_is_slower(planned):
    plans = (planned.plan, *planned.runners_up)
    (less,) = (
        e for e in sensitivity(plans, share=0.25) if e.what is Stated.MEMORY and e.factor < 1
    )
    assert less.relayout[0]
    assert less.fits[0]
    assert less.step_s[0] > planned.plan.estimate.step_s


def test_the_best_is_the_fastest_that_fits(planned):
    plans = (planned.plan, *planned.runners_up)
    for each in sensitivity(plans):
        fitting = [s for s, fits in zip(each.step_s, each.fits, strict=True) if fits]
        assert each.step_s[each.best] == min(fitting)
        assert each.changes_choice == (each.best != 0)


def test_more_of_an_input_is_a_lever_only_where_it_gains(planned):
    found = levers(planned.plan)
    assert [each.faster for each in found] == sorted((e.faster for e in found), reverse=True)
    by_name = {each.change: each for each in found}
    assert by_name["10 % more memory a device"].relayout
    kernels = by_name["10 % faster GEMMs and attention"]
    assert 0 < kernels.faster < 1 - 1 / 1.1 + 1e-9
    assert "10 % faster network between nodes" not in by_name  # there is one node


def test_a_layout_that_nobody_searched_for_gains_by_other_choices():
    inputs = load_inputs("gpt2", "8xh100", overrides={"global_batch": 64, "seq_len": 1024})
    layout = layout_from_degrees(inputs, ManualLayout(pp=2, recompute="full"))
    best = levers(plan_of(inputs, layout))[0]
    assert best.relayout
    choices = {each.change: each for each in levers(plan_of(inputs, layout))}
    assert choices["other choices with the same degrees"].faster > 0.05


def test_scaling_changes_one_input_and_nothing_else(planned):
    inputs = planned.plan.inputs
    node = inputs.cluster.groups[0].node
    for what, field in (
        (Stated.NODE_LINKS, "gpu_bytes_per_s"),
        (Stated.NETWORK, "nic_bytes_per_s"),
    ):
        other = scaled(inputs, what, 2.0)
        scaled_node = other.cluster.groups[0].node
        assert scaled_node == replace(node, **{field: 2 * getattr(node, field)})
        assert replace(other, cluster=inputs.cluster) == inputs
    more = scaled(inputs, Stated.MEMORY, 2.0).cluster.groups[0].node.device
    assert more.memory_bytes == 2 * node.device.memory_bytes
    assert scaled(inputs, Stated.EFFICIENCY, 1.1).cluster == inputs.cluster
