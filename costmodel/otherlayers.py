"""The operators of layers that are not transformer blocks: embedding, head with loss, generic
ones from a model file.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, assert_never

from costmodel.operators import (
    Operator,
    Saved,
    eager_norm_bytes,
    gemm,
    padded_vocab,
    stream_operator,
)
from costmodel.work import Collective, CollectiveKind, Gemm, Group, Stream
from profiles.layers import Conv2d, CustomLayer, Embedding, Head, Linear, Norm, Table
from profiles.training import LossKernel

if TYPE_CHECKING:
    from costmodel.operators import Shard
    from costmodel.work import Work

__all__ = ["other_operators"]

TOKEN_BYTES = 8  # int64 indices
FP32 = 4  # bytes
LOSS_CHUNKS = 8


def other_operators(
    layer: Embedding | Head | Linear | Conv2d | Table | CustomLayer, shard: Shard
) -> tuple[Operator, ...]:
    """Operators of one layer in forward order."""
    match layer:
        case Embedding():
            return _embedding(layer, shard)
        case Head():
            return _head(layer, shard)
        case Linear():
            return (_linear(layer, shard),)
        case Conv2d():
            return (_conv2d(layer, shard),)
        case Table():
            return (_table(layer, shard),)
        case CustomLayer():
            return (_custom(layer, shard),)
        case _:
            assert_never(layer)


def _embedding(layer: Embedding, shard: Shard) -> tuple[Operator, ...]:
    """Look-up, vocabulary-parallel: partial rows are summed over tp; learned positions added."""
    elements = shard.tokens * layer.hidden
    size = elements * shard.element
    mask = (Saved("embedding dropout mask", shard.sp_tokens * layer.hidden),)
    leave = shard.leave_tp(layer.hidden)
    adds = 2 if layer.positions else 0
    return (
        Operator(
            name="embedding",
            forward=(Stream((2 + adds) * size, 1 + adds // 2), *leave.forward),
            backward_input=leave.backward,
            backward_weight=(Stream(3 * size),),
            saved=(
                Saved("token indices", TOKEN_BYTES * shard.tokens),
                *(mask if layer.dropout else ()),
            ),
        ),
    )


def _head(layer: Head, shard: Shard) -> tuple[Operator, ...]:
    """Final norm, projection to the vocabulary, cross entropy (see ``LossKernel``)."""
    pads = shard.tp > 1 and not shard.training.fsdp2
    vocab = padded_vocab(layer.vocab, shard.tp) // shard.tp if pads else -(-layer.vocab // shard.tp)
    logits = shard.tokens * vocab
    elements = shard.sp_tokens * layer.hidden
    operators = []
    if layer.norm is not Norm.NONE:
        saved = [Saved("final_norm input", elements * shard.element)]
        if shard.training.fsdp2:
            extra = eager_norm_bytes(layer.norm, shard)
            saved.append(Saved("final_norm in fp32 and before its weight", elements * extra))
        operators.append(stream_operator("final_norm", elements, shard, saved=tuple(saved)))
    operators.append(
        gemm(
            "logits",
            (shard.tokens, vocab, layer.hidden),
            block=False,
            saved=(Saved("logits input", shard.kept_tokens * layer.hidden * shard.element),),
            enter=shard.enter_tp(layer.hidden),
        )
    )
    operators.append(_loss(logits, shard))
    return tuple(operators)


def _loss(logits: int, shard: Shard) -> Operator:
    match shard.training.loss_kernel:
        case LossKernel.FUSED:
            return _fused_loss(logits, shard, softmax_bytes=FP32)
        case LossKernel.HALF:
            return _fused_loss(logits, shard, softmax_bytes=shard.element)
        case LossKernel.EAGER:
            whole = logits * shard.tp
            size = whole * shard.element
            gather = (Collective(CollectiveKind.ALL_GATHER, Group.TP, size),)
            return _eager_loss(whole, shard, gather if shard.tp > 1 else ())
        case LossKernel.SHARDED:
            return _sharded_loss(logits, shard)
        case LossKernel.CHUNKED:
            return _chunked_loss(logits, shard)
        case _:
            assert_never(shard.training.loss_kernel)


def _fused_loss(logits: int, shard: Shard, *, softmax_bytes: int) -> Operator:
    """Keeps the softmax; while it runs, the logits and their gradient live beside it. In the
    activation type the softmax takes the place of the logits. The native executor's gradient
    begins as a copy of the softmax.
    """
    fp32, own = softmax_bytes * logits, shard.element * logits
    transient = own if softmax_bytes < FP32 else 2 * own
    return Operator(
        name="loss",
        forward=(Stream(own + 3 * fp32, 3),),
        backward_input=(Stream(fp32 + own, 1),),
        saved=(Saved("softmax of logits", fp32),),
        transient_bytes=fp32 if shard.training.fsdp2 else transient,
    )


def _eager_loss(logits: int, shard: Shard, gather: tuple[Work, ...] = ()) -> Operator:
    """To fp32, logarithm of the softmax, its gradient, back to the activation type; the copy, the
    gradient, and both in the activation type live beside the softmax.
    """
    fp32, own = FP32 * logits, logits * shard.element
    return Operator(
        name="loss",
        forward=(*gather, Stream(own + fp32, 1), Stream(3 * fp32, 2)),
        backward_input=(Stream(3 * fp32, 2), Stream(fp32 + own, 1)),
        saved=(Saved("softmax of logits", fp32),),
        transient_bytes=2 * fp32 + 2 * own,
    )


def _sharded_loss(logits: int, shard: Shard) -> Operator:
    """As the eager one, but only the gradients of loss and softmax live beside the latter. Under
    tensor parallelism the softmax is made of several operators, with copies of their own.
    """
    eager = _eager_loss(logits, shard)
    return eager if shard.tp > 1 else replace(eager, transient_bytes=2 * FP32 * logits)


def _chunked_loss(logits: int, shard: Shard) -> Operator:
    """Logits and their gradient are whole, all in fp32 is only there for a part of the tokens."""
    own = logits * shard.element
    return replace(
        _eager_loss(logits, shard),
        saved=(Saved("logits", own),),
        transient_bytes=own + 3 * FP32 * logits // LOSS_CHUNKS,
    )


def _linear(layer: Linear, shard: Shard) -> Operator:
    rows = shard.micro_batch * (layer.tokens or shard.seq)
    out = -(-layer.out_features // shard.tp)
    saved = Saved("input", rows * layer.in_features * shard.element)
    return gemm("linear", (rows, out, layer.in_features), saved=(saved,))


def _conv2d(layer: Conv2d, shard: Shard) -> Operator:
    """A convolution as its implicit GEMM; the input image is kept, not the unfolded one."""
    rows = shard.micro_batch * layer.output_pixels
    out = -(-layer.out_channels // shard.tp)
    inner = layer.in_channels * layer.kernel**2
    pixels = shard.micro_batch * layer.height * layer.width
    saved = Saved("input", pixels * layer.in_channels * shard.element)
    return gemm("conv2d", (rows, out, inner), saved=(saved,))


def _table(layer: Table, shard: Shard) -> Operator:
    lookups = shard.micro_batch * layer.lookups
    size = lookups * layer.dim * shard.element
    return Operator(
        name="table",
        forward=(Stream(2 * size),),
        backward_weight=(Stream(3 * size),),
        saved=(Saved("indices", TOKEN_BYTES * lookups),),
    )


def _custom(layer: CustomLayer, shard: Shard) -> Operator:
    """FLOP as one square-ish GEMM per sample, traffic as a stream; backward twice the forward."""
    split = shard.tp if layer.splits else 1
    flop = layer.forward_flop * shard.micro_batch // split
    traffic = layer.forward_bytes * shard.micro_batch // split
    side = max(1, round((flop / 2) ** (1 / 3)))
    product = Gemm(side, side, max(1, flop // (2 * side * side)))
    works: tuple[Work, ...] = (product, Stream(traffic)) if flop else (Stream(traffic),)
    return Operator(
        name="custom",
        forward=works,
        backward_input=works,
        backward_weight=works,
        saved=(Saved("saved", layer.saved_bytes * shard.micro_batch),),
    )
