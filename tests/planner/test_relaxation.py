"""Blocks cut into fractions: the two directions of one question agree."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from planner.leasttimes import Option
from planner.relaxation import least_time, most_held

GROWS, SHRINKS = st.floats(1.01, 3.0), st.floats(0.2, 0.99)


@st.composite
def option_lists(draw) -> list[Option]:
    """By rising time and falling memory."""
    time, saved = draw(st.floats(1.0, 1e6)), draw(st.integers(100, 10**9))
    found = []
    for _ in range(draw(st.integers(1, 4))):
        found.append(Option(time, time / 3, saved, 0, time / 3, 2 * time / 3))
        time, saved = time * draw(GROWS), int(saved * draw(SHRINKS))
    return found


@given(
    options=option_lists(),
    rooms=st.lists(st.tuples(st.integers(1, 8), st.integers(-10, 10**11)), min_size=1, max_size=6),
    resident=st.integers(1, 10**9),
    part=st.floats(0.1, 100.0),
)
def test_as_many_blocks_are_held_as_have_their_least_time_within_the_limit(
    options, rooms, resident, part
):
    limit = part * options[0].time_ns
    held = most_held(rooms, resident, options, limit, 10**9)

    def within(count: int, room: tuple[int, int], slack: float) -> bool:
        time = least_time(count, [room], resident, options, count) if count else 0.0
        return time is not None and time <= limit * slack

    counts = range(int(part) + 2)
    fewest = sum(max(n for n in counts if within(n, room, 1.0)) for room in rooms)
    most = sum(max(n for n in counts if within(n, room, 1 + 1e-4)) for room in rooms)
    assert fewest <= held <= most


def test_counting_ends_once_there_are_enough():
    option = Option(1.0, 0.3, 10, 0, 0.3, 0.7)
    rooms = [(1, 100), (2, 300)]
    assert most_held(rooms, 10, [option], 100.0, 10**9) == 5 + 10
    assert most_held(rooms, 10, [option], 100.0, 3) == 5
