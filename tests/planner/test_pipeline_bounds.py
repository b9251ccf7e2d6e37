"""The lower bounds of the search against random pipelines of every schedule."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pipelines import longest_paths, pipelines, run_equal, shape_of

from costmodel.schedules import SCHEDULES, Shape
from costmodel.simulate import PassTimes
from planner.pipelinebound import BlockTimes, PipelineBound

ONE_CHUNK = ("gpipe", "1f1b")
INTERLEAVED = "interleaved-1f1b"


def whole(forward, backward):
    """Durations of whole backward passes."""
    nothing = [[0.0] * len(row) for row in backward]
    return PassTimes(forward_s=forward, input_s=backward, weight_s=nothing)


def assert_not_faster_than_its_bound(name, shape, times, delays):
    step = max(longest_paths(name, shape, times, delays))
    copies = SCHEDULES[name].copies
    works = [sum(map(sum, zip(*rows, strict=True))) / copies for rows in zip(
        times.forward_s, times.input_s, times.weight_s, strict=True)]  # fmt: skip
    forwards = [sum(row) for row in times.forward_s]
    part = min(f / w if w else 0.0 for f, w in zip(forwards, works, strict=True))
    bound = PipelineBound(name, shape.stages, shape.chunks, shape.microbatches, part)
    assert bound.least(sum(works), max(works)) <= step * (1 + 1e-9)


@settings(max_examples=300, deadline=None)
@given(pipeline=pipelines(ONE_CHUNK, most_delay=0.0))
def test_no_pipeline_of_one_chunk_a_stage_is_faster_than_its_bound(pipeline):
    assert_not_faster_than_its_bound(*pipeline)


LIGHT_LAST_STAGE = (
    INTERLEAVED,
    Shape(5, 2, 5),
    whole([[5.0, 5.0]] * 4 + [[4.0, 4.0]], [[6.5, 6.5]] * 4 + [[5.2, 5.2]]),
    [0.0] * 5,
)
TWO_STAGES = (INTERLEAVED, Shape(2, 2, 2), whole([[1, 1], [1, 1]], [[1, 1], [1, 0]]), [0.0, 0.0])


@settings(max_examples=300, deadline=None)
@example(pipeline=LIGHT_LAST_STAGE)
@example(pipeline=TWO_STAGES)
@given(pipeline=pipelines(most_delay=0.0))
def test_no_pipeline_of_any_schedule_is_faster_than_its_bound(pipeline):
    if SCHEDULES[pipeline[0]].drains:
        assert_not_faster_than_its_bound(*pipeline)


@pytest.mark.parametrize("name", SCHEDULES)
@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_no_division_of_whole_blocks_is_faster_than_its_bound(name, data):
    """Any number of blocks on each stage, a head behind the last, work once a step that grows with
    the blocks; several chunks get equal shares of a full stage.
    """
    schedule = SCHEDULES[name]
    chunks = data.draw(st.sampled_from(schedule.chunks or (2, 3)))
    stages = data.draw(st.integers(2 if chunks > 1 else 1, 5))
    stages += stages % 2 if schedule.copies > 1 else 0
    options = [Shape(stages, chunks, m) for m in range(1, 3 * stages + 1)]
    shape = data.draw(st.sampled_from([s for s in options if schedule.problem(s) is None]))
    held = data.draw(st.lists(st.integers(chunks, 3 * chunks), min_size=stages, max_size=stages))
    if schedule.copies > 1:  # even shares, and a few blocks more anywhere
        more = data.draw(st.lists(st.integers(0, stages - 1), max_size=stages - 1))
        held = [held[0] + more.count(stage) for stage in range(stages)]
    forward, head = data.draw(st.floats(0.1, 0.6)), data.draw(st.floats(0, 3))
    weight = data.draw(st.floats(0, 1 - forward))
    once = data.draw(st.floats(0, 5))
    shares = [[n // chunks + (c >= chunks - n % chunks) for c in range(chunks)] for n in held]
    if schedule.copies > 1:  # the other direction's copy of the opposite stage
        shares = [own + other for own, other in zip(shares, shares[::-1], strict=True)]
    parts = {"forward_s": forward, "input_s": 1 - forward - weight, "weight_s": weight}
    grids = {key: [[n * part for n in share] for share in shares] for key, part in parts.items()}
    for path in schedule.paths(shape):
        device, chunk = path[-1]
        for key, part in parts.items():
            grids[key][device][chunk] += head * part
    times = PassTimes(**grids)
    if not schedule.drains:
        return
    hop = data.draw(st.floats(0, 0.5))
    ends = longest_paths(name, shape, times, [hop] * stages)
    lasting = [sum(share) for share in shares]
    step = max(end + once * n for end, n in zip(ends, lasting, strict=True))
    blocks = BlockTimes(
        block=1.0,
        forward_part=forward,
        weight_part=weight,
        weight=weight,
        once=once,
        head=head,
        hop=hop,
    )
    bound = PipelineBound(name, stages, chunks, shape.microbatches)
    assert bound.whole_blocks(sum(held), blocks) <= step * (1 + 1e-9)


@pytest.mark.parametrize("name", [*ONE_CHUNK, INTERLEAVED])
def test_the_bound_is_reached_by_equal_stages(name):
    shape = shape_of(name, 4, 8)
    bound = PipelineBound(name, 4, shape.chunks, 8)
    blocks = bound.whole_blocks(8, BlockTimes(block=1.5, forward_part=1 / 3))
    assert max(bound.least(12.0, 3.0), blocks) == pytest.approx(run_equal(name, shape).makespan_s)
