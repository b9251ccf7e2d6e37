"""Blocks cut into fractions: the least time in which the stages can hold them.

Every stage may hold blocks until its memory is full, and then more by changing some to a slower,
smaller recomputation. The cost of a stage is convex in what it holds, so the cheapest pieces of all
stages, taken in order, are the optimum.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from planner.leasttimes import Option

__all__ = ["least_of_stage", "least_time", "most_held", "undominated_rooms"]

INFINITE = float("inf")
ROUNDING = 1e-6  # of a layer, so that a bound is not one layer too sharp


def least_time(
    count: int,
    rooms: list[tuple[float, float]],
    resident: float,
    options: list[Option],
    most: float,
) -> float | None:
    """Least total time of ``count`` fractional layers over stages with ``rooms`` (micro-batches in
    flight, bytes), at most ``most`` layers on each; None if they do not fit.
    """
    fastest, leanest = options[0], options[-1]  # by rising time and falling memory
    if min(room for _, room in rooms) < 0:
        return None
    held = 0.0
    for flight, room in rooms:
        held += min(most, room / (resident + fastest.saved_bytes * flight))
        if held >= count:
            return count * fastest.time_ns
    held = 0.0
    for flight, room in rooms:
        held += min(most, room / (resident + leanest.saved_bytes * flight))
    if held + ROUNDING < count:
        return None
    segments: list[tuple[float, float]] = []
    slopes = {flight: _slopes(flight, resident, options) for flight in {own for own, _ in rooms}}
    for flight, room in rooms:
        held = 0.0
        for slope, size in slopes[flight]:
            reach = min(most, room / size)
            segments.append((slope, reach - held))
            held = reach
            if held >= most:
                break
    return _filled(count, sorted(segments))


def _filled(count: int, segments: list[tuple[float, float]]) -> float:
    """Time of ``count`` layers that take the (time of a layer, layers) of ``segments`` in turn,
    which have room for them but for rounding.
    """
    left, total = float(count), 0.0
    for marginal, width in segments:
        taken = min(left, width)
        total += taken * marginal
        left -= taken
        if left <= 0:
            break
    return total


def least_of_stage(
    count: int, rooms: list[tuple[float, float]], resident: float, options: list[Option]
) -> float:
    """Least time of ``count`` fractional layers on any one of the stages; infinite if on none."""
    best = INFINITE
    for each in rooms:
        time = least_time(count, [each], resident, options, count)
        best = best if time is None else min(best, time)
    return best


def most_held(
    rooms: list[tuple[float, float]],
    resident: float,
    options: list[Option],
    limit_ns: float,
    enough: int,
) -> int:
    """Whole layers that the stages can hold together if none may take more than ``limit_ns``;
    stops counting at ``enough``.
    """
    known: dict[tuple[float, float], int] = {}
    slopes = {flight: _slopes(flight, resident, options) for flight, _ in rooms}
    held = 0
    for flight, room in rooms:
        if (flight, room) not in known:
            known[flight, room] = int(_held_within(limit_ns, room, slopes[flight]) + ROUNDING)
        held += known[flight, room]
        if held >= enough:
            break
    return held


def _held_within(limit_ns: float, room: float, slopes: list[tuple[float, float]]) -> float:
    """Fractional layers of one stage with ``room`` bytes whose least time is ``limit_ns``."""
    left, held = max(0.0, limit_ns), 0.0
    for marginal, size in slopes:
        reach = max(0.0, room / size)
        if left < (reach - held) * marginal:
            return held + left / marginal
        left -= (reach - held) * marginal
        held = reach
    return held


def undominated_rooms(rooms: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Those of which no other has as few micro-batches in flight and as much room."""
    found: list[tuple[float, float]] = []
    for flight, room in sorted(set(rooms), key=lambda each: (each[0], -each[1])):
        if not found or room > found[-1][1]:
            found.append((flight, room))
    return found


def _slopes(flight: float, resident: float, options: list[Option]) -> list[tuple[float, float]]:
    """The convex cost of a stage's layers: (time of one more layer, bytes of a layer from then
    on), as they change from each option on the hull to the next.
    """
    sizes = [resident + option.saved_bytes * flight for option in options]
    times = [option.time_ns for option in options]
    now, found = 0, [(times[0], sizes[0])]
    while now < len(options) - 1:
        slope, chosen, time, size = INFINITE, now, times[now], sizes[now]
        for k in range(now + 1, len(options)):
            own = (times[k] * size - time * sizes[k]) / (size - sizes[k])
            if own < slope:
                slope, chosen = own, k
        found.append((slope, sizes[chosen]))
        now = chosen
    return found
