"""Memory as PyTorch's pipelines and FSDP2 keep it (``TrainingSpec.fsdp2``).

A stage of ``torch.distributed.pipelining`` has a buffer of its own for what it receives in each
micro-batch of a step, and holds each output that it sends until the backward pass of it.

FSDP2 makes a layer's gradients in the activation type, and reduces or adds them up when the layer's
pass is over. The buffer that was reduced lives until the next layer's; weights are gathered while
the layer before them runs. What that takes is told for each layer (``layer_moments``); which moment
of a step is the worst, by ``costmodel.backwardpeaks``.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final, NamedTuple

from costmodel.backwardwalk import worst_moment
from costmodel.layers import boundary_bytes, layer_operators, rank_parameters
from costmodel.layout import NO_RECOMPUTE
from costmodel.sharding import is_gathered_twice
from costmodel.work import Gemm
from profiles.layers import Block, Embedding, Head

if TYPE_CHECKING:
    from costmodel.context import CostContext
    from costmodel.layers import LayerCost
    from costmodel.layerstep import LayerStep
    from costmodel.layout import Layout, Strategy
    from costmodel.sharding import StateCost
    from profiles.layers import Layer
    from profiles.training import TrainingSpec

__all__ = [
    "Moments",
    "held_beside",
    "in_split_passes",
    "is_one_pass",
    "layer_moments",
    "receive_buffers",
]

FP32: Final = 4  # bytes
WEIGHTS_SHARDED: Final = 3  # stage of ZeRO


class Moments(NamedTuple):
    """Bytes of a layer around its backward passes in a step.

    On top of what micro-batches keep it needs ``adding`` in a pass that adds to gradients and
    ``making`` in the first, which makes them; ``added``, ``made`` and, after the last pass,
    ``reduced`` when the pass is over and what it kept is gone. ``buffer`` is there until the
    gradients of the next layer are reduced: in every pass if ``every``, or the last. ``ahead``:
    weights that are gathered while the layer behind it runs. ``released``: weights given up in the
    last pass; ``kept``: gradients left then, of ``gradients``. ``once``: that pass is the only one.
    ``tied_weights``, ``tied_gradient``: of the matrix that a head shares, there until the embedding
    has run backward, since the sum of both their gradients is what is added. ``put_off``:
    gradients behind weights, which a backward pass in two parts keeps from one to the other.
    ``forward``: what a head needs in a step's first forward pass, ``again`` in the others.
    """

    adding: int = 0
    making: int = 0
    added: int = 0
    made: int = 0
    reduced: int = 0
    buffer: int = 0
    every: bool = False
    ahead: int = 0
    released: int = 0
    gradients: int = 0
    kept: int = 0
    once: bool = False
    tied_weights: int = 0
    tied_gradient: int = 0
    put_off: int = 0
    forward: int = 0
    forward_again: int = 0


class _Unit(NamedTuple):
    """What FSDP2 makes of a layer's weights: ``weights`` and gradients of the type of activations,
    ``wide``: gradients of the type that is reduced; whether passes are the step's only one,
    gradients are sharded in every pass, wrapped at all, made in another type than they are kept in.
    """

    weights: int
    wide: int
    once: bool
    shards: bool
    wraps: bool
    converts: bool

    @property
    def collects(self) -> bool:
        """Whether gradients of one pass stand apart from those of others until it is over."""
        return self.converts or self.shards or self.once

    def ended(self, states: StateCost, zero: int) -> tuple[int, int, int]:
        """Bytes when a layer's pass is over: of one that adds, of the first, of the last."""
        if self.shards:
            both = self.weights + self.wide
            return both, both, both
        own = self.weights if self.collects else 0
        copies = 1 if self.wraps and zero == 0 else 0  # made once before they are summed
        made = max(own, states.gradient_bytes)
        if self.once:
            made = (1 + copies) * states.gradient_bytes
        return own, made, own + (self.wide if self.wraps else 0)


