"""The longest path of a run against its makespan, and as a bound of other runs."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pipelines import equal_times, legal_shapes, pipelines, shape_of

from costmodel.criticalpath import critical_path
from costmodel.schedules import INPUT, SCHEDULES, WEIGHT
from costmodel.simulate import Run


def arrays(times, delays):
    """Durations ``[kind, device, chunk]`` and delays."""
    forward, inputs, weight = (
        np.array(table) for table in (times.forward_s, times.input_s, times.weight_s)
    )
    return np.stack([forward, inputs + weight, inputs, weight]), np.array(delays)


@settings(max_examples=200, deadline=None)
@given(pipeline=pipelines())
def test_the_longest_path_takes_the_whole_run(pipeline):
    name, shape, times, delays = pipeline
    path = critical_path(SCHEDULES[name], shape, times, delays)
    makespan = max(Run(SCHEDULES[name], shape, times, delays).clock)
    assert path.seconds(*arrays(times, delays)) == pytest.approx(makespan, rel=1e-9, abs=1e-9)


def scaled(shape, times, number):
    """Those of each device times a factor of its own, input and weight gradients exchanged."""
    scales = [1 + (shape.stages * d + number) % 5 for d in range(shape.stages)]
    return type(times)(
        **{
            field: [[t * s for t in row] for row, s in zip(table, scales, strict=True)]
            for field, table in (
                ("forward_s", times.forward_s),
                ("input_s", times.weight_s),
                ("weight_s", times.input_s),
            )
        }
    )


@settings(max_examples=200, deadline=None)
@given(pipeline=pipelines(), factors=legal_shapes("1f1b"))
def test_no_run_is_shorter_than_the_path_of_another(pipeline, factors):
    name, shape, times, delays = pipeline
    path = critical_path(SCHEDULES[name], shape, times, delays)
    other = scaled(shape, times, factors.microbatches)
    makespan = max(Run(SCHEDULES[name], shape, other, delays).clock)
    assert path.seconds(*arrays(other, delays)) <= makespan * (1 + 1e-9) + 1e-9


STEADY = [name for name, schedule in SCHEDULES.items() if schedule.steady and schedule.drains]


@pytest.mark.parametrize("name", STEADY)
def test_no_long_run_is_shorter_than_a_path_that_repeats_a_part_of_a_shorter_one(name):
    @settings(max_examples=60, deadline=None)
    @given(pipeline=pipelines((name,), groups=14), number=st.integers(0, 4))
    def check(pipeline, number):
        _, shape, times, delays = pipeline
        path = critical_path(SCHEDULES[name], shape, times, delays)
        for own in (times, scaled(shape, times, number)):
            makespan = max(Run(SCHEDULES[name], shape, own, delays).clock)
            assert path.seconds(*arrays(own, delays)) <= makespan * (1 + 1e-9) + 1e-9

    check()


@pytest.mark.parametrize("name", STEADY)
def test_the_path_of_a_long_run_of_equal_stages_is_that_run(name):
    shape = shape_of(name, 4, 64)
    times = equal_times(name, shape, (1, 1.2, 0.7))
    path = critical_path(SCHEDULES[name], shape, times, [0.1] * 4)
    makespan = max(Run(SCHEDULES[name], shape, times, [0.1] * 4).clock)
    assert path.seconds(*arrays(times, [0.1] * 4)) == pytest.approx(makespan, rel=0.01)


LATE = [name for name, schedule in SCHEDULES.items() if schedule.late_weights is not None]


@pytest.mark.parametrize("name", LATE)
def test_no_device_has_more_weight_gradients_left_than_its_schedule_says(name):
    schedule = SCHEDULES[name]

    @settings(max_examples=60, deadline=None)
    @given(shape=legal_shapes(name, stages=(1 if schedule.chunks == (1,) else 2, 9)))
    def check(shape):
        for device, order in enumerate(schedule.orders(shape)):
            last = max(i for i, (kind, _, _) in enumerate(order) if kind == INPUT)
            left = sum(kind == WEIGHT for kind, _, _ in order[last:])
            assert left <= schedule.late_weights(shape, device)

    check()
