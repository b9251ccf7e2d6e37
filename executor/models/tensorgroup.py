"""TensorGroup: the ranks that split one layer, and the collectives between its parts.

A layer's inner part works on columns (heads, inner width, vocabulary) of whole sequences; the
residual stream outside is whole on every rank, or with sequence parallelism each rank has its
part of every sequence. ``enter`` and ``leave`` are the two crossings; each is the other's
backward pass (Shoeybi et al. 2019, Korthikanti et al. 2022).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.autograd import Function
from torch.distributed.tensor import Placement, Replicate, Shard

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["ALONE", "TensorGroup", "applied", "vocabulary_loss"]


@dataclass(frozen=True, slots=True)
class TensorGroup:
    """``mesh``: the ranks, None for one alone. ``sequence``: sequence parallelism."""

    mesh: DeviceMesh | None = None
    sequence: bool = False

    @property
    def size(self) -> int:
        """Ranks that split the layer."""
        return 1 if self.mesh is None else self.mesh.size()

    @property
    def rank(self) -> int:
        """Place of this rank among them."""
        return 0 if self.mesh is None else self.mesh.get_local_rank()

    @property
    def group(self) -> dist.ProcessGroup:
        """The process group of more than one rank."""
        assert self.mesh is not None
        return self.mesh.get_group()

    def placements(self, split: int | None) -> list[Placement]:
        """Of a weight that is split along a dim, or whole on every rank."""
        return [Replicate() if split is None else Shard(split)]

    def enter(self, x: Tensor) -> Tensor:
        """Residual stream -> whole sequences for the inner part; backward sums the gradients."""
        if self.size == 1:
            return x
        crossing = _Gather if self.sequence else _SumBackward
        return applied(crossing, x, self)

    def leave(self, x: Tensor) -> Tensor:
        """Sums over the inner parts -> residual stream."""
        if self.size == 1:
            return x
        crossing = _Scatter if self.sequence else _SumForward
        return applied(crossing, x, self)

    def total(self, x: Tensor) -> Tensor:
        """Sum over the ranks, each of which goes its own way with it."""
        return x if self.size == 1 else applied(_SumBoth, x, self)

    def share(self, length: int) -> slice:
        """The part of this rank of ``length`` positions of the residual stream."""
        if not self.sequence:
            return slice(0, length)
        part = length // self.size
        return slice(self.rank * part, (self.rank + 1) * part)


ALONE = TensorGroup()


def applied(function: Any, *arguments: Any) -> Tensor:
    """``Function.apply``, which torch leaves untyped."""
    result: Tensor = function.apply(*arguments)
    return result


def _summed(x: Tensor, tp: TensorGroup) -> Tensor:
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=tp.group)
    return total


def _gathered(x: Tensor, tp: TensorGroup) -> Tensor:
    """(batch, part of a sequence, ...) of each rank -> (batch, sequence, ...)."""
    parts = x.new_empty((tp.size * x.shape[0], *x.shape[1:]))
    dist.all_gather_single(parts, x.contiguous(), group=tp.group)
    stacked: Tensor = parts.unflatten(0, (tp.size, -1))
    return stacked.transpose(0, 1).flatten(1, 2)


def _scattered(x: Tensor, tp: TensorGroup) -> Tensor:
    """The inverse, summed over ranks."""
    parts = x.unflatten(1, (tp.size, -1)).transpose(0, 1).flatten(0, 1)
    own = x.new_empty((x.shape[0], x.shape[1] // tp.size, *x.shape[2:]))
    dist.reduce_scatter_single(own, parts, group=tp.group)
    return own


class _Gather(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, tp: TensorGroup) -> Tensor:
        ctx.tp = tp
        return _gathered(x, tp)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return _scattered(gradients[0], ctx.tp), None


class _Scatter(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, tp: TensorGroup) -> Tensor:
        ctx.tp = tp
        return _scattered(x, tp)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return _gathered(gradients[0], ctx.tp), None


class _SumForward(Function):
    @staticmethod
    def forward(_ctx: Any, x: Tensor, tp: TensorGroup) -> Tensor:
        return _summed(x, tp)

    @staticmethod
    def backward(_ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0], None


class _SumBackward(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, tp: TensorGroup) -> Tensor:
        ctx.tp = tp
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return _summed(gradients[0], ctx.tp), None


class _SumBoth(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, tp: TensorGroup) -> Tensor:
        ctx.tp = tp
        return _summed(x, tp)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return _summed(gradients[0], ctx.tp), None


def vocabulary_loss(logits: Tensor, targets: Tensor, first: int, tp: TensorGroup) -> Tensor:
    """Cross-entropy summed over tokens, of logits whose vocabulary is split over ``tp``.

    ``logits``: (tokens, own part of the vocabulary, from ``first`` on); ``targets``: (tokens).
    The whole logits exist on no rank.
    """
    if tp.size == 1:
        return torch.nn.functional.cross_entropy(logits, targets, reduction="sum")
    return applied(_SplitLoss, logits, targets, first, tp)


class _SplitLoss(Function):
    """Three reductions of one number a token: the greatest logit, the sum of exponentials and the
    target's logit, the last two in one. Only the softmax is kept.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, first: int, tp: TensorGroup) -> Tensor:
        greatest = logits.amax(-1)
        dist.all_reduce(greatest, dist.ReduceOp.MAX, group=tp.group)
        column = targets - first
        inside = (column >= 0) & (column < logits.shape[-1])
        column = column.clamp(0, logits.shape[-1] - 1)
        shifted = logits - greatest[:, None]
        picked = shifted.gather(-1, column[:, None]).squeeze(-1) * inside
        softmax = shifted.exp_()
        sums = torch.stack((softmax.sum(-1), picked))
        dist.all_reduce(sums, group=tp.group)
        softmax /= sums[0, :, None]
        ctx.save_for_backward(softmax, column, inside)
        return (sums[0].log() - sums[1]).sum()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        softmax, column, inside = ctx.saved_tensors
        gradient = softmax.clone()
        gradient.scatter_add_(-1, column[:, None], -inside[:, None].to(gradient.dtype))
        return gradient.mul_(gradients[0]), None, None, None
