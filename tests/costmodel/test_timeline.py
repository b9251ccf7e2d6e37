"""The event simulation: an independent longest path, Brent's bounds, traffic, idle time."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise

import networkx as nx
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from pipelines import (
    ends_of,
    equal_times,
    graph_of_passes,
    longest_paths,
    pipelines,
    run_equal,
    shape_of,
)

from costmodel.events import CycleError, Task, run_tasks
from costmodel.occupancy import Sizes, held_over_time
from costmodel.schedules import FORWARD, GATHER, INPUT, SCHEDULES, Schedule, Shape
from costmodel.simulate import in_flight, simulate
from costmodel.timeline import CAUSES, COMPUTE, DATA, HANDOVER, TENSOR, Traffic, play

LETTER = {0: "F", 1: "B", 2: "B", 3: "W"}


def played_ends(timeline):
    return {
        (LETTER[e.kind], (e.device, e.chunk), e.microbatch): e.end_s
        for e in timeline.events
        if e.stream == COMPUTE
    }


@settings(max_examples=100, deadline=None)
@given(pipeline=pipelines(by_batch=True))
def test_every_pass_ends_at_its_longest_path(pipeline):
    name, shape, times, delays = pipeline
    timeline = play(SCHEDULES[name], shape, times, Traffic(link_s=[0.0] * len(delays)))
    graph = graph_of_passes(name, shape, times, [0.0] * len(delays))
    ends = ends_of(graph)
    assert played_ends(timeline) == pytest.approx(ends)
    assert max(ends.values()) == pytest.approx(
        nx.dag_longest_path_length(_weighted(graph), weight="weight")
    )


def _weighted(graph):
    """The same graph with seconds on its edges, as networkx wants them."""
    weighted = nx.DiGraph()
    for node, data in graph.nodes(data=True):
        weighted.add_edge((node, "start"), (node, "end"), weight=data["seconds"])
    for before, after, data in graph.edges(data=True):
        weighted.add_edge((before, "end"), (after, "start"), weight=data["wait"])
    return weighted


@settings(max_examples=100, deadline=None)
@given(pipeline=pipelines(by_batch=True))
def test_the_fast_simulation_ends_where_the_longest_path_ends(pipeline):
    name, shape, times, delays = pipeline
    if SCHEDULES[name].drains:
        span = simulate(SCHEDULES[name], shape, times, delays)
        assert span.ends_s == pytest.approx(longest_paths(name, shape, times, delays))


@settings(max_examples=150, deadline=None)
@given(pipeline=pipelines(groups=20))
def test_the_short_cut_of_a_long_run_changes_nothing(pipeline):
    name, shape, times, delays = pipeline
    schedule = SCHEDULES[name]
    if schedule.drains:
        whole = simulate(replace(schedule, steady=False), shape, times, delays)
        cut = simulate(schedule, shape, times, delays)
        assert cut.ends_s == pytest.approx(whole.ends_s, rel=1e-12)
        assert cut.starts_s == pytest.approx(whole.starts_s, rel=1e-12)


@pytest.mark.parametrize("name", ["1f1b", "interleaved-1f1b", "zb-h1", "zbv"])
def test_a_long_run_asks_for_no_more_passes_than_a_short_one(name):
    """What a short-cut looks at does not grow with the micro-batches."""
    asked = []
    schedule = SCHEDULES[name]

    def counted(shape):
        asked.append(shape.microbatches)
        return schedule.orders(shape)

    for microbatches in (10_000, 1_000_000):
        shape = shape_of(name, 4, microbatches)
        simulate(replace(schedule, orders=counted), shape, equal_times(name, shape))
    assert max(asked) < 100


@settings(max_examples=60, deadline=None)
@given(pipeline=pipelines(), more=st.floats(0.1, 5), data=st.data())
def test_lengthening_a_critical_pass_lengthens_the_span_by_as_much(pipeline, more, data):
    name, shape, times, delays = pipeline
    zero = [0.0] * len(delays)
    graph = graph_of_passes(name, shape, times, zero)
    path = [n for n, what in nx.dag_longest_path(_weighted(graph)) if what == "end"]
    assume(path)  # all passes may take no time
    letter, (device, chunk), batch = data.draw(st.sampled_from(path))
    table = {"F": "forward_s", "B": "input_s", "W": "weight_s"}[letter]
    grid = [[[cell] * shape.microbatches for cell in row] for row in getattr(times, table)]
    grid[device][chunk][batch] += more
    longer = replace(times, **{table: grid})
    before = play(SCHEDULES[name], shape, times).makespan_s
    assert play(SCHEDULES[name], shape, longer).makespan_s == pytest.approx(before + more)


def random_graph(rng):
    """A task graph in which each task may wait for any before it."""
    count = rng.randint(1, 40)
    density = rng.choice([0.0, 0.05, 0.2, 0.6])
    return [
        Task(
            "devices",
            rng.choice([1.0, rng.uniform(0.0, 5.0)]),
            tuple(j for j in range(i) if rng.random() < density),
        )
        for i in range(count)
    ]


def test_a_pool_keeps_brents_bounds_for_500_random_graphs():
    rng = random.Random(4)
    for _ in range(500):
        tasks, servers = random_graph(rng), rng.randint(1, 8)
        _, ends = run_tasks(tasks, {"devices": servers})
        work = sum(task.seconds for task in tasks)
        depth = [0.0] * len(tasks)
        for i, task in enumerate(tasks):
            depth[i] = task.seconds + max((depth[j] for j in task.waits), default=0.0)
        span = max(ends)
        assert max(work / servers, *depth) <= span * (1 + 1e-12)
        assert span <= work / servers + max(depth) + 1e-9


def test_a_cycle_of_tasks_is_named():
    tasks = [Task("a", 1.0, (1,)), Task("b", 1.0, (0,))]
    with pytest.raises(CycleError, match="task 0 <- task 1 <- task 0"):
        run_tasks(tasks)


def test_a_schedule_whose_passes_wait_for_one_another_is_named_with_its_cycle():
    order = [(FORWARD, 0, 0), (INPUT, 0, 0)]
    stuck = Schedule(name="stuck", summary="", orders=lambda _: [order, order[::-1]])
    times = equal_times("1f1b", Shape(2, 1, 1))
    with pytest.raises(CycleError, match="B0 of chunk 0 on device 1 <- F0 of chunk 0 on device 1"):
        play(stuck, Shape(2, 1, 1), times)


@settings(max_examples=100, deadline=None)
@given(pipeline=pipelines(by_batch=True), data=st.data())
def test_busy_and_idle_time_add_up_to_the_makespan(pipeline, data):
    name, shape, times, delays = pipeline
    chunks = len(times.forward_s[0])
    grid = [[data.draw(st.floats(0, 2))] * chunks] * shape.stages
    traffic = Traffic(
        link_s=delays,
        latency_s=data.draw(st.floats(0, 1)),
        overlaps=data.draw(st.booleans()),
        tensor_s=grid if data.draw(st.booleans()) else (),
        gather_s=grid,
        reduce_s=grid,
    )
    timeline = play(SCHEDULES[name], shape, times, traffic)
    for device, idle in enumerate(timeline.idle_s):
        busy = sum(
            e.end_s - e.start_s
            for e in timeline.events
            if e.device == device and e.stream == COMPUTE
        )
        assert set(idle) == set(CAUSES)
        assert min(idle.values()) >= -1e-9
        assert busy + sum(idle.values()) == pytest.approx(timeline.makespan_s)
        assert 0 <= timeline.exposed_s[device] <= timeline.makespan_s


@settings(max_examples=60, deadline=None)
@given(pipeline=pipelines(), data=st.data())
def test_a_stream_runs_one_event_at_a_time_and_no_event_before_what_it_waits_for(pipeline, data):
    name, shape, times, delays = pipeline
    traffic = Traffic(link_s=delays, latency_s=data.draw(st.floats(0, 1)))
    timeline = play(SCHEDULES[name], shape, times, traffic)
    for event, waits in zip(timeline.events, timeline.waits, strict=True):
        assert all(timeline.events[i].end_s <= event.start_s + 1e-9 for i in waits)
    for stream in (COMPUTE, TENSOR, DATA):
        for device in range(shape.stages):
            own = sorted(
                (e.start_s, e.end_s)
                for e in timeline.events
                if (e.device, e.stream) == (device, stream)
            )
            assert all(a[1] <= b[0] + 1e-9 for a, b in pairwise(own))


def two_devices(**traffic):
    shape = shape_of("1f1b", 2, 1)
    return play(SCHEDULES["1f1b"], shape, equal_times("1f1b", shape), Traffic(**traffic))


def test_hand_over_and_latency_delay_what_follows_and_are_told_as_such():
    timeline = two_devices(link_s=[3.0, 9.0], latency_s=0.5)
    # F 1, 3.5 under way, F 1, B + W 2, 3.5 back, B + W 2
    assert timeline.makespan_s == 13
    assert timeline.idle_s[0][HANDOVER] == 3.5
    assert timeline.idle_s[0]["dependency"] == 6.5
    assert timeline.idle_s[1]["warm-up"] == 4.5
    assert timeline.exposed_s == (3.5, 0.0)


def test_hand_over_that_does_not_overlap_blocks_the_sender():
    shape = shape_of("1f1b", 2, 2)
    times = equal_times("1f1b", shape)
    ends = {}
    for overlaps in (True, False):
        timeline = play(
            SCHEDULES["1f1b"], shape, times, Traffic(link_s=[1.0, 1.0], overlaps=overlaps)
        )
        ends[overlaps] = timeline.makespan_s
        streams = {e.stream for e in timeline.events if e.kind > GATHER}
        assert streams == {HANDOVER if overlaps else COMPUTE}
    assert ends[True] < ends[False]


def test_one_direction_of_a_link_carries_one_micro_batch_at_a_time():
    shape = shape_of("gpipe", 2, 4)
    timeline = play(
        SCHEDULES["gpipe"], shape, equal_times("gpipe", shape), Traffic(link_s=[5.0, 0.0])
    )
    sends = [e for e in timeline.events if e.stream == HANDOVER and e.device == 0]
    assert [e.start_s for e in sends] == [1, 6, 11, 16]


def test_tensor_parallel_traffic_stands_between_a_pass_and_the_next():
    shape = shape_of("1f1b", 1, 2)
    timeline = play(
        SCHEDULES["1f1b"], shape, equal_times("1f1b", shape), Traffic(tensor_s=[[0.25]])
    )
    assert timeline.makespan_s == 2 * (3 + 2 * 0.25)
    assert timeline.exposed_s == (3 * 0.25,)  # the last one ends the step


def test_gathers_of_zeropp_hide_behind_the_passes_before_them():
    shape = Shape(4, 2, 8, 4)
    times = equal_times("zeropp", shape, (2, 2, 2))
    for seconds in (0.5, 1.0):
        grid = [[seconds] * 2] * 4
        timeline = play(SCHEDULES["zeropp"], shape, times, Traffic(gather_s=grid))
        # only the very first gather of a device has nothing to hide behind
        assert timeline.spans_s[0] == run_equal("zeropp", shape, (2, 2, 2)).span_s
        assert timeline.idle_s[0]["warm-up"] == seconds
        assert timeline.exposed_s == (0.0,) * 4


@settings(max_examples=60, deadline=None)
@given(pipeline=pipelines())
def test_what_a_device_holds_peaks_where_its_order_says_and_returns_to_nothing(pipeline):
    name, shape, times, _ = pipeline
    schedule = SCHEDULES[name]
    times = equal_times(name, shape)  # a pass of no time would hold nothing
    share = [[1 / shape.chunks] * (shape.chunks * schedule.copies)] * shape.stages
    timeline = play(schedule, shape, times)
    points = held_over_time(timeline, Sizes(activations=share, gathered=share, gradients=share))
    for own, peak in zip(points, in_flight(schedule, shape), strict=True):
        assert max(h.activations + h.for_weights for h in own) == pytest.approx(peak)
        assert own[-1][1:] == pytest.approx((0, 0, 0, 0))
        assert min(min(h[1:]) for h in own) >= -1e-9


def test_zeropp_holds_the_gathered_parameters_of_two_chunks_at_most():
    shape = Shape(4, 4, 8, 4)
    timeline = play(SCHEDULES["zeropp"], shape, equal_times("zeropp", shape, (4, 4, 4)))
    ones = [[1] * 4] * 4
    for own in held_over_time(timeline, Sizes(activations=ones, gathered=ones)):
        assert 1 <= max(h.gathered for h in own) <= 3
        assert own[-1].gathered == 0
