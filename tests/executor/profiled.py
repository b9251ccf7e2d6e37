"""A small Llama whose layers the profiler's tests measure, and points of them."""

from __future__ import annotations

import torch

from costmodel.layout import NO_RECOMPUTE, Layout, Mesh, Strategy
from costmodel.placing import even_cut, placed_chunks
from executor.profiler.points import Point, Request
from profiles.layers import Attention, Block, Embedding, FeedForward, Head, Norm
from profiles.model import LayerRun, ModelSpec
from profiles.training import LossKernel, Precision, TrainingSpec

CPU = torch.device("cpu")
TRAINING = TrainingSpec(
    global_batch=2,
    seq_len=128,
    precision=Precision.FP32,
    fused_kernels=False,
    fused_norms=False,
    loss=LossKernel.SHARDED,
)
BATCH, SEQ, HIDDEN, VOCAB = 2, 128, 256, 1024


def llama(*, blocks: int = 2) -> ModelSpec:
    attention = Attention(heads=4, kv_heads=2, head_dim=64, value_head_dim=64)
    wide = FeedForward(ffn_hidden=704, gated=True)
    block = Block(hidden=HIDDEN, attention=attention, feed_forward=wide, norm=Norm.RMS)
    head = Head(vocab=VOCAB, hidden=HIDDEN, norm=Norm.RMS, tied=False)
    runs = (LayerRun(Embedding(vocab=VOCAB, hidden=HIDDEN), 1), LayerRun(block, blocks))
    return ModelSpec(name="llama", family="generic", runs=(*runs, LayerRun(head, 1)))


LLAMA = llama()


def request(model: ModelSpec = LLAMA, **axes) -> Request:
    usual = {"tp": (1,), "batches": (1, BATCH), "seq_lens": (SEQ,)}
    return Request(model=model, training=TRAINING, **{**usual, **axes})


def point(layer: str, tp: int = 1, *, sequence_parallel: bool = False) -> Point:
    return Point(layer=layer, tp=tp, sequence_parallel=sequence_parallel, batch=BATCH, seq_len=SEQ)


def layout_of(model: ModelSpec, count: int) -> Layout:
    cut = even_cut(model.num_blocks, 1)
    return Layout(
        mesh=Mesh(), schedule="1f1b", num_chunks=1, micro_batch=BATCH, num_microbatches=count,
        chunks=placed_chunks(model, cut, ((0, 0),), Strategy(), (NO_RECOMPUTE, None)),
    )  # fmt: skip
