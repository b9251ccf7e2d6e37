from __future__ import annotations

from dataclasses import replace

import pytest
from plansamples import sample_estimate, sample_inputs, sample_layout, sample_plan, split

from planner import explain_plan, parse_restrictions, plan_training
from planner.explain import rival_of, seconds_by_cause
from profiles.errors import InfeasibleError


@pytest.fixture(scope="module")
def planned():
    restrictions = parse_restrictions(at_most=["pp=2", "micro_batch=2"])
    return plan_training(sample_inputs(), restrictions=restrictions)


def slower():
    return sample_plan(layout=sample_layout(tp=1), estimate=sample_estimate(tp_s=0, compute_s=8.5))


def test_what_binds_time_is_the_largest_cause_beside_compute():
    time = explain_plan(sample_plan(), ()).time
    assert (time.cause, time.seconds) == ("tp_s", 1.5)
    assert time.part == pytest.approx(1.5 / 8)


def test_what_binds_memory_is_the_fullest_stage_and_its_largest_kind():
    memory = explain_plan(sample_plan(), ()).memory
    assert (memory.stage, memory.kind) == (0, "gradients")
    assert memory.device_bytes == sample_estimate().peak_mem_bytes
    assert 0 < memory.part < 1


def test_the_seconds_by_cause_of_a_rival_add_up_to_what_it_loses():
    rival = rival_of(sample_plan(), slower())
    assert rival.slower_s == pytest.approx(1.0)
    assert sum(rival.by_cause_s.values()) == pytest.approx(rival.slower_s)
    assert rival.by_cause_s["tp_s"] == -1.5


def test_causes_are_the_fields_of_the_split():
    assert seconds_by_cause(split(compute_s=1.0))["compute_s"] == 1.0


def test_the_best_plan_is_no_slower_than_those_after_it(planned):
    steps = [each.estimate.step_s for each in (planned.plan, *planned.runners_up)]
    assert steps == sorted(steps)
    assert len({each.layout for each in (planned.plan, *planned.runners_up)}) == len(steps) == 4


def test_a_plan_is_explained_by_searching_its_own_space_again(planned):
    explanation = explain_plan(planned.plan)
    assert [rival.plan.layout for rival in explanation.rivals] == [
        each.layout for each in planned.runners_up
    ]


def test_the_seconds_of_real_rivals_add_up(planned):
    for rival in explain_plan(planned.plan, planned.runners_up).rivals:
        assert sum(rival.by_cause_s.values()) == pytest.approx(rival.slower_s, abs=1e-9)


def test_a_plan_whose_space_has_nothing_that_fits_has_no_rivals(planned):
    tight = replace(planned.plan, min_fit=1 - 1e-15)
    tight = replace(tight, search=replace(tight.search, restrictions=parse_restrictions(["tp=5"])))
    assert explain_plan(tight).rivals == ()


def test_a_stated_micro_batch_is_kept_as_a_restriction_of_the_space():
    inputs = sample_inputs().with_training(micro_batch=1)
    found = plan_training(inputs, restrictions=parse_restrictions(["pp=1", "tp=1", "cp=1"]))
    assert found.plan.search.restrictions.fixed["micro_batch"] == {"1"}


def test_nothing_that_fits_is_an_error_with_its_reason():
    with pytest.raises(InfeasibleError, match="tightest constraint"):
        plan_training(sample_inputs(), restrictions=parse_restrictions(["tp=5"]))