def layer_moments(
    context: CostContext,
    layer: Layer,
    strategy: Strategy,
    micro_batch: int,
    cost: LayerCost,
    states: StateCost,
) -> Moments:
    """Where the bytes of a layer stand around its backward passes."""
    training = context.training
    params = cost.dense_params + cost.expert_params
    once, copies = is_one_pass(context, strategy, micro_batch), strategy.dp * strategy.cp
    unit = _Unit(
        weights=params * training.param_bytes,
        wide=params * training.grad_dtype.bytes,
        once=once,
        shards=states.gradient_working_bytes > 0,
        wraps=copies > 1 or training.param_bytes < FP32,
        converts=training.param_bytes < training.grad_dtype.bytes,
    )
    added, made, reduced = unit.ended(states, strategy.zero)
    gradients = states.left_gradient_bytes if once or unit.shards else unit.wide
    whole = sum(rank_parameters(layer, strategy, pads=False)) if isinstance(layer, Head) else params
    tied = (whole - params) * training.param_bytes
    sharded = strategy.zero == WEIGHTS_SHARDED and strategy.shard_group > 1
    tied_weights, forward = tied if sharded else 0, 0
    if isinstance(layer, Block):
        adding, making = (
            _of_block(context, layer, strategy, micro_batch, collects=collects) - cost.saved_bytes
            for collects in (unit.collects, True)
        )
        ahead = states.gathered_bytes
        adding, making, added, made = (each + ahead for each in (adding, making, added, made))
    elif isinstance(layer, Embedding):
        gathered = states.gathered_bytes if is_gathered_twice(layer) else 0
        adding = making = unit.weights + gathered
        added, made, ahead = added + gathered, made + gathered, gathered
    else:
        assert isinstance(layer, Head)
        forward = _forward_of_head(context, layer, strategy, micro_batch, unit, is_tied=tied > 0)
        adding = making = cost.transient_bytes
        gathered, ahead = states.gathered_bytes + tied_weights, 0
        forward += gathered
        adding, making, added, made = (each + gathered for each in (adding, making, added, made))
    return Moments(
        adding=adding,
        making=making,
        added=added,
        made=made,
        reduced=reduced,
        buffer=unit.wide if unit.wraps and not (once and not unit.shards) else 0,
        every=unit.shards,
        ahead=ahead if training.prefetches else 0,
        released=states.unsharded_bytes(training),
        gradients=gradients,
        kept=states.left_gradient_bytes,
        once=once,
        tied_weights=tied_weights,
        tied_gradient=tied,
        put_off=_put_off(context, layer, strategy, micro_batch),
        forward=forward,
        forward_again=forward if sharded else 0,
    )


def _of_block(
    context: CostContext, layer: Block, strategy: Strategy, micro_batch: int, *, collects: bool
) -> int:
    training = context.training
    return worst_moment(
        layer_operators(layer, _plain(strategy), training, micro_batch),
        strategy.recompute,
        stream=boundary_bytes(layer, strategy, training, micro_batch),
        element=training.param_bytes,
        collects=collects,
    )


def _put_off(context: CostContext, layer: Layer, strategy: Strategy, micro_batch: int) -> int:
    """Bytes of the gradients of what layers' products and norms hand on."""
    if not isinstance(layer, Block):
        return 0
    training = context.training
    operators = layer_operators(layer, _plain(strategy), training, micro_batch)
    products = [work for each in operators for work in each.forward if isinstance(work, Gemm)]
    norms = layer.num_norms if layer.norm.vectors else 0
    stream = boundary_bytes(layer, strategy, training, micro_batch)
    return (
        sum(work.m * work.n * work.groups for work in products) * training.param_bytes
        + norms * stream
    )


def _plain(strategy: Strategy) -> Strategy:
    """What operators depend on."""
    return replace(strategy, dp=1, zero=0, shard_group=1, recompute=NO_RECOMPUTE)


def _forward_of_head(
    context: CostContext,
    layer: Head,
    strategy: Strategy,
    micro_batch: int,
    unit: _Unit,
    *,
    is_tied: bool,
) -> int:
    """While the head runs forward, the logits are there behind the softmax, and the buffer from
    which its weights were gathered; those of a block where it has none of its own.
    """
    training = context.training
    if not strategy.zero or strategy.shard_group == 1:
        return 0
    tokens = micro_batch * -(-training.seq_len // strategy.cp)
    logits = FP32 * tokens * -(-layer.vocab // strategy.tp)
    if not is_tied:
        return logits + unit.weights
    blocks = (sum(rank_parameters(each, strategy)) for each in context.classes[1:-1])
    return logits + max(blocks, default=0) * training.param_bytes


def in_split_passes(step: LayerStep, training: TrainingSpec) -> LayerStep:
    """A layer of whose gradients the weights' pass makes the last: FSDP2, whose turn was before,
    has not yet added those to the others, so they stand beside them in the type of activations.
    """
    apart = training.param_bytes if training.param_bytes < training.grad_dtype.bytes else 0
    more = step.states.gradient_bytes // training.grad_dtype.bytes * apart
    moments = step.moments._replace(gradients=step.moments.gradients + more)
    states = step.states._replace(gradient_bytes=step.states.gradient_bytes + more)
    return replace(step, states=states, moments=moments)


def is_one_pass(context: CostContext, strategy: Strategy, micro_batch: int) -> bool:
    """Whether a step is one micro-batch. No gradients are added up then, so that ZeRO-1 is ZeRO-2,
    and a layer gives up its gathered weights in the pass in which its gradients come.
    """
    return context.training.global_batch == strategy.dp * micro_batch


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
