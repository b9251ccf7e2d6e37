"""Schedules of one chunk a device in which whole or split backward passes return as they can."""

from __future__ import annotations

from costmodel.schedules.core import BACKWARD, FORWARD, INPUT, WEIGHT, Order, Schedule, Shape

__all__ = ["ASYNC", "GPIPE", "ONE_F_ONE_B", "TWO_BP", "TWO_BP_1F1B"]


def gpipe(shape: Shape) -> list[Order]:
    """All forwards, then all backwards (Huang et al. 2019)."""
    batches = range(shape.microbatches)
    order = [(kind, 0, m) for kind in (FORWARD, BACKWARD) for m in batches]
    return [order] * shape.stages


def one_f_one_b(shape: Shape) -> list[Order]:
    """P - s - 1 forwards, then one forward and one backward in turn (Narayanan et al. 2021)."""
    orders = []
    for stage in range(shape.stages):
        warmup = min(shape.stages - stage - 1, shape.microbatches)
        order: Order = [(FORWARD, 0, m) for m in range(warmup)]
        for m in range(shape.microbatches - warmup):
            order += [(FORWARD, 0, warmup + m), (BACKWARD, 0, m)]
        last = range(shape.microbatches - warmup, shape.microbatches)
        orders.append(order + [(BACKWARD, 0, m) for m in last])
    return orders


def _weights_last(orders: list[Order]) -> list[Order]:
    """Input gradients in place of backward passes, all weight gradients behind them (2BP, Rae et
    al. 2024).
    """
    split = []
    for order in orders:
        passes = [(INPUT if kind == BACKWARD else kind, c, m) for kind, c, m in order]
        split.append(passes + [(WEIGHT, c, m) for kind, c, m in order if kind == BACKWARD])
    return split


def _all_held(shape: Shape) -> tuple[float, ...]:
    return (float(shape.microbatches),) * shape.stages


def _followers_held(shape: Shape) -> tuple[float, ...]:
    return tuple(
        float(min(shape.stages - stage, shape.microbatches)) for stage in range(shape.stages)
    )


GPIPE = Schedule(
    name="gpipe",
    summary="all forwards, then all backwards",
    orders=gpipe,
    held=_all_held,
    steady=False,
)
ONE_F_ONE_B = Schedule(
    name="1f1b",
    summary="one forward, one backward; as many micro-batches in flight as stages follow",
    orders=one_f_one_b,
    held=_followers_held,
)
ASYNC = Schedule(
    name="async-1f1b",
    summary="1F1B without a flush: weights change after every micro-batch",
    orders=one_f_one_b,
    held=_followers_held,
    drains=False,
)
TWO_BP = Schedule(
    name="2bp",
    summary="GPipe with split backward: all weight gradients at the end",
    orders=lambda shape: _weights_last(gpipe(shape)),
    held=_all_held,
    splits=True,
    steady=False,
)
TWO_BP_1F1B = Schedule(
    name="2bp-1f1b",
    summary="1F1B with split backward: all weight gradients at the end",
    orders=lambda shape: _weights_last(one_f_one_b(shape)),
    held=_all_held,
    splits=True,
    steady=False,
)
