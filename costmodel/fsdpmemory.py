"""Memory as PyTorch's pipelines and FSDP2 keep it (``TrainingSpec.fsdp2``).

A stage of ``torch.distributed.pipelining`` has a buffer of its own for what it receives in each
micro-batch of a step, and holds each output that it sends until the backward pass of it.

Gradients come into being in the first backward pass of a step, layer by layer, while it gives up
activations, and weights where that pass is the only one; so the peak is that of the worst moment:

    held micro-batches x what each keeps - what later layers have given up
    + gradients of later layers (all of them, once the first backward pass is over)
    + what the layer at work needs on top
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final, NamedTuple

from costmodel.layers import boundary_bytes, rank_parameters
from costmodel.schedules import BACKWARD, FORWARD, INPUT, WEIGHT
from costmodel.sharding import is_gathered_twice
from costmodel.simulate import SHORT_RUN
from profiles.layers import Block, Embedding, Head

if TYPE_CHECKING:
    from collections.abc import Sequence

    from costmodel.context import CostContext
    from costmodel.layers import LayerCost
    from costmodel.layerstep import LayerStep
    from costmodel.layout import Layout, Strategy
    from costmodel.schedules import Order, Schedule, Shape
    from costmodel.sharding import StateCost
    from profiles.layers import Layer

__all__ = [
    "Peak",
    "backward_peaks",
    "held_beside",
    "is_one_pass",
    "receive_buffers",
    "working_bytes",
]

FP32: Final = 4  # bytes


class Peak(NamedTuple):
    """Bytes on a device at its worst moment, by kind; ``working`` is what the layer at work needs
    on top, gradients that it makes first included; ``released`` weights are gone already.
    """

    activations: float
    gradients: int
    working: int
    released: int = 0

    @property
    def total(self) -> float:
        """All of them."""
        return self.activations + self.gradients + self.working - self.released


class _Backward(NamedTuple):
    """The worst moments of a chunk's backward passes, ``activations`` less those of all
    micro-batches in flight: of the first pass of a step, and of the others.
    """

    first: Peak
    later: Peak
    gradients: int


def working_bytes(
    context: CostContext,
    layer: Layer,
    strategy: Strategy,
    micro_batch: int,
    cost: LayerCost,
    states: StateCost,
) -> tuple[int, int]:
    """What a layer needs on top while it runs backward: in passes that add to gradients, and in the
    first, which makes them.

    Each end of the model is a unit of its own. While the head runs backward, the weights of a block
    are gathered too; while it runs forward, the buffer from which its weights were gathered and the
    logits behind the softmax are there. New gradients come when what a layer kept is gone; where
    nothing shards them, FSDP2 copies them once before it sums them.
    """
    once = is_one_pass(context, strategy, micro_batch)
    wraps = strategy.dp * strategy.cp > 1 or context.training.param_bytes < FP32
    made = states.gradient_bytes * (2 if once and wraps and strategy.zero == 0 else 1)
    if isinstance(layer, Block):
        whole = context.gathered_bytes(strategy, micro_batch)
        most = cost.transient_bytes + states.working_bytes + whole
        return most, max(most, most - cost.transient_bytes - cost.saved_bytes + made)
    if isinstance(layer, Embedding):
        gathered = states.gathered_bytes if is_gathered_twice(layer) else 0
        most = gathered + states.gradient_working_bytes
        return most, most + made
    assert isinstance(layer, Head)
    ahead = forward = 0
    if states.gathered_bytes and context.training.prefetches:
        sizes = [sum(rank_parameters(each, strategy)) for each in context.classes[1:-1]]
        ahead = max(sizes, default=0) * context.training.param_bytes
    if states.gathered_bytes or (once and strategy.zero):
        tokens = micro_batch * -(-context.training.seq_len // strategy.cp)
        logits = FP32 * tokens * -(-layer.vocab // strategy.tp)
        forward = logits + (states.gathered_bytes or states.unsharded_bytes(context.training))
    after = states.gradient_working_bytes - cost.saved_bytes
    later, first = (
        states.gathered_bytes + max(forward, ahead + max(cost.transient_bytes, after + new))
        for new in (0, made)
    )
    return later, first


def is_one_pass(context: CostContext, strategy: Strategy, micro_batch: int) -> bool:
    """Whether a step is one micro-batch. No gradients are added up then, so that ZeRO-1 is ZeRO-2,
    and a layer gives up its gathered weights in the pass in which its gradients come.
    """
    return context.training.global_batch == strategy.dp * micro_batch


def backward_peaks(
    schedule: Schedule,
    shape: Shape,
    held: Sequence[Sequence[float]],
    stages: Sequence[Sequence[Sequence[tuple[LayerStep, int]]]],
) -> list[Peak]:
    """The worst moment of each device. ``held[device][chunk]``: bytes that one micro-batch keeps;
    ``stages[device][chunk]``: layers and how often each stands there, in the order of the model.
    """
    passes = [[_backward(chunk) for chunk in chunks] for chunks in stages]
    known = schedule.held(shape)
    if known is not None and shape.chunks == 1 and not schedule.splits:
        return [
            _of_one_chunk(flight, shape.microbatches, sizes[0], own[0])
            for flight, sizes, own in zip(known, held, passes, strict=True)
        ]
    if schedule.steady:
        shape = replace(shape, microbatches=min(shape.microbatches, SHORT_RUN * shape.stages))
    orders = schedule.orders(shape)
    return [_of_order(*each) for each in zip(orders, held, passes, strict=True)]


def _of_one_chunk(flight: float, microbatches: int, size: float, own: _Backward) -> Peak:
    """Of ``flight`` micro-batches; where there are no more, one less is there with gradients."""
    first = own.first._replace(activations=own.first.activations + flight * size)
    rest = flight if microbatches > flight else flight - 1
    if rest <= 0:
        return first
    later = own.later._replace(activations=own.later.activations + rest * size)
    return max(first, later, key=lambda each: each.total)


def _of_order(order: Order, sizes: Sequence[float], passes: Sequence[_Backward]) -> Peak:
    """Of passes in their order. Split ones make gradients in passes of their own: there all count
    from the start.
    """
    now, worst = 0.0, Peak(0.0, 0, 0)
    made: set[int] = set()
    for kind, chunk, _ in order:
        if kind == FORWARD:
            now += sizes[chunk]
        elif kind in (BACKWARD, INPUT):
            if kind == INPUT:
                made = {*range(len(passes))}
            own = passes[chunk].later if chunk in made else passes[chunk].first
            others = sum(passes[each].gradients for each in made if each != chunk)
            moment = own._replace(
                activations=now + own.activations, gradients=others + own.gradients
            )
            worst = max(worst, moment, key=lambda each: each.total)
            made.add(chunk)
        if kind in (BACKWARD, WEIGHT):
            now -= sizes[chunk]
    return worst


def _backward(chunk: Sequence[tuple[LayerStep, int]]) -> _Backward:
    """Of equal layers, the first or the last to run backward has the worst moment."""
    whole = sum(step.states.gradient_bytes * count for step, count in chunk)
    first, later, gone, made, released = [], [], 0, 0, 0
    for step, count in reversed(chunk):
        later.append(Peak(-gone, whole, step.transient_bytes))
        for done in (0, count - 1):
            given = gone + done * step.saved_bytes
            there = made + done * step.states.gradient_bytes
            weights = released + done * step.released_bytes
            first.append(Peak(-given, there, step.first_transient_bytes, weights))
        gone += count * step.saved_bytes
        made += count * step.states.gradient_bytes
        released += count * step.released_bytes
    worst = [max(each, key=lambda moment: moment.total) for each in (first, later)]
    return _Backward(worst[0], worst[1], whole)


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
