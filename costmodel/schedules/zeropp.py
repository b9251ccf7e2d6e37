"""ZeroPP: pipeline without tensor parallelism, parameters sharded inside the node (ZeRO-3).

Micro-batches go in units of U through the chunks one chunk after another, so that parameters are
gathered once a pass for U micro-batches and not for each (Tang et al. 2024).
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from costmodel.schedules.core import (
    FORWARD,
    GATHER,
    INPUT,
    REDUCE,
    WEIGHT,
    Order,
    Schedule,
    Shape,
    looped,
)
from costmodel.schedules.greedy import CACHED, list_schedule

if TYPE_CHECKING:
    from costmodel.schedules.core import Action
    from costmodel.schedules.greedy import Counts

__all__ = ["ZEROPP", "moves_less_than_tp"]


def moves_less_than_tp(*, unit: int, seq_len: int, micro_batch: int, hidden: int) -> bool:
    """Whether gathering a block's parameters once a pass per unit moves fewer bytes than tensor
    parallelism's all-reduces of its activations: 2 s U b > 9 h.
    """
    return 2 * seq_len * unit * micro_batch > 9 * hidden


@lru_cache(maxsize=CACHED)
def _orders(shape: Shape) -> list[Order]:
    """Input gradients first, then forwards, weight gradients where nothing else is ready; of a
    chunk at most U micro-batches in flight. That is 1F1B on the last chunk of a unit.
    """
    unit = shape.unit_size

    def key(kind: int, position: int, batch: int) -> tuple[int, ...]:
        along = position if kind == FORWARD else -position
        rank = (INPUT, FORWARD, WEIGHT).index(kind)
        return rank, batch // unit, along, batch

    def admits(_device: int, action: Action, counts: Counts) -> bool:
        return action[0] != FORWARD or counts.in_flight.get(action[1], 0) < unit

    batches = [range(shape.microbatches)]
    passes = list_schedule(looped(shape), batches, splits=True, key=key, admits=admits)
    return [_with_gathers(order, shape.chunks - 1, unit) for order in passes]


def _with_gathers(order: Order, last_chunk: int, unit: int) -> Order:
    """Parameters of a chunk are asked for before a unit's first pass over it, forward and back
    (the last chunk turns around: once), one pass ahead; gradients go out after a unit's last
    weight gradient.
    """
    gathered: set[Action] = set()
    last_pass = 0
    left: dict[tuple[int, int], int] = {}
    for kind, chunk, batch in order:
        if kind == WEIGHT:
            left[chunk, batch // unit] = left.get((chunk, batch // unit), 0) + 1
    found: Order = []
    for kind, chunk, batch in order:
        number = batch // unit
        phase = (FORWARD if chunk == last_chunk else kind, chunk, number)
        if kind != WEIGHT and phase not in gathered:
            gathered.add(phase)
            found.insert(last_pass, (GATHER, chunk, number))
        last_pass = len(found)
        found.append((kind, chunk, batch))
        if kind == WEIGHT:
            left[chunk, number] -= 1
            if not left[chunk, number]:
                found.append((REDUCE, chunk, number))
    return found


def _unit_in_range(shape: Shape) -> str | None:
    p, unit = shape.stages, shape.unit_size
    if p <= unit <= 2 * p - 1:
        if shape.microbatches >= unit:
            return None
        return (
            f"zeropp needs at least one unit of {unit} micro-batches, not {shape.microbatches}; "
            f"nearest: {unit}"
        )
    nearest = min(max(unit, p), 2 * p - 1)
    return (
        f"zeropp needs a unit of {p} to {2 * p - 1} micro-batches, not {unit}; nearest: {nearest}"
    )


ZEROPP = Schedule(
    name="zeropp",
    summary="units of micro-batches cross the chunks in turn; parameters are gathered once a unit",
    orders=_orders,
    least_held=lambda shape: float(shape.unit_size),
    rule=_unit_in_range,
    chunks=None,
    splits=True,
    fill_speed=3,
    gathers_by_unit=True,
    steady=False,
)
