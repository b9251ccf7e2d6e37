"""Schedules and their simulation: published makespans, an independent longest path, torch's own
orders, and the lower bound of the search.
"""

from __future__ import annotations

from types import SimpleNamespace
from unittest.mock import MagicMock

import networkx as nx
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from costmodel.schedules import BACKWARD, FORWARD, SCHEDULES, Schedule
from costmodel.simulate import DeadlockError, peak_held, simulate
from planner.bounds import BlockTimes, PipelineBound

STAGES, MICROBATCHES = 4, 8
ONE_CHUNK = ("gpipe", "1f1b")
INTERLEAVED = "interleaved-1f1b"
EVERY = (*ONE_CHUNK, INTERLEAVED)


def equal_stages(name: str, stages: int, chunks: int, microbatches: int) -> float:
    """Makespan with F=1 and B=2 for a stage's whole share."""
    return simulate(
        SCHEDULES[name],
        forward_s=[[1 / chunks] * chunks] * stages,
        backward_s=[[2 / chunks] * chunks] * stages,
        delay_s=[0.0] * stages,
        microbatches=microbatches,
    ).makespan_s


@pytest.mark.parametrize("name", ONE_CHUNK)
def test_four_stages_and_eight_micro_batches_take_33_slots(name):
    assert equal_stages(name, STAGES, 1, MICROBATCHES) == 33


def test_gpipe_holds_every_micro_batch_and_1f1b_as_many_as_stages_follow():
    held = [[1]] * STAGES
    gpipe = peak_held(SCHEDULES["gpipe"], held_bytes=held, microbatches=MICROBATCHES)
    one_f_one_b = peak_held(SCHEDULES["1f1b"], held_bytes=held, microbatches=MICROBATCHES)
    assert gpipe == (8, 8, 8, 8)
    assert one_f_one_b == (4, 3, 2, 1)


@given(stages=st.integers(1, 12), factor=st.integers(1, 4), chunks=st.integers(1, 5))
def test_the_bubble_is_p_minus_one_over_vm_plus_p_minus_one(stages, factor, chunks):
    microbatches = stages * factor
    names = (INTERLEAVED,) if chunks > 1 else ONE_CHUNK
    for name in names:
        makespan = equal_stages(name, stages, chunks, microbatches)
        bubble = 1 - 3 * microbatches / makespan
        assert bubble == pytest.approx((stages - 1) / (chunks * microbatches + stages - 1))


@pytest.mark.parametrize("name", SCHEDULES)
@given(stages=st.integers(2, 9), factor=st.integers(1, 4), chunks=st.integers(2, 4))
def test_what_is_in_flight_is_what_the_order_holds(name, stages, factor, chunks):
    schedule = SCHEDULES[name]
    chunks, microbatches = (chunks if schedule.interleaves else 1), stages * factor
    peaks = peak_held(schedule, held_bytes=[[1] * chunks] * stages, microbatches=microbatches)
    told = [schedule.in_flight(stages, chunks, microbatches, stage) for stage in range(stages)]
    assert told == pytest.approx([peak / chunks for peak in peaks])


@pytest.mark.parametrize("name", SCHEDULES)
@given(stages=st.integers(2, 6), factor=st.integers(1, 4), chunks=st.integers(2, 4))
def test_every_rank_runs_every_pass_of_its_chunks_once(name, stages, factor, chunks):
    schedule = SCHEDULES[name]
    chunks, microbatches = (chunks if schedule.interleaves else 1), stages * factor
    wanted = [
        (kind, chunk, batch)
        for kind in (FORWARD, BACKWARD)
        for chunk in range(chunks)
        for batch in range(microbatches)
    ]
    for stage in range(stages):
        assert sorted(schedule.order(stages, chunks, microbatches, stage)) == wanted


