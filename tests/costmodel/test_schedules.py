"""Schedules: published bubbles, makespans and peaks, what holds for all, and torch's own orders."""

from __future__ import annotations

from fractions import Fraction
from unittest.mock import MagicMock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pipelines import bubble, in_flight, legal_shapes, run_equal, shape_of

from costmodel.schedules import (
    BACKWARD,
    FORWARD,
    GATHER,
    INPUT,
    REDUCE,
    SCHEDULES,
    WEIGHT,
    Schedule,
    Shape,
)
from costmodel.schedules.check import problems, staleness, with_transfers
from costmodel.schedules.core import RECEIVE_FORWARD, SEND_BACKWARD, SEND_FORWARD
from costmodel.schedules.zeropp import moves_less_than_tp
from costmodel.simulate import in_flight as held
from costmodel.simulate import least_in_flight


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_four_stages_and_eight_micro_batches_take_33_slots(name):
    assert run_equal(name, shape_of(name, 4, 8)).makespan_s == 33


def test_gpipe_holds_every_micro_batch_and_1f1b_as_many_as_stages_follow():
    assert in_flight("gpipe", shape_of("gpipe", 4, 8)) == (8, 8, 8, 8)
    assert in_flight("1f1b", shape_of("1f1b", 4, 8)) == (4, 3, 2, 1)


@given(stages=st.integers(2, 12), factor=st.integers(1, 4), chunks=st.integers(1, 5))
def test_the_bubble_is_p_minus_one_over_vm_plus_p_minus_one(stages, factor, chunks):
    microbatches = stages * factor
    for name in ("interleaved-1f1b",) if chunks > 1 else ("gpipe", "1f1b"):
        found = bubble(name, Shape(stages, chunks, microbatches))
        assert found == pytest.approx((stages - 1) / (chunks * microbatches + stages - 1))


@pytest.mark.parametrize(
    ("stages", "microbatches", "makespan"), [(4, 8, 27), (4, 16, 51), (8, 16, 55), (8, 32, 103)]
)
def test_zb_h1_leaves_a_third_of_the_bubble_at_the_memory_of_1f1b(stages, microbatches, makespan):
    shape = shape_of("zb-h1", stages, microbatches)
    assert run_equal("zb-h1", shape).makespan_s == makespan
    assert Fraction(stages - 1, 3 * microbatches + stages - 1) == 1 - Fraction(
        3 * microbatches, makespan
    )
    assert in_flight("zb-h1", shape) == in_flight("1f1b", shape_of("1f1b", stages, microbatches))


@given(stages=st.integers(2, 10), more=st.integers(0, 12))
def test_zb_h2_has_no_bubble_and_holds_two_p_minus_one(stages, more):
    shape = shape_of("zb-h2", stages, 2 * stages - 1 + more)
    assert run_equal("zb-h2", shape).span_s == 3 * shape.microbatches
    assert max(in_flight("zb-h2", shape)) == 2 * stages - 1


@given(stages=st.integers(2, 10), more=st.integers(0, 12))
def test_zbv_has_no_bubble_and_holds_what_1f1b_holds(stages, more):
    shape = shape_of("zbv", stages, 2 * stages - 1 + more)
    assert run_equal("zbv", shape).span_s == pytest.approx(3 * shape.microbatches)
    assert max(in_flight("zbv", shape)) == stages


@given(stages=st.integers(2, 12), factor=st.integers(2, 4))
def test_v_half_has_half_the_bubble_and_half_the_memory_of_1f1b(stages, factor):
    shape = shape_of("v-half", stages, stages * factor)
    idle = run_equal("v-half", shape).span_s - 3 * shape.microbatches
    assert idle == 3 * (stages - 1) / 2 - (stages % 2) / 2
    assert max(in_flight("v-half", shape)) == (stages + 1) / 2


@given(stages=st.integers(2, 16), factor=st.integers(2, 4))
def test_v_min_has_two_thirds_of_the_bubble_and_a_third_of_the_memory_of_1f1b(stages, factor):
    shape = shape_of("v-min", stages, stages * factor)
    idle = run_equal("v-min", shape).span_s - 3 * shape.microbatches
    assert idle <= 2 * (stages - 1) + (stages % 3 == 0) / 2
    assert max(in_flight("v-min", shape)) <= stages / 3 + 1


