"""Intervals cover what they say, and are the narrower the more is known."""

from __future__ import annotations

import numpy as np
import pytest

from costmodel.intervals import NORMAL_95, Scale, known_stack, of_known_stack, of_unseen_source


def groups(seed, count, *, between, within, size=40):
    """Residuals of groups that each have a deviation of their own."""
    draw = np.random.default_rng(seed)
    return [draw.normal(draw.normal(0, between), within, size) for _ in range(count)]


@pytest.mark.parametrize("count", [2, 5, 20])
def test_the_interval_covers_nine_of_ten_sources_never_seen(count):
    covered = []
    for seed in range(100):
        *seen, unseen = groups(seed, count + 1, between=0.2, within=0.1)
        covered.append(np.abs(unseen) <= of_unseen_source(seen).reach)
    assert 0.85 <= np.mean(covered) <= 0.98


@pytest.mark.parametrize("count", [4, 12])
def test_the_interval_covers_nine_of_ten_runs_of_another_model(count):
    source = Scale(0.2, 5)
    covered = []
    for seed in range(100):
        *seen, unseen = groups(seed, count + 1, between=0.06, within=0.06)
        fast, slow = of_known_stack(seen, source)
        covered.append((fast <= unseen) & (unseen <= slow))
    assert 0.85 <= np.mean(covered) <= 0.98


def test_few_models_that_were_all_too_fast_leave_open_on_which_side_the_next_one_is():
    def ends(count):
        return of_known_stack([np.full(10, 0.2)] * count, Scale(0.2, 5))

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
