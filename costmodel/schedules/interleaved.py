"""Several chunks a device, dealt out in turn: interleaved 1F1B, whole and split."""

from __future__ import annotations

from costmodel.schedules.core import (
    BACKWARD,
    FORWARD,
    INPUT,
    WEIGHT,
    Action,
    Order,
    Schedule,
    Shape,
)

__all__ = ["INTERLEAVED", "INTERLEAVED_ZB"]


def _pass(shape: Shape, kind: int, index: int) -> Action:
    """The pass number ``index``: groups of p micro-batches go through chunk 0, 1, ...; backwards
    through them in reverse.
    """
    group, within = divmod(index, shape.stages * shape.chunks)
    chunk, position = divmod(within, shape.stages)
    if kind != FORWARD:
        chunk = shape.chunks - 1 - chunk
    return kind, chunk, group * shape.stages + position


def _interleaved(shape: Shape) -> list[Order]:
    """Warm-up is 2 (p - s - 1) + (v - 1) p passes (Narayanan et al. 2021, section 2.2)."""
    total = shape.microbatches * shape.chunks
    forwards = [_pass(shape, FORWARD, i) for i in range(total)]
    backwards = [_pass(shape, BACKWARD, i) for i in range(total)]
    orders = []
    for stage in range(shape.stages):
        warmup = _warmup(shape, stage)
        order = forwards[:warmup]
        for forward, backward in zip(forwards[warmup:], backwards, strict=False):
            order += (forward, backward)
        orders.append(order + backwards[total - warmup :])
    return orders


def _warmup(shape: Shape, stage: int) -> int:
    passes = 2 * (shape.stages - stage - 1) + (shape.chunks - 1) * shape.stages
    return min(passes, shape.microbatches * shape.chunks)


def _interleaved_held(shape: Shape) -> tuple[float, ...]:
    total = shape.microbatches * shape.chunks
    return tuple(
        min(_warmup(shape, stage) + 1, total) / shape.chunks for stage in range(shape.stages)
    )


def _split(shape: Shape) -> list[Order]:
    """Warm-up is p - s - 1 + (v - 1) p passes; weight gradients follow s input gradients later
    (ZB1P of Qi et al. 2023, as torch.distributed.pipelining has it).
    """
    total = shape.microbatches * shape.chunks
    inputs = [_pass(shape, INPUT, i) for i in range(total)]
    weights = [_pass(shape, WEIGHT, i) for i in range(total)]
    orders = []
    for stage in range(shape.stages):
        warmup = min(shape.stages - stage - 1 + (shape.chunks - 1) * shape.stages, total)
        order = [_pass(shape, FORWARD, i) for i in range(warmup)]
        for i in range(total):
            if warmup + i < total:
                order.append(_pass(shape, FORWARD, warmup + i))
            order.append(inputs[i])
            if i >= stage:
                order.append(weights[i - stage])
        orders.append(order + weights[max(0, total - stage) :])
    return orders


def _whole_rounds(name: str, shape: Shape) -> str | None:
    if shape.microbatches % shape.stages == 0:
        return None
    nearest = max(shape.stages, round(shape.microbatches / shape.stages) * shape.stages)
    return (
        f"{name} needs micro-batches ({shape.microbatches}) divisible by stages "
        f"({shape.stages}); nearest: {nearest}"
    )


INTERLEAVED = Schedule(
    name="interleaved-1f1b",
    summary="1F1B over several chunks a device: a smaller bubble for more hand-overs",
    orders=_interleaved,
    held=_interleaved_held,
    rule=lambda shape: _whole_rounds("interleaved-1f1b", shape),
    chunks=None,
)
INTERLEAVED_ZB = Schedule(
    name="interleaved-zb",
    summary="interleaved 1F1B with split backward: weight gradients fill the bubble",
    orders=_split,
    late_weights=lambda _shape, stage: stage + 1,
    rule=lambda shape: _whole_rounds("interleaved-zb", shape),
    chunks=None,
    splits=True,
    fill_speed=3,
)