@st.composite
def pipelines(draw, names=EVERY, *, groups=(1, 3), most_delay: float = 2.0):
    """A schedule with random unequal durations of all chunks, and delays between stages."""
    name = draw(st.sampled_from(names))
    stages = draw(st.integers(2, 6))
    chunks = draw(st.integers(2, 3)) if name == INTERLEAVED else 1
    microbatches = draw(st.integers((groups[0] - 1) * stages + 1, groups[1] * stages))
    if name == INTERLEAVED:
        microbatches = stages * -(-microbatches // stages)
    durations = st.one_of(st.integers(0, 3).map(float), st.floats(0, 10, allow_subnormal=False))
    grid = st.lists(
        st.lists(durations, min_size=chunks, max_size=chunks), min_size=stages, max_size=stages
    )
    delays = st.lists(st.floats(0, most_delay), min_size=stages, max_size=stages)
    return name, draw(grid), draw(grid), draw(delays), microbatches


def longest_paths(name, forward, backward, delay, microbatches) -> list[float]:
    """End of each stage: the longest path to its last pass in the graph of all passes."""
    stages, chunks = len(forward), len(forward[0])
    durations, graph, lasts = (forward, backward), nx.DiGraph(), []
    for stage in range(stages):
        order = SCHEDULES[name].order(stages, chunks, microbatches, stage)
        passes = [(kind, chunk * stages + stage, batch) for kind, chunk, batch in order]
        nx.add_path(graph, passes, wait=0.0)
        lasts.append(passes[-1])
    for batch in range(microbatches):
        way = [(FORWARD, virtual, batch) for virtual in range(stages * chunks)]
        back = [(BACKWARD, virtual, batch) for virtual in reversed(range(stages * chunks))]
        graph.add_edge(way[-1], back[0], wait=0.0)
        for before, after in nx.utils.pairwise(way):
            graph.add_edge(before, after, wait=delay[before[1] % stages])
        for before, after in nx.utils.pairwise(back):
            graph.add_edge(before, after, wait=delay[after[1] % stages])
    ends: dict[tuple[int, int, int], float] = {}
    for each in nx.topological_sort(graph):
        ready = max(
            (ends[before] + graph.edges[before, each]["wait"] for before in graph.pred[each]),
            default=0.0,
        )
        kind, virtual, _ = each
        ends[each] = ready + durations[kind][virtual % stages][virtual // stages]
    return [ends[last] for last in lasts]


def simulated_ends(name, forward, backward, delay, microbatches) -> tuple[float, ...]:
    return simulate(
        SCHEDULES[name],
        forward_s=forward,
        backward_s=backward,
        delay_s=delay,
        microbatches=microbatches,
    ).stage_ends_s


@given(pipeline=pipelines())
def test_the_simulation_is_the_longest_path_through_the_graph_of_passes(pipeline):
    assert simulated_ends(*pipeline) == pytest.approx(longest_paths(*pipeline))


FIVE_UNEVEN_STAGES = (
    INTERLEAVED,
    [[0, 3], [2, 2], [0.6338995594958337, 0], [0.012706866562614993, 1], [3, 1]],
    [[1, 0], [0, 3], [0.9982776226651779, 1], [2, 1], [0, 3]],
    [0.0] * 5,
    35,
)


# A short cut that trusts the slope of a long run is wrong for interleaved passes: the slope may
# touch the busiest stage's time and settle above it. Here 262.6, not 260.6.
@settings(max_examples=60)
@example(pipeline=FIVE_UNEVEN_STAGES)
@given(pipeline=pipelines(groups=(5, 14), most_delay=0.0))
def test_a_long_run_is_the_longest_path_as_well(pipeline):
    assert simulated_ends(*pipeline) == pytest.approx(longest_paths(*pipeline))


LIGHT_LAST_STAGE = (
    INTERLEAVED,
    [[5.0, 5.0]] * 4 + [[4.0, 4.0]],
    [[6.5, 6.5]] * 4 + [[5.2, 5.2]],
    [0.0] * 5,
    5,
)


def assert_not_faster_than_its_bound(name, forward, backward, delay, microbatches):
    step = max(longest_paths(name, forward, backward, delay, microbatches))
    works = [sum(f) + sum(b) for f, b in zip(forward, backward, strict=True)]
    bound = PipelineBound(name, len(works), len(forward[0]), microbatches)
    assert bound.least(sum(works), max(works)) <= step * (1 + 1e-9)


@settings(max_examples=300)
@given(pipeline=pipelines(ONE_CHUNK, most_delay=0.0))
def test_no_pipeline_of_one_chunk_a_stage_is_faster_than_its_bound(pipeline):
    assert_not_faster_than_its_bound(*pipeline)


@settings(max_examples=300)
@example(pipeline=LIGHT_LAST_STAGE)
@example(pipeline=(INTERLEAVED, [[1, 1], [1, 1]], [[1, 1], [1, 0]], [0.0, 0.0], 2))
@given(pipeline=pipelines((INTERLEAVED,), most_delay=0.0))
def test_no_interleaved_pipeline_of_unequal_chunks_is_faster_than_its_bound(pipeline):
    assert_not_faster_than_its_bound(*pipeline)


@settings(max_examples=300)
@given(data=st.data())
def test_no_division_of_whole_blocks_is_faster_than_its_bound(data):
    """Any number of blocks on each stage, a head on the last, work once a step that grows with
    the blocks; several chunks get equal shares of a full stage.
    """
    name = data.draw(st.sampled_from(sorted(SCHEDULES)))
    chunks = data.draw(st.integers(2, 3)) if name == INTERLEAVED else 1
    stages = data.draw(st.integers(2 if chunks > 1 else 1, 5))
    m = data.draw(st.integers(1, 3 * stages)) * (stages if chunks > 1 else 1)
    held = data.draw(st.lists(st.integers(chunks, 3 * chunks), min_size=stages, max_size=stages))
    forward, head = data.draw(st.floats(0.1, 0.6)), data.draw(st.floats(0, 3))
    once = data.draw(st.floats(0, 5))
    shares = [[n // chunks + (c >= chunks - n % chunks) for c in range(chunks)] for n in held]
    forwards = [[n * forward for n in share] for share in shares]
    backwards = [[n * (1 - forward) for n in share] for share in shares]
    forwards[-1][-1] += head * forward
    backwards[-1][-1] += head * (1 - forward)
    ends = longest_paths(name, forwards, backwards, [0.0] * stages, m)
    step = max(end + once * n for end, n in zip(ends, held, strict=True))
    times = BlockTimes(block=1.0, forward_part=forward, once=once, head=head)
    bound = PipelineBound(name, stages, chunks, m)
    assert bound.whole_blocks(sum(held), times) <= step * (1 + 1e-9)


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_bound_is_reached_by_equal_stages(name):
    chunks = 2 if name == INTERLEAVED else 1
    bound = PipelineBound(name, STAGES, chunks, MICROBATCHES)
    blocks = bound.whole_blocks(2 * STAGES, BlockTimes(block=1.5, forward_part=1 / 3))
    assert max(bound.least(12.0, 3.0), blocks) == pytest.approx(
        equal_stages(name, STAGES, chunks, MICROBATCHES)
    )


def test_a_schedule_whose_passes_wait_for_one_another_is_told():
    def backward_first(_stages, _chunks, microbatches, _stage):
        return [(kind, 0, m) for kind in (BACKWARD, FORWARD) for m in range(microbatches)]

    stuck = Schedule("stuck", backward_first, lambda *_: 1.0)
    times = [[1.0], [1.0]]
    with pytest.raises(DeadlockError, match="stuck"):
        simulate(stuck, forward_s=times, backward_s=times, delay_s=[0.0, 0.0], microbatches=2)


@pytest.mark.parametrize(
    ("microbatches", "nearest"), [(3, 4), (5, 4), (7, 8), (9, 8), (1, 4), (15, 16)]
)
def test_interleaving_refuses_uneven_micro_batches_and_names_the_nearest(microbatches, nearest):
    problem = SCHEDULES[INTERLEAVED].problem(stages=4, chunks=2, microbatches=microbatches)
    assert problem == (
        f"interleaved-1f1b needs micro-batches ({microbatches}) divisible by stages (4); "
        f"nearest: {nearest}"
    )


def test_schedules_say_which_numbers_of_chunks_and_stages_they_run():
    assert SCHEDULES["1f1b"].problem(stages=4, chunks=1, microbatches=3) is None
    assert "one chunk" in SCHEDULES["gpipe"].problem(stages=4, chunks=2, microbatches=4)
    assert "2 chunks" in SCHEDULES[INTERLEAVED].problem(stages=4, chunks=1, microbatches=4)
    assert "2 stages" in SCHEDULES[INTERLEAVED].problem(stages=1, chunks=2, microbatches=4)
    assert SCHEDULES[INTERLEAVED].problem(stages=4, chunks=2, microbatches=8) is None


SIZES = [(2, 1), (2, 2), (3, 2), (4, 8), (4, 3), (8, 16), (5, 7), (1, 4)]


@pytest.mark.parametrize(("stages", "microbatches"), SIZES)
@pytest.mark.parametrize(("name", "theirs"), [("gpipe", "ScheduleGPipe"), ("1f1b", "Schedule1F1B")])
def test_a_stage_runs_the_passes_that_torch_runs(name, theirs, stages, microbatches):
    """Torch's own loop over one stage, with a stage that writes down what it is asked to do."""
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    for stage in range(stages):
        ran: list[tuple[int, int, int]] = []
        module = MagicMock(stage_index=stage)
        module.forward_one_chunk.side_effect = lambda m, *_, **__: ran.append((FORWARD, 0, m))  # noqa: B023
        module.backward_one_chunk.side_effect = lambda m, **__: ran.append((BACKWARD, 0, m))  # noqa: B023
        for direction in ("fwd", "bwd"):
            for operation in ("send", "recv"):
                getattr(module, f"get_{direction}_{operation}_ops").return_value = []
        run = MagicMock(_stage=module, _num_stages=stages, _n_microbatches=microbatches)
        run._check_inputs.return_value = ([()] * microbatches, [{}] * microbatches)  # noqa: SLF001
        getattr(schedules, theirs)._step_microbatches(run)  # noqa: SLF001
        assert SCHEDULES[name].order(stages, 1, microbatches, stage) == ran


@pytest.mark.parametrize("chunks", [2, 3, 4])
@pytest.mark.parametrize(("stages", "microbatches"), [(2, 2), (2, 8), (4, 4), (4, 8), (8, 24)])
def test_the_interleaved_order_is_the_one_that_torch_generates(stages, chunks, microbatches):
    """Torch's generator wants only these numbers of the schedule; its idle slots are left out."""
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    rounds = max(1, microbatches // stages)
    sizes = SimpleNamespace(
        n_local_stages=chunks,
        pp_group_size=stages,
        microbatches_per_round=microbatches // rounds,
        _n_microbatches=microbatches,
    )
    generate = schedules.ScheduleInterleaved1F1B._calculate_single_rank_operations  # noqa: SLF001
    for stage in range(stages):
        theirs = [
            (
                FORWARD if action.computation_type is schedules.FORWARD else BACKWARD,
                action.stage_index // stages,
                action.microbatch_index,
            )
            for action in generate(sizes, stage)
            if action is not None
        ]
        assert SCHEDULES[INTERLEAVED].order(stages, chunks, microbatches, stage) == theirs
