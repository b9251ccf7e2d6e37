"""What a block of the native executor needs at the worst moment of its backward pass.

The pass goes through the operators from the last to the first. Before each one there live what the
operators up to it have saved, the gradients of the weights behind it, and that of its output; while
it runs, the gradients that it makes and what it needs itself:

    saved by operators up to this one + gradients of weights so far + gradients in, out and between

What recomputation has dropped comes back where it is needed: all at once in full recomputation and
in the feed-forward, each tensor for its own operator otherwise.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from costmodel.layout import RecomputeKind
from costmodel.work import Collective, Gemm

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from costmodel.layout import Recompute
    from costmodel.operators import Operator

__all__ = ["worst_moment"]

WHOLE_MODULE = "mlp"  # which is checkpointed, with its norm where that is recomputed too


def worst_moment(
    operators: Sequence[Operator],
    recompute: Recompute,
    *,
    stream: int,
    element: int,
    collects: bool,
) -> int:
    """Bytes at the worst moment, what the block keeps from its forward pass included.

    ``operators``: in forward order. ``stream``: bytes of the residual stream, whose gradient
    lives all the time. ``element``: bytes of an activation and of a weight's gradient as the pass
    makes it. ``collects``: gradients of weights stay until the pass is over, instead of being
    added to those of other micro-batches one by one.

    Ignored: what operators make and give up while they run; that queries, keys and values have a
    product each.
    """
    most = weights = 0
    arriving = stream
    for place in reversed(range(len(operators))):
        operator = operators[place]
        made = _weight_elements(operator) * element
        between, leaving = _gradients(operator, arriving, element)
        live = stream + _saved_up_to(operators, place, recompute) + weights + made
        most = max(most, live + between)
        arriving = leaving
        weights += made if collects else 0
    return most


def _saved_up_to(operators: Sequence[Operator], place: int, recompute: Recompute) -> int:
    """What lives of the saved tensors while the operator at ``place`` runs backward."""
    found = 0
    for number, operator in enumerate(operators[: place + 1]):
        is_here = (
            recompute.kind is RecomputeKind.FULL
            or number == place
            or _come_together(operator, operators[place], recompute)
        )
        found += sum(
            tensor.bytes
            for tensor in operator.saved
            if is_here or tensor.dropped_by not in recompute.modules
        )
        found += _regathered(operator) if is_here else 0
    return found


def _regathered(operator: Operator) -> int:
    """Bytes of the input that a product gathers once more, of which only a part was kept."""
    return sum(work.bytes for work in operator.beside if isinstance(work, Collective))


def _come_together(one: Operator, other: Operator, recompute: Recompute) -> bool:
    """Whether two operators are computed again in one go."""
    return WHOLE_MODULE in recompute.modules and one.module == other.module == WHOLE_MODULE


def _gradients(operator: Operator, arriving: int, element: int) -> tuple[int, int]:
    """Bytes of the gradients that live while an operator runs, and of those that it hands on."""
    products = [work for work in operator.forward if isinstance(work, Gemm)]
    if products:
        outside = sum(work.m * work.n * work.groups for work in products) * element
        inside = sum(work.m * work.k * work.groups for work in products) * element
        return max(arriving, outside) + inside, inside
    if operator.module == "core_attn":
        leaving = operator.saved[0].bytes  # queries, keys and values
        return arriving + leaving + operator.transient_bytes, leaving
    if operator.transient_bytes:
        return arriving + operator.transient_bytes, operator.transient_bytes
    return 2 * arriving, arriving


def _weight_elements(operator: Operator) -> int:
    return sum(_elements(operator))


def _elements(operator: Operator) -> Iterator[int]:
    """Of weights: a weight gradient is a product of (inputs, outputs, rows)."""
    for work in operator.backward_weight:
        if isinstance(work, Gemm):
            yield work.m * work.n * work.groups
