"""Two directions at once over two copies of the weights: Chimera and BitPipe.

Half of the micro-batches enters at device 0, the other half at device p - 1, so that the warm-up of
one direction falls into the drain of the other.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from costmodel.schedules.core import FORWARD, Order, Schedule, Shape, both_ways, looped, vee
from costmodel.schedules.greedy import CACHED, list_schedule

if TYPE_CHECKING:
    from collections.abc import Callable

    from costmodel.schedules.core import Action, Path
    from costmodel.schedules.greedy import Counts

__all__ = ["BITPIPE", "CHIMERA"]


def _merged(
    paths: Callable[[Shape], tuple[Path, ...]],
) -> Callable[[Shape], list[Order]]:
    """Backwards first, then the oldest micro-batch, furthest along; at most p / 2 micro-batches
    of a chunk in flight. That is one direction's 1F1B merged with the other's, for units of p
    micro-batches one after another (Li and Hoefler 2021; Wu et al. 2024).
    """

    @lru_cache(maxsize=CACHED)
    def orders(shape: Shape) -> list[Order]:
        half = shape.stages // 2
        directions = (
            [m for m in range(shape.microbatches) if m % shape.stages < half],
            [m for m in range(shape.microbatches) if m % shape.stages >= half],
        )

        def key(kind: int, position: int, batch: int) -> tuple[int, ...]:
            unit, within = divmod(batch, shape.stages)
            return int(kind == FORWARD), unit, within % half, -position

        def admits(_device: int, action: Action, counts: Counts) -> bool:
            return action[0] != FORWARD or counts.in_flight.get(action[1], 0) < half

        return list_schedule(paths(shape), directions, splits=False, key=key, admits=admits)

    return orders


def _even(name: str, shape: Shape) -> str | None:
    p, m = shape.stages, shape.microbatches
    if p % 2:
        return f"{name} needs an even number of stages, not {p}; nearest: {p + 1}"
    if m % p:
        nearest = max(p, round(m / p) * p)
        return f"{name} needs micro-batches ({m}) divisible by stages ({p}); nearest: {nearest}"
    return None


CHIMERA_PATHS = both_ways(looped)
BITPIPE_PATHS = both_ways(vee)

CHIMERA = Schedule(
    name="chimera",
    summary="two directions over two copies of the weights",
    orders=_merged(CHIMERA_PATHS),
    least_held=lambda shape: shape.stages / 2 + 1,
    paths=CHIMERA_PATHS,
    rule=lambda shape: _even("chimera", shape),
    fill_speed=2,
    steady=False,
    copies=2,
)
BITPIPE = Schedule(
    name="bitpipe",
    summary="two directions, each through V-shaped pairs of chunks, over two copies of the weights",
    orders=_merged(BITPIPE_PATHS),
    least_held=lambda shape: (3 * shape.stages + 2) / 4,
    paths=BITPIPE_PATHS,
    rule=lambda shape: _even("bitpipe", shape),
    chunks=(2,),
    fill_speed=2,
    steady=False,
    copies=2,
)
