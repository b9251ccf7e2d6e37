"""The residual stream between layers of different tp, which divide rows and positions differently.

One collective in the tp group of the layer that has the larger one: an all-gather, or an all-to-all
in which ranks give each other just what they lack; none where each has all that it needs. Gradients
go the same way back.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.autograd import Function

from costmodel.resharding import Held, collective, held, piece
from costmodel.work import CollectiveKind
from executor.models.tensorgroup import applied

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from costmodel.layout import Strategy
    from executor.models.tensorgroup import TensorGroup

__all__ = ["Resharding", "resharding"]

Part = tuple[slice, slice]  # rows, positions


@dataclass(frozen=True, slots=True)
class Resharding:
    """From ``have`` to ``want`` over the ranks of ``group``."""

    have: Held
    want: Held
    group: TensorGroup

    def __call__(self, x: Tensor) -> Tensor:
        """(own rows, own positions, width) of one layer -> of the other."""
        return applied(_Moved, x, self)

    @property
    def back(self) -> Resharding:
        """The way of the gradients."""
        return Resharding(self.want, self.have, self.group)

    def moved(self, x: Tensor) -> Tensor:
        """The same without gradients."""
        size, rank = self.group.size, self.group.rank
        whole = x.shape[0] * size // self.have.tp, x.shape[1] * self.have.parts
        own, wanted = self.have.part(rank, size), self.want.part(rank, size)
        given = [
            x[_within(piece(self.have, self.want, rank, taker), own, whole, size)]
            for taker in range(size)
        ]
        kind = collective(self.have, self.want)
        if kind is None:
            return given[rank]
        places = [
            _within(piece(self.have, self.want, giver, rank), wanted, whole, size)
            for giver in range(size)
        ]
        shape = (whole[0] * self.want.tp // size, whole[1] // self.want.parts, *x.shape[2:])
        found = x.new_empty(shape)
        counts = [found[place].numel() for place in places]
        taken = x.new_empty(sum(counts))
        if kind is CollectiveKind.ALL_GATHER:
            dist.all_gather_single(taken, x.flatten(), group=self.group.group)
        else:
            sent = torch.cat([each.flatten() for each in given])
            sizes = [each.numel() for each in given]
            dist.all_to_all_single(taken, sent, counts, sizes, group=self.group.group)
        for place, part in zip(places, taken.split(counts), strict=True):
            found[place] = part.view_as(found[place])
        return found


def resharding(
    before: Strategy, after: Strategy, tensor_group: Callable[[Strategy], TensorGroup]
) -> Resharding | None:
    """What brings activations from one layer to the next; None where both hold them alike."""
    have, want = held(before), held(after)
    if have == want:
        return None
    return Resharding(have, want, tensor_group(max(before, after, key=lambda each: each.tp)))


def _within(
    inner: tuple[range, range], outer: tuple[range, range], whole: tuple[int, int], parts: int
) -> Part:
    """Where ``inner`` lies in ``outer``, both counted in ``parts`` of the ``whole``."""
    rows, positions = (
        slice(
            (part.start - around.start) * count // parts,
            (part.stop - around.start) * count // parts,
        )
        for part, around, count in zip(inner, outer, whole, strict=True)
    )
    return rows, positions


class _Moved(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, change: Resharding) -> Tensor:
        ctx.change = change
        return change.moved(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return ctx.change.back.moved(gradients[0]), None
