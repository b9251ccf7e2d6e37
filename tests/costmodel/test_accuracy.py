from __future__ import annotations

from dataclasses import replace

import pytest
from test_fitting import BASE

from costmodel.accuracy import TOTAL, Judged, judge, kendall_tau, summaries
from costmodel.validation import accepted, calibrate, validate
from profiles.calibrations import datasheet
from profiles.errors import InputError


def timed(run_id, measured, predicted, **more):
    run = replace(BASE, id=run_id, file="a", step_time_s=measured, rank_group="g", **more)
    return Judged(
        run=run, predicted_step_s=predicted, interval_s=(0.9 * predicted, 1.2 * predicted)
    )


def test_errors_bias_and_coverage_by_hand():
    judged = [timed("1", 1.0, 1.1), timed("2", 1.0, 0.8), timed("3", 2.0, 2.0)]
    own = summaries(judged)["a"]
    assert own.n == 3
    assert own.median == pytest.approx(0.1)
    assert own.bias == pytest.approx(0.0)
    assert own.mape == pytest.approx(0.1)
    assert own.coverage == pytest.approx(2 / 3)


def test_kendalls_tau_by_hand():
    """Of the three pairs two are in order; a pair within 2 % is left out."""
    assert kendall_tau([(1.0, 1.0), (2.0, 3.0), (3.0, 2.0)]) == pytest.approx(1 / 3)
    assert kendall_tau([(1.0, 5.0), (1.01, 2.0), (2.0, 6.0)]) == pytest.approx(1.0)
    assert kendall_tau([(1.0, 5.0), (1.01, 2.0)]) is None


def test_regret_is_of_the_layout_that_would_have_been_chosen():
    judged = [
        timed(str(i), t, p) for i, (t, p) in enumerate([(1, 1.2), (1.1, 1), (2, 2), (3, 3), (4, 4)])
    ]
    own = summaries(judged)[TOTAL]
    assert own.sweeps == 1
    assert own.regret_worst == pytest.approx(0.1)


def test_a_sweep_of_four_layouts_says_nothing_of_a_choice():
    judged = [timed(str(i), i + 1.0, i + 1.0) for i in range(4)]
    assert summaries(judged)[TOTAL].sweeps == 0


def test_out_of_memory_labels_by_hand():
    judged = [
        Judged(run=replace(BASE, id=str(i), file="a", outcome=outcome), predicted_fits=fits)
        for i, (outcome, fits) in enumerate(
            [("ok", True), ("ok", False), ("oom", False), ("oom", True)]
        )
    ]
    own = summaries(judged)["a"]
    assert (own.oom_accuracy, own.false_rejections, own.missed_ooms) == (0.5, 0.5, 0.5)


def test_a_run_that_cannot_be_estimated_is_kept_with_its_reason():
    (judged,) = judge([replace(BASE, tp=3)], lambda _: datasheet())
    assert judged.predicted_step_s is None
    assert judged.skipped is not None
    assert judged.skipped.startswith("runs.csv:2:n_gpus: tp 3 x cp 1 x pp 1 x dp 5 are not 16 GPUs")


def test_a_smaller_last_micro_batch_counts_by_its_part():
    def step(global_batch):
        (judged,) = judge([replace(BASE, global_batch=global_batch)], lambda _: datasheet())
        return judged.predicted_step_s

    assert step(96) < step(112) < step(128)
    assert step(112) == pytest.approx((step(96) + step(128)) / 2)


def test_validation_is_accepted_up_to_the_tolerance():
    judged = [timed("1", 1.0, 1.1)]
    assert accepted(judged, None)
    assert accepted(judged, 0.11)
    assert not accepted(judged, 0.09)


def test_skipping_runs_that_must_be_predicted_is_not_accepted():
    must = replace(BASE, full_config=True, trust="high", mode="pretrain")
    assert not accepted([Judged(run=must, skipped="why")], None)


def test_runs_that_are_fitted_to_are_judged_by_fits_that_have_not_seen_their_model():
    runs = [
        replace(
            BASE, id=f"{name}-{i}", model=name, file="a", hidden=hidden, global_batch=64 * (1 + i)
        )
        for name, hidden in (("small", 2048), ("middle", 4096), ("large", 8192))
        for i in range(3)
    ]
    once = validate(runs, calibrate_on=runs)
    spoiled = [replace(run, step_time_s=4.0) if run.model == "large" else run for run in runs]
    twice = validate(spoiled, calibrate_on=spoiled)
    for before, after in zip(once, twice, strict=True):
        if before.run.model == "large":
            assert before.predicted_step_s == pytest.approx(after.predicted_step_s, rel=0.01)


def test_calibrating_wants_one_device_and_one_stack():
    runs = [replace(BASE, id=str(i), stack=stack) for i, stack in enumerate("aaabbb")]
    with pytest.raises(
        InputError, match="has 3 of a on a100-80g, 3 of b on a100-80g; expected at l"
    ):
        calibrate(runs, device=None, stack=None, name="mine", shown="runs.csv")
    found = calibrate(runs, device=None, stack="A", name="mine", shown="runs.csv")
    assert found.calibration.stack == "a"
    assert len(found.replays) == 3


def test_calibrating_wants_three_runs():
    with pytest.raises(InputError, match="expected at least 3 timed runs"):
        calibrate([BASE, BASE], device=None, stack=None, name="mine", shown="runs.csv")


def test_a_run_that_is_far_too_slow_gets_a_hint_about_its_precision():
    assert timed("1", 7.0, 1.0).hint == (
        "7.0 times as long as estimated: does it run in bf16, not in fp32?"
    )
    assert timed("2", 2.0, 1.0).hint is None
    assert timed("3", 7.0, 1.0, precision="fp32").hint is None