@pytest.mark.parametrize(
    ("stages", "microbatches", "unit", "span"), [(4, 8, 4, 51), (8, 32, 8, 199), (4, 14, 7, 84)]
)
def test_zeropp_spans_in_half_stage_slots(stages, microbatches, unit, span):
    shape = Shape(stages, 2, microbatches, unit)
    assert run_equal("zeropp", shape, (2, 2, 2)).span_s == span
    assert max(in_flight("zeropp", shape)) == unit


@settings(deadline=None)
@given(stages=st.integers(2, 8), chunks=st.integers(2, 4), units=st.integers(1, 3))
def test_zeropp_bubbles_for_the_least_and_the_largest_unit(stages, chunks, units):
    least = Shape(stages, chunks, units * stages, stages)
    expected = (stages - 1) / (3 * least.microbatches * chunks + stages - 1)
    assert bubble("zeropp", least) == pytest.approx(expected)
    largest = Shape(stages, chunks, units * (2 * stages - 1), 2 * stages - 1)
    assert bubble("zeropp", largest) == pytest.approx(0, abs=1e-12)


def test_zeropp_gathers_parameters_once_a_pass_for_a_unit_and_reduces_once():
    shape = Shape(4, 2, 8, 4)
    for order in SCHEDULES["zeropp"].orders(shape):
        gathers = [action for action in order if action[0] == GATHER]
        # two units; forward and backward of the first chunk, one turn of the last
        assert len(gathers) == 2 * 3
        assert [a[0] for a in order].count(REDUCE) == 2 * 2


@pytest.mark.parametrize(("unit", "less"), [(9, False), (10, True)])
def test_zeropp_moves_less_than_tensor_parallelism_from_nine_micro_batches_on(unit, less):
    assert moves_less_than_tp(unit=unit, seq_len=4096, micro_batch=1, hidden=8192) is less


@pytest.mark.parametrize(
    ("stages", "microbatches", "span"),
    [(4, 4, 28), (8, 8, 60), (16, 16, 124), (4, 8, 54), (8, 32, 222)],
)
def test_bitpipe_spans_in_half_stage_slots(stages, microbatches, span):
    shape = shape_of("bitpipe", stages, microbatches)
    assert run_equal("bitpipe", shape, (2, 2, 2)).span_s == span
    if stages == microbatches:
        assert 1 - Fraction(6 * microbatches, span) == Fraction(
            stages - 2, 3 * microbatches + stages - 2
        )
        peaks = in_flight("bitpipe", shape)
        assert (min(peaks), max(peaks)) == ((3 * stages + 2) / 4, stages)


@given(half=st.integers(1, 8), factor=st.integers(1, 3))
def test_the_bubble_of_chimera(half, factor):
    p = 2 * half
    equal = shape_of("chimera", p, p * factor)
    if factor < 3:
        assert bubble("chimera", equal, (2, 1, 1)) == pytest.approx(
            (p - 2) / (2 * equal.microbatches + p - 2)
        )
    once = shape_of("chimera", p, p)
    assert bubble("chimera", once) == pytest.approx((p - 2) / (1.5 * p + p - 2))


def test_splitting_the_backward_of_gpipe_shrinks_its_bubble_from_0_273_to_0_2():
    assert round(bubble("gpipe", shape_of("gpipe", 4, 8)), 3) == 0.273
    assert bubble("2bp", shape_of("2bp", 4, 8)) == pytest.approx(0.2)
    assert max(held(SCHEDULES["2bp-1f1b"], shape_of("2bp-1f1b", 4, 8))) > max(
        held(SCHEDULES["1f1b"], shape_of("1f1b", 4, 8))
    )


@given(stages=st.integers(1, 9), microbatches=st.integers(1, 40))
def test_without_a_flush_there_is_no_bubble_and_weights_are_stale(stages, microbatches):
    shape = shape_of("async-1f1b", stages, microbatches)
    schedule = SCHEDULES["async-1f1b"]
    assert bubble("async-1f1b", shape) == pytest.approx(0, abs=1e-9)
    assert not schedule.drains
    endless = schedule.orders(Shape(stages, 1, 4 * stages))
    assert [staleness(order) for order in endless] == list(range(stages))[::-1]


@pytest.mark.parametrize("name", SCHEDULES)
def test_only_the_asynchronous_schedule_is_not_gradient_equivalent(name):
    assert SCHEDULES[name].drains == (name != "async-1f1b")


@pytest.mark.parametrize("name", SCHEDULES)
@settings(deadline=None)
@given(data=st.data())
def test_every_order_is_sound(name, data):
    shape = data.draw(legal_shapes(name))
    assert problems(SCHEDULES[name], shape) == []


