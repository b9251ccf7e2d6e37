"""Helpers of the schedule tests: shapes, equal stages, and a longest path of their own."""

from __future__ import annotations

import networkx as nx
from hypothesis import strategies as st

from costmodel.schedules import BACKWARD, FORWARD, INPUT, SCHEDULES, WEIGHT, Shape
from costmodel.simulate import PassTimes, peak_held, simulate


def shape_of(name, stages, microbatches, chunks=None, unit=0):
    return Shape(stages, chunks or SCHEDULES[name].usual_chunks, microbatches, unit)


def equal_times(name, shape, times=(1, 1, 1)):
    """Durations of a whole stage, shared equally by the chunks that a micro-batch crosses."""
    chunks = shape.chunks * SCHEDULES[name].copies
    tables = ([[t / shape.chunks] * chunks] * shape.stages for t in times)
    return PassTimes(**dict(zip(("forward_s", "input_s", "weight_s"), tables, strict=True)))


def run_equal(name, shape, times=(1, 1, 1)):
    return simulate(SCHEDULES[name], shape, equal_times(name, shape, times))


def bubble(name, shape, times=(1, 1, 1)):
    """Idle time of the device with the longest span, over that span."""
    return 1 - shape.microbatches * sum(times) / run_equal(name, shape, times).span_s


def in_flight(name, shape):
    """Micro-batches of a device's share between forward and (input gradient of the) backward."""
    share = [1 / shape.chunks] * (shape.chunks * SCHEDULES[name].copies)
    return peak_held(SCHEDULES[name], shape, [share] * shape.stages, until_weight=False)


def legal_shapes(name, stages=(2, 6), groups=3):
    """Any shape that the schedule runs."""
    schedule = SCHEDULES[name]

    @st.composite
    def shapes(draw):
        p = draw(st.integers(*stages))
        if schedule.copies > 1:
            p += p % 2
        chunks = draw(st.sampled_from(schedule.chunks or (2, 3)))
        unit = draw(st.integers(p, 2 * p - 1)) if name == "zeropp" else 0
        options = [Shape(p, chunks, m, unit) for m in range(1, groups * p + 1)]
        return draw(st.sampled_from([s for s in options if schedule.problem(s) is None]))

    return shapes()


DURATIONS = st.one_of(st.integers(0, 3).map(float), st.floats(0, 10, allow_subnormal=False))


@st.composite
def pipelines(draw, names=tuple(SCHEDULES), *, groups=3, most_delay=2.0, by_batch=False):
    """A schedule with random unequal durations of all chunks, and delays between devices."""
    name = draw(st.sampled_from(names))
    shape = draw(legal_shapes(name, groups=groups))
    chunks = shape.chunks * SCHEDULES[name].copies
    seconds = DURATIONS
    if by_batch:
        size = shape.microbatches
        seconds = st.lists(DURATIONS, min_size=size, max_size=size)
    grid = st.lists(
        st.lists(seconds, min_size=chunks, max_size=chunks),
        min_size=shape.stages,
        max_size=shape.stages,
    )
    times = PassTimes(forward_s=draw(grid), input_s=draw(grid), weight_s=draw(grid))
    delays = st.lists(st.floats(0, most_delay), min_size=shape.stages, max_size=shape.stages)
    return name, shape, times, draw(delays)


def _seconds(times, kind, place, batch):
    tables = {
        FORWARD: (times.forward_s,),
        INPUT: (times.input_s,),
        WEIGHT: (times.weight_s,),
        BACKWARD: (times.input_s, times.weight_s),
    }
    cells = (table[place[0]][place[1]] for table in tables[kind])
    return sum(cell if isinstance(cell, float | int) else cell[batch] for cell in cells)


def graph_of_passes(name, shape, times, delays):
    """Passes as nodes with ``seconds``, what they wait for as edges with ``wait``."""
    schedule, graph = SCHEDULES[name], nx.DiGraph()
    kinds = {}
    for device, order in enumerate(schedule.orders(shape)):
        passes = [
            ("W" if k == WEIGHT else "F" if k == FORWARD else "B", (device, c), b)
            for k, c, b in order
            if k in (FORWARD, BACKWARD, INPUT, WEIGHT)
        ]
        kinds |= {
            node: k
            for node, (k, _, _) in zip(passes, [a for a in order if a[0] <= WEIGHT], strict=True)
        }
        nx.add_path(graph, passes, wait=0.0)
    paths = schedule.paths(shape)
    for batch, direction in enumerate(schedule.microbatch_paths(shape)):
        path = paths[direction]
        way = [("F", place, batch) for place in path]
        back = [("B", place, batch) for place in reversed(path)]
        graph.add_edge(way[-1], back[0], wait=0.0)
        for legs in (way, back):
            for before, after in nx.utils.pairwise(legs):
                (a, b) = (before[1][0], after[1][0])
                forward = (a, b) if legs is way else (b, a)
                graph.add_edge(before, after, wait=_wait(*forward, delays))
        for place in path:
            if ("W", place, batch) in graph:
                graph.add_edge(("B", place, batch), ("W", place, batch), wait=0.0)
    for node in graph:
        graph.nodes[node]["seconds"] = _seconds(times, kinds[node], node[1], node[2])
    return graph


def _wait(a, b, delays):
    """The link between neighbours a and b, where b comes next in the model."""
    if a == b:
        return 0.0
    if b == (a + 1) % len(delays):
        return delays[a]
    return delays[b]


def ends_of(graph):
    """End of every pass: the longest path to it."""
    ends = {}
    for node in nx.topological_sort(graph):
        ready = max(
            (ends[before] + graph.edges[before, node]["wait"] for before in graph.pred[node]),
            default=0.0,
        )
        ends[node] = ready + graph.nodes[node]["seconds"]
    return ends


def longest_paths(name, shape, times, delays):
    """End of each device's last pass."""
    ends = ends_of(graph_of_passes(name, shape, times, delays))
    lasts = [0.0] * shape.stages
    for (_, (device, _), _), end in ends.items():
        lasts[device] = max(lasts[device], end)
    return lasts
