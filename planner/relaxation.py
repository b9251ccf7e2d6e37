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
    if held < count:
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
    most = int(limit_ns / options[0].time_ns)
    known: dict[tuple[float, float], int] = {}
    slopes: dict[float, list[tuple[float, float]]] = {}
    held = 0
    for each in rooms:
        if each not in known:
            flight, room = each
            if flight not in slopes:
                slopes[flight] = _slopes(flight, resident, options)
            known[each] = _most_alone(room, slopes[flight], limit_ns, most) if room >= 0 else 0
        held += known[each]
        if held >= enough:
            break
    return held


def _most_alone(room: float, slopes: list[tuple[float, float]], limit_ns: float, most: int) -> int:
    """Whole layers, ``most`` at most, that one stage holds within ``limit_ns``."""
    segments, reached, left_ns = [], 0.0, limit_ns
    for slope, size in slopes:
        width = room / size - reached
        segments.append((slope, width))
        if width * slope > left_ns:
            reached += left_ns / slope
            break
        reached += width
        left_ns -= width * slope
    # one more than was found, which rounding may have hidden
    count = min(most, int(reached) + 1, int(room / slopes[-1][1]))
    while count and _filled(count, segments) > limit_ns:
        count -= 1
    return count


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