@pytest.mark.parametrize("name", SCHEDULES)
@settings(deadline=None)
@given(data=st.data())
def test_what_a_schedule_says_it_holds_is_what_its_orders_hold(name, data):
    shape = data.draw(legal_shapes(name, groups=7))
    schedule = SCHEDULES[name]
    now = [0.0] * shape.stages
    peaks = [0.0] * shape.stages
    for device, order in enumerate(schedule.orders(shape)):
        for kind, _, _ in order:
            now[device] += {FORWARD: 1, BACKWARD: -1, WEIGHT: -1}.get(kind, 0)
            peaks[device] = max(peaks[device], now[device])
    found = [peak / shape.chunks for peak in peaks]
    assert held(schedule, shape) == pytest.approx(found)
    assert all(a <= b + 1e-9 for a, b in zip(least_in_flight(schedule, shape), found, strict=True))


LOOPED = ("interleaved-1f1b", "interleaved-zb", "zeropp")


@pytest.mark.parametrize("name", SCHEDULES)
def test_what_is_sent_is_received_and_the_devices_agree_on_what_crosses(name):
    shape = shape_of(name, 4, 8)
    orders = with_transfers(SCHEDULES[name], shape)
    kinds = [kind for order in orders for kind, _, _ in order]
    crossings = 3 if shape.chunks == 1 else 7 if name in LOOPED else 6
    assert kinds.count(SEND_FORWARD) == kinds.count(RECEIVE_FORWARD) == 8 * crossings
    assert kinds.count(SEND_BACKWARD) == 8 * crossings


def broken(orders):
    return Schedule(name="broken", summary="", orders=lambda _: orders)


TWO = Shape(2, 1, 1)


@pytest.mark.parametrize(
    ("orders", "told"),
    [
        ([[(FORWARD, 0, 0)], [(FORWARD, 0, 0), (BACKWARD, 0, 0)]], "B0 of chunk 0 on device 0"),
        (
            [[(BACKWARD, 0, 0), (FORWARD, 0, 0)], [(FORWARD, 0, 0), (BACKWARD, 0, 0)]],
            "stands before its forward",
        ),
        (
            [
                [(FORWARD, 0, 0), (WEIGHT, 0, 0), (INPUT, 0, 0)],
                [(FORWARD, 0, 0), (BACKWARD, 0, 0)],
            ],
            "stands before its input gradient",
        ),
        (
            [[(FORWARD, 0, 0), (INPUT, 0, 0)], [(FORWARD, 0, 0), (BACKWARD, 0, 0)]],
            "W0 of chunk 0 on device 0 stands 0 times, not 1",
        ),
        (
            [
                [(FORWARD, 0, 0), (BACKWARD, 0, 0)],
                [(FORWARD, 0, 0), (BACKWARD, 0, 0), (FORWARD, 0, 0)],
            ],
            "stands 2 times, not 1",
        ),
    ],
)
def test_an_unsound_order_is_told(orders, told):
    assert any(told in each for each in problems(broken(orders), TWO))


def test_a_cycle_is_named():
    first, second = (FORWARD, 0, 0), (FORWARD, 0, 1)
    back = [(BACKWARD, 0, 0), (BACKWARD, 0, 1)]
    stuck = [[first, back[0], second, back[1]], [second, back[1], first, back[0]]]
    (told,) = problems(broken(stuck), Shape(2, 1, 2))
    named = told.removeprefix("passes wait for one another: ").split(" <- ")
    assert named[0] == named[-1]
    assert len(named) > 2
    assert set(named) <= {
        f"{k}{m} of chunk 0 on device {d}" for k in "FB" for m in (0, 1) for d in (0, 1)
    }


