"""Zero-bubble schedules of one chunk a device (Qi et al. 2023)."""

from __future__ import annotations

from costmodel.schedules.core import FORWARD, INPUT, WEIGHT, Order, Schedule, Shape

__all__ = ["ZB_H1", "ZB_H2"]


def _zb_h1(shape: Shape) -> list[Order]:
    """1F1B's forwards and input gradients; weight gradients follow s micro-batches later, so that
    the first stages' fall into the drain.
    """
    orders = []
    for stage in range(shape.stages):
        warmup = min(shape.stages - stage - 1, shape.microbatches)
        order: Order = [(FORWARD, 0, m) for m in range(warmup)]
        for m in range(shape.microbatches):
            if warmup + m < shape.microbatches:
                order.append((FORWARD, 0, warmup + m))
            order.append((INPUT, 0, m))
            if m >= stage:
                order.append((WEIGHT, 0, m - stage))
        left = range(max(0, shape.microbatches - stage), shape.microbatches)
        orders.append(order + [(WEIGHT, 0, m) for m in left])
    return orders


def _zb_h2(shape: Shape) -> list[Order]:
    """2 (p - s) - 1 forwards fill the warm-up, 2 s late weight gradients the drain."""
    orders = []
    for stage in range(shape.stages):
        warmup = min(2 * (shape.stages - stage) - 1, shape.microbatches)
        late = 2 * stage
        order: Order = [(FORWARD, 0, m) for m in range(warmup)]
        for m in range(shape.microbatches):
            order.append((INPUT, 0, m))
            if m >= late:
                order.append((WEIGHT, 0, m - late))
            if warmup + m < shape.microbatches:
                order.append((FORWARD, 0, warmup + m))
        left = range(max(0, shape.microbatches - late), shape.microbatches)
        orders.append(order + [(WEIGHT, 0, m) for m in left])
    return orders


def _whole_pipeline(shape: Shape) -> tuple[float, ...]:
    """(p - s) from forward to input gradient and s from there to the weight gradient."""
    return (float(min(shape.stages, shape.microbatches)),) * shape.stages


def _twice(shape: Shape) -> tuple[float, ...]:
    return (float(min(2 * shape.stages - 1, shape.microbatches)),) * shape.stages


ZB_H1 = Schedule(
    name="zb-h1",
    summary="1F1B whose weight gradients fill two thirds of the bubble",
    orders=_zb_h1,
    held=_whole_pipeline,
    late_weights=lambda _shape, stage: stage + 1,
    splits=True,
    fill_speed=3,
)
ZB_H2 = Schedule(
    name="zb-h2",
    summary="no bubble where F = B = W, for twice the activations of 1F1B",
    orders=_zb_h2,
    held=_twice,
    late_weights=lambda _shape, stage: 2 * stage + 1,
    splits=True,
    fill_speed=12,
)
