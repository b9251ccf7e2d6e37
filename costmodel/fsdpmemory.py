"""Memory as PyTorch's pipelines and FSDP2 keep it (``TrainingSpec.fsdp2``).

A stage of ``torch.distributed.pipelining`` has a buffer of its own for what it receives in each
micro-batch of a step, and holds each output that it sends until the backward pass of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from costmodel.layers import boundary_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from costmodel.context import CostContext, LayerStep
    from costmodel.layout import Layout

__all__ = ["fsdp_working", "held_beside", "receive_buffers"]


def fsdp_working(chunks: Sequence[Sequence[tuple[LayerStep, int]]]) -> int:
    """Bytes that layers of a stage need on top while they run backward, less what later layers of
    their chunk have given up by then.
    """
    most = 0
    for chunk in chunks:
        gone = 0
        for step, count in reversed(chunk):
            most = max(most, step.transient_bytes - gone)
            gone += step.saved_bytes * count
    return most


def receive_buffers(context: CostContext, layout: Layout, stage: int) -> int:
    """Bytes of all that a stage receives in a step, activations and gradients."""
    sizes = _crossed(context, layout)
    total = 0
    for number, chunk in enumerate(layout.chunks):
        if chunk.stage == stage:
            total += sizes.get(number, 0) + sizes.get(number + 1, 0)
    return total * layout.num_microbatches


def held_beside(context: CostContext, layout: Layout, stage: int) -> list[int]:
    """For each chunk of a stage, bytes of one micro-batch that are held beside what layers keep:
    its output, less its input, which lies in a buffer of the stage.
    """
    sizes, found = _crossed(context, layout), []
    for number, chunk in enumerate(layout.chunks):
        if chunk.stage == stage:
            is_last = number + 1 == len(layout.chunks)
            output = 0 if is_last else _boundary(context, layout, number + 1)
            found.append((chunk.chunk, output - sizes.get(number, 0)))
    return [size for _, size in sorted(found)]


def _crossed(context: CostContext, layout: Layout) -> dict[int, int]:
    """Bytes of one micro-batch at the entry of each chunk that begins on another stage."""
    pairs = zip(layout.chunks, layout.chunks[1:], strict=False)
    return {
        number: _boundary(context, layout, number)
        for number, (before, after) in enumerate(pairs, start=1)
        if before.stage != after.stage
    }


def _boundary(context: CostContext, layout: Layout, number: int) -> int:
    """Bytes of one micro-batch at the entry of a chunk."""
    before = layout.chunks[number - 1]
    strategy = before.spans[-1].strategy
    last = context.model.runs_between(before.stop - 1, before.stop)[0].layer
    return boundary_bytes(last, strategy, context.training, layout.micro_batch_of(strategy))