@pytest.mark.parametrize(
    ("name", "shape", "told"),
    [
        (
            "interleaved-1f1b",
            Shape(4, 2, 3),
            "(3) divisible by stages (4); nearest: 4",
        ),
        ("interleaved-zb", Shape(4, 2, 9), "divisible by stages (4); nearest: 8"),
        ("interleaved-1f1b", Shape(4, 1, 4), "at least 2 chunks"),
        ("interleaved-1f1b", Shape(1, 2, 4), "at least 2 stages"),
        ("gpipe", Shape(4, 2, 4), "one chunk a stage, not 2; nearest: 1"),
        ("zbv", Shape(4, 3, 4), "2 chunks a stage, not 3; nearest: 2"),
        ("dualpipe-v", Shape(4, 2, 7), "2 x stages = 8 micro-batches, not 7; nearest: 8"),
        ("zeropp", Shape(4, 2, 8, 3), "a unit of 4 to 7 micro-batches, not 3; nearest: 4"),
        ("zeropp", Shape(4, 2, 8, 9), "a unit of 4 to 7 micro-batches, not 9; nearest: 7"),
        ("zeropp", Shape(4, 2, 3), "at least one unit of 4 micro-batches, not 3; nearest: 4"),
        ("bitpipe", Shape(4, 2, 6), "divisible by stages (4); nearest: 8"),
        ("chimera", Shape(3, 1, 6), "an even number of stages, not 3; nearest: 4"),
    ],
)
def test_an_illegal_shape_is_refused_with_its_rule_and_the_nearest_legal_value(name, shape, told):
    assert told in SCHEDULES[name].problem(shape)


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_runs_the_shape_of_the_table(name):
    assert SCHEDULES[name].problem(shape_of(name, 4, 8)) is None


THEIRS = {
    "gpipe": "ScheduleGPipe",
    "1f1b": "Schedule1F1B",
    "interleaved-1f1b": "ScheduleInterleaved1F1B",
    "interleaved-zb": "ScheduleInterleavedZeroBubble",
    "zbv": "ScheduleZBVZeroBubble",
    "dualpipe-v": "ScheduleDualPipeV",
}


def fake_stage(shape, index):
    """A stage that only has numbers."""
    torch = pytest.importorskip("torch")
    return MagicMock(
        group_size=shape.stages,
        group_rank=0,
        num_stages=shape.stages * shape.chunks,
        stage_index=index,
        submod=torch.nn.Identity(),
        has_backward=True,
    )


def torch_order_of_one_stage(make, shape, index):
    """Torch's own loop over one stage, which writes down what it is asked to do. (The order that
    its 1F1B returns for display leaves out the last stage's first micro-batch.)
    """
    ran = []
    stage = fake_stage(shape, index)
    stage.is_first = stage.is_last = False
    stage.forward_one_chunk.side_effect = lambda m, *_, **__: ran.append((FORWARD, 0, m))
    stage.backward_one_chunk.side_effect = lambda m, **__: ran.append((BACKWARD, 0, m))
    for way in ("fwd", "bwd"):
        for operation in ("send", "recv"):
            getattr(stage, f"get_{way}_{operation}_ops").return_value = []
    m = shape.microbatches
    schedule = make(stage, m, loss_fn=lambda *_: None)
    schedule._stage_forward_initialized = schedule._stage_backward_initialized = True  # noqa: SLF001
    schedule._step_microbatches([()] * m, [{}] * m, [None] * m)  # noqa: SLF001
    return ran


def torch_orders(name, shape):
    """The order lists of torch's schedule class."""
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    make = getattr(schedules, THEIRS[name])
    if shape.chunks == 1:
        return [torch_order_of_one_stage(make, shape, i) for i in range(shape.stages)]
    places = {place: i for i, place in enumerate(SCHEDULES[name].paths(shape)[0])}
    local = [fake_stage(shape, places[0, chunk]) for chunk in range(shape.chunks)]
    orders = make(local, shape.microbatches, loss_fn=lambda *_: None).pipeline_order
    chunks = {i: chunk for (_, chunk), i in places.items()}
    kinds = {
        schedules.FORWARD: FORWARD,
        schedules.FULL_BACKWARD: BACKWARD,
        schedules.BACKWARD_INPUT: INPUT,
        schedules.BACKWARD_WEIGHT: WEIGHT,
    }
    actions = [
        [p for a in orders[rank] if a is not None for p in (a.sub_actions or (a,))]
        for rank in range(shape.stages)
    ]
    return [
        [(kinds[a.computation_type], chunks[a.stage_index], a.microbatch_index) for a in order]
        for order in actions
    ]


@pytest.mark.parametrize("microbatches", [4, 8, 12, 24])
@pytest.mark.parametrize("stages", [2, 3, 4, 8])
@pytest.mark.parametrize("name", THEIRS)
def test_orders_are_those_of_torch(name, stages, microbatches):
    counts = (2, 3, 4) if SCHEDULES[name].chunks is None else SCHEDULES[name].chunks
    for chunks in counts:
        shape = Shape(stages, chunks, microbatches)
        fewer = name == "1f1b" and microbatches < stages  # torch refuses it, and it is legal
        if SCHEDULES[name].problem(shape) is None and not fewer:
            assert SCHEDULES[name].orders(shape) == torch_orders(name, shape)
