"""Intervals cover what they say, and are the narrower the more is known."""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np
import pytest

from costmodel.intervals import (
    NORMAL_95,
    Scale,
    interval_of,
    known_stack,
    octaves_beyond,
    of_known_stack,
    of_unseen_source,
    relative_scale,
)
from costmodel.stagecost import StepSplit
from profiles.calibration import Seen
from profiles.calibrations import datasheet


def groups(seed, count, *, between, within, size=40):
    """Residuals of groups that each have a deviation of their own."""
    draw = np.random.default_rng(seed)
    return [draw.normal(draw.normal(0, between), within, size) for _ in range(count)]


@pytest.mark.parametrize("count", [2, 5, 20])
def test_the_interval_covers_nine_of_ten_sources_never_seen(count):
    covered = []
    for seed in range(100):
        *seen, unseen = groups(seed, count + 1, between=0.2, within=0.1)
        fast, slow, _ = of_unseen_source(seen).ends
        covered.append((fast <= unseen) & (unseen <= slow))
    assert 0.85 <= np.mean(covered) <= 0.98


@pytest.mark.parametrize("count", [4, 12])
def test_the_interval_covers_nine_of_ten_runs_of_another_model(count):
    source = Scale(0.2, 5)
    covered = []
    for seed in range(100):
        *seen, unseen = groups(seed, count + 1, between=0.06, within=0.06)
        fast, slow, _ = of_known_stack([seen], source)
        covered.append((fast <= unseen) & (unseen <= slow))
    assert 0.85 <= np.mean(covered) <= 0.98


def test_few_models_that_were_all_too_fast_leave_open_on_which_side_the_next_one_is():
    def ends(count):
        return of_known_stack([[np.full(10, 0.2)] * count], Scale(0.2, 5))[:2]

    fast, slow = ends(1)
    assert -fast > 0.8 * slow
    fast, slow = ends(40)
    assert -fast < 0.3 * slow


def test_quantiles_of_students_t():
    for df, quantile in [(4, 2.132), (10, 1.812), (30, 1.697)]:
        assert Scale(1.0, df).reach == pytest.approx(quantile, rel=0.01)
    assert Scale(1.0, 10**6).reach == pytest.approx(NORMAL_95, rel=1e-3)


def test_a_scale_is_found_back_from_its_reach():
    assert Scale.reaching(0.3).reach == pytest.approx(0.3)


def test_the_more_runs_of_a_stack_the_less_is_left_of_its_sources_deviation():
    reaches = [known_stack(count, Scale(0.3, 5)).reach for count in (3, 5, 20, 200)]
    assert reaches == sorted(reaches, reverse=True)
    assert reaches[0] > 1.5 * reaches[-1]


def test_one_group_of_a_thousand_runs_counts_no_more_than_one_of_ten():
    few = [np.full(10, 0.3), np.full(10, 0.05)]
    many = [np.full(1000, 0.3), np.full(10, 0.05)]
    assert of_unseen_source(many) == of_unseen_source(few)


def step(**seconds):
    """A step of a second, these causes included and compute for the rest."""
    causes = {field.name: seconds.get(field.name, 0.0) for field in fields(StepSplit)}
    return StepSplit(**{**causes, "compute_s": 1 - sum(seconds.values())})


def test_a_run_that_communicates_or_routes_or_lies_beyond_what_was_seen_is_less_sure():
    plain = relative_scale(step(), experts=False, beyond=0)
    assert plain < 1
    assert relative_scale(step(optimizer_s=0.3), experts=False, beyond=0) == plain
    for less_sure in (
        relative_scale(step(tp_s=0.1), experts=False, beyond=0),
        relative_scale(step(), experts=True, beyond=0),
        relative_scale(step(), experts=False, beyond=2),
    ):
        assert less_sure > 1.1 * plain


def test_one_cause_of_communication_is_as_unsure_as_another():
    once = relative_scale(step(tp_s=0.1, gradient_s=0.1), experts=False, beyond=0)
    assert relative_scale(step(zero_s=0.2), experts=False, beyond=0) == pytest.approx(once)


def test_octaves_are_counted_on_either_side_and_only_outside_of_what_was_seen():
    seen = Seen(params=(10**9, 8 * 10**9), seq_len=(2048, 4096))
    assert octaves_beyond(None, 1, 1) == 0
    assert octaves_beyond(seen, 3 * 10**9, 4096) == 0
    assert octaves_beyond(seen, 32 * 10**9, 4096) == pytest.approx(2)
    assert octaves_beyond(seen, 10**9 // 8, 512) == pytest.approx(13**0.5)


def test_only_the_part_of_the_variance_that_is_a_runs_own_goes_with_its_scale():
    own = replace(datasheet().efficiencies, step_time_90=(0.9, 1.2))
    assert interval_of(own, 3) == (0.9, 1.2)
    assert interval_of(replace(own, step_time_varies=1.0), 2) == pytest.approx((0.81, 1.44))
    half = replace(own, step_time_varies=0.5)
    assert interval_of(half, 0.5)[0] == pytest.approx(0.9 ** (0.625**0.5))


def test_a_source_of_few_models_counts_like_one_of_many():
    narrow, wide = [np.full(20, 0.02)] * 40, [np.full(20, 0.3)]
    both = of_known_stack([narrow, wide], Scale(0.2, 5))
    as_one = of_known_stack([[*narrow, *wide]], Scale(0.2, 5))
    assert both.slow > 2 * as_one.slow
