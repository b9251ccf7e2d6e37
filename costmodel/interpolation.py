"""Between measured points: a value at a place of several axes, and what it rests on.

Axes are taken one after another. Between two neighbours the value is a weighted mean, the weight
given by a reference (the formula's time) that knows how costs curve; beyond the last one it is
scaled by the reference. A point never takes longer than one with more work: noise only adds time,
so the least of those with at least its work stands for it. With a reference that grows along an
axis, and a full grid, what comes out grows along it too.
"""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = ["Basis", "Place", "freed_of_noise", "value_at"]

Place = tuple[int, ...]


class Basis(IntEnum):
    """What a time rests on, the surest first."""

    MEASURED = 0
    INTERPOLATED = 1
    DOUBTFUL = 2
    EXTRAPOLATED = 3
    FORMULA = 4


def freed_of_noise(values: Mapping[Place, float], signs: Place) -> dict[Place, float]:
    """Each value, or the least of a place with at least its work. ``signs``: 1 for an axis along
    which work grows, -1 where it shrinks.
    """

    def has_more(there: Place, here: Place) -> bool:
        return all(sign * (a - b) >= 0 for sign, a, b in zip(signs, there, here, strict=True))

    return {
        here: min(value for there, value in values.items() if has_more(there, here))
        for here in values
    }


def value_at(
    values: Mapping[Place, float], target: Place, reference: Callable[[Place], float]
) -> tuple[float, Basis]:
    """The value at ``target``: measured, interpolated or extrapolated. ``values`` is not empty;
    ``reference`` is positive.
    """
    return _along(values, (), target, reference)


def _along(
    values: Mapping[Place, float],
    before: Place,
    rest: Place,
    reference: Callable[[Place], float],
) -> tuple[float, Basis]:
    """The value where the first axes are ``before`` and the others ``rest``."""
    if not rest:
        return values[before], Basis.MEASURED
    axis, (wanted, *inner) = len(before), rest
    known = sorted({place[axis] for place in values if place[:axis] == before})

    def at(own: int) -> tuple[float, Basis]:
        return _along(values, (*before, own), tuple(inner), reference)

    if wanted in known:
        return at(wanted)
    if not known[0] < wanted < known[-1]:
        edge = known[0] if wanted < known[0] else known[-1]
        grown = reference((*before, wanted, *inner)) / reference((*before, edge, *inner))
        return at(edge)[0] * grown, Basis.EXTRAPOLATED
    low = max(own for own in known if own < wanted)
    high = min(own for own in known if own > wanted)
    # of constant inner axes, so that the mean is monotone along them
    last = max(place[axis + 1 :] for place in values if place[: axis + 1] == (*before, high))
    least, own, most = (reference((*before, at, *last)) for at in (low, wanted, high))
    weight = 0.5 if least == most else min(1.0, max(0.0, (own - least) / (most - least)))
    (below, first), (above, second) = at(low), at(high)
    value = (1 - weight) * below + weight * above
    return value, max(Basis.INTERPOLATED, first, second)
