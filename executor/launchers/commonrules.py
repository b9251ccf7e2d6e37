"""Rules that several launchers share: sums of ranks and batches, and what degrees divide."""

from __future__ import annotations

from typing import TYPE_CHECKING

from executor.launchers.rulebook import Broken, Rulebook, divisors, nearest_legal

if TYPE_CHECKING:
    from collections.abc import Iterator

    from executor.launchers.told import Told

__all__ = ["BATCH", "HEADS", "REPLICATED_HEADS", "SEQUENCE", "WIDTHS", "multiples", "replicas"]

_HEADS, _REPLICATED, _WIDTHS = Rulebook(), Rulebook(), Rulebook()
_SEQUENCE, _BATCH = Rulebook(), Rulebook()


def replicas(told: Told) -> int:
    """Data parallel ranks, at least 1."""
    inner: int = told.tp * (told.pp or 1) * (told.cp or 1)
    return max(1, told.num_gpus // inner)


def multiples(value: int, unit: int) -> str:
    """The multiples of ``unit`` next to ``value``."""
    low = value // unit * unit
    return f"{low} or {low + unit}" if low else str(unit)


@_HEADS.fails("GQA is split by head; DTensor replicates none (torchtitan pull 4016)")
def key_value_heads(told: Told) -> Iterator[Broken]:
    """Tensor parallelism divides the key/value heads."""
    heads = told.kv_heads or told.heads
    if heads and heads % told.tp:
        message = f"{heads} key/value heads do not divide by tp {told.tp}"
        yield Broken("tp", message, nearest_legal(told.tp, divisors(heads)))


@_REPLICATED.fails("core/transformer/transformer_config.py: heads, query groups")
def attention_heads(told: Told) -> Iterator[Broken]:
    """Tensor parallelism divides the attention heads."""
    if told.heads and told.heads % told.tp:
        message = f"{told.heads} attention heads do not divide by tp {told.tp}"
        yield Broken("tp", message, nearest_legal(told.tp, divisors(told.heads)))


_HEADS.rules.append(attention_heads)


@_REPLICATED.fails("core/transformer/transformer_config.py: num_query_groups")
def query_groups(told: Told) -> Iterator[Broken]:
    """Tensor parallelism divides the key/value heads, or is a multiple of them."""
    heads = told.kv_heads
    if heads and heads % told.tp and told.tp % heads:
        message = f"{heads} key/value heads neither divide by nor divide tp {told.tp}"
        legal = [tp for tp in range(1, 4 * heads + 1) if heads % tp == 0 or tp % heads == 0]
        yield Broken("tp", message, nearest_legal(told.tp, legal))


@_WIDTHS.fails("column-parallel layers divide their output (core/tensor_parallel/layers.py)")
def feed_forward_width(told: Told) -> Iterator[Broken]:
    """Tensor parallelism divides the feed-forward width, and that of experts their own."""
    if told.ffn and told.ffn % told.tp:
        message = f"feed-forward width {told.ffn} does not divide by tp {told.tp}"
        yield Broken("tp", message, nearest_legal(told.tp, divisors(told.ffn)))
    split = told.expert_tp or (told.tp if told.num_experts else 1)
    width = told.expert_ffn or told.ffn
    if told.num_experts and width and width % split:
        message = f"expert width {width} does not divide by {split}"
        yield Broken("expert_tp", message, nearest_legal(split, divisors(width)))


@_SEQUENCE.fails("each context rank takes two pieces of a sequence")
def context_pieces(told: Told) -> Iterator[Broken]:
    """The sequence length is a multiple of twice the context parallel degree."""
    cp = told.cp or 1
    if cp > 1 and told.seq_len and told.seq_len % (2 * cp):
        message = f"{told.seq_len} tokens do not divide by 2 x cp {cp}"
        yield Broken("seq_len", message, multiples(told.seq_len, 2 * cp))


@_SEQUENCE.fails("reduce-scatter along the sequence; a plain abort (gloo) or a shape error")
def sequence_parallel_pieces(told: Told) -> Iterator[Broken]:
    """With sequence parallelism the tokens of a rank divide by the tensor parallel degree."""
    if not told.sequence_parallel or told.tp == 1 or not told.seq_len:
        return
    tokens = told.seq_len // (told.cp or 1)
    if tokens % told.tp:
        message = f"{tokens} tokens of a rank do not divide by tp {told.tp}"
        yield Broken("seq_len", message, multiples(told.seq_len, told.tp * (told.cp or 1)))


@_BATCH.fails("a step has whole micro-batches on every replica")
def batch_divides(told: Told) -> Iterator[Broken]:
    """The global batch is a multiple of micro-batch x data parallel ranks."""
    batch, size = told.global_batch, told.micro_batch
    unit = (size or 0) * replicas(told)
    if batch and unit and batch % unit:
        message = (
            f"global batch {batch} for micro-batch {size} x {replicas(told)} replicas = {unit}"
        )
        yield Broken("global_batch", message, multiples(batch, unit))


HEADS, REPLICATED_HEADS = tuple(_HEADS.rules), tuple(_REPLICATED.rules)
WIDTHS, SEQUENCE, BATCH = tuple(_WIDTHS.rules), tuple(_SEQUENCE.rules), tuple(_BATCH.rules)
