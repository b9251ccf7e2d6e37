"""Blocks cut into fractions: what stages hold in which time."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from planner.leasttimes import Option
from planner.relaxation import least_time, most_held

GB = 10**9
UNLIMITED = 10**6


@st.composite
def options(draw: st.DrawFn) -> list[Option]:
    """Undominated recomputations, fastest first."""
    count = draw(st.integers(1, 5))
    times = draw(st.lists(st.floats(1e6, 2e6), min_size=count, max_size=count, unique=True))
    saved = draw(st.lists(st.integers(10**7, GB), min_size=count, max_size=count, unique=True))
    pairs = zip(sorted(times), sorted(saved, reverse=True), strict=True)
    return [Option(time, time / 3, size, 0, 0.0, 0.0) for time, size in pairs]


@given(options(), st.integers(1, 9), st.floats(1e9, 6e10), st.floats(1e8, 2e9))
def test_a_stage_holds_as_many_as_its_leanest_recomputation_leaves_room_for(
    own: list[Option], flight: int, room: float, resident: float
) -> None:
    """Also where the pieces that fill it add up to a little less than it, by rounding."""
    most = int(room / (resident + own[-1].saved_bytes * flight))
    held = most_held([(float(flight), room)], resident, own, 1e18, UNLIMITED)
    assert held == most
    if most:
        assert least_time(most, [(float(flight), room)], resident, own, most) is not None
    assert least_time(most + 1, [(float(flight), room)], resident, own, most + 1) is None


@given(options(), st.integers(1, 9), st.floats(1e9, 6e10), st.floats(1e8, 2e9), st.floats(1e6, 1e8))
def test_the_most_that_a_stage_holds_is_the_last_that_takes_no_longer_than_the_limit(
    own: list[Option], flight: int, room: float, resident: float, limit_ns: float
) -> None:
    rooms = [(float(flight), room)]
    held = most_held(rooms, resident, own, limit_ns, UNLIMITED)
    times = [least_time(count, rooms, resident, own, count) for count in (held, held + 1)]
    assert held == 0 or (times[0] or 0.0) <= limit_ns
    assert times[1] is None or times[1] > limit_ns
