"""ExpertGroup: the ranks that hold a layer's experts, and how tokens travel to them and back.

A rank sends each row to the rank that has its expert by an all-to-all whose parts are as uneven
as the routing. Where experts are split as well (expert_tp), the ranks that have parts of the same
experts then gather each other's rows, and sum what they made of them on the way back.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.autograd import Function
from torch.distributed.tensor import Placement, Shard

from executor.models.tensorgroup import applied

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["ALL_EXPERTS", "Exchange", "ExpertGroup"]


@dataclass(frozen=True, slots=True)
class ExpertGroup:
    """``mesh``: (ep, expert_tp), None for one rank that has all experts whole."""

    mesh: DeviceMesh | None = None

    @property
    def exchanging(self) -> dist.ProcessGroup | None:
        """The ranks among which experts are dealt out."""
        return self._group(0)

    @property
    def splitting(self) -> dist.ProcessGroup | None:
        """The ranks that have parts of the same experts."""
        return self._group(1)

    def _group(self, axis: int) -> dist.ProcessGroup | None:
        if self.mesh is None or self.mesh.size(axis) == 1:
            return None
        return self.mesh.get_group(axis)

    def placements(self, _split: int | None) -> list[Placement]:
        """Of weights (inner width, experts, hidden)."""
        return [Shard(1), Shard(0)]


ALL_EXPERTS = ExpertGroup()


class Exchange:
    """The way of one micro-batch's rows to the experts of ``group`` and back.

    ``counts`` on each rank: how many of its rows, which are sorted by expert, go to each of all
    experts. ``loads``: rows that each expert of this rank gets.
    """

    def __init__(self, group: ExpertGroup, counts: Tensor) -> None:
        """Tell the other ranks what comes. The host waits for the counts."""
        self.group = group
        self.regroup: Tensor | None = None
        if group.mesh is None:
            self.loads: list[int] = counts.tolist()
            return
        coming = _exchanged_counts(counts, group)  # of each sender, for each expert here
        self.sent = counts.unflatten(0, (coming.shape[0], -1)).sum(1).tolist()
        self.received = coming.sum(1).tolist()
        every = _gathered_counts(coming, group)  # (ranks that split, senders, experts)
        rows = every.sum((1, 2))
        self.longest = int(rows.max())
        self.loads = every.sum((0, 1)).tolist()
        self.regroup = _places(every, self.longest - rows)[: sum(self.loads)]

    def there(self, rows: Tensor) -> Tensor:
        """Own rows (sorted by expert, width) -> rows for the experts of this rank, sorted too."""
        if self.regroup is None:
            return rows
        if self.group.exchanging is not None:
            rows = applied(_AllToAll, rows, self.sent, self.received, self.group.exchanging)
        if self.group.splitting is not None:
            rows = applied(_Gather, rows, self.longest, self.group.splitting)
        return rows[self.regroup]

    def back(self, rows: Tensor) -> Tensor:
        """The inverse of ``there``, summed over the parts of an expert."""
        if self.regroup is None:
            return rows
        ranks = 1 if self.group.splitting is None else self.group.splitting.size()
        whole = rows.new_zeros((ranks * self.longest, rows.shape[1]))
        rows = whole.index_put((self.regroup,), rows)  # which, unlike index_copy, keeps no rows
        if self.group.splitting is not None:
            rows = applied(_Scatter, rows, sum(self.received), self.group.splitting)
        if self.group.exchanging is not None:
            rows = applied(_AllToAll, rows, self.received, self.sent, self.group.exchanging)
        return rows


def _exchanged_counts(counts: Tensor, group: ExpertGroup) -> Tensor:
    """Counts for all experts -> (senders, experts of this rank)."""
    if group.exchanging is None:
        return counts[None]
    coming = torch.empty_like(counts)
    dist.all_to_all_single(coming, counts, group=group.exchanging)
    found: Tensor = coming.unflatten(0, (group.exchanging.size(), -1))
    return found


def _gathered_counts(coming: Tensor, group: ExpertGroup) -> Tensor:
    """(senders, experts) of each rank that has parts of these experts."""
    if group.splitting is None:
        return coming[None]
    count = group.splitting.size()
    every = coming.new_empty((count * coming.shape[0], coming.shape[1]))
    dist.all_gather_single(every, coming.contiguous(), group=group.splitting)
    found: Tensor = every.unflatten(0, (count, -1))
    return found


def _places(every: Tensor, padding: Tensor) -> Tensor:
    """Where the rows of the first expert stand among those that came, of the second, ...; last
    the padding. Of each rank come its senders' rows one after the other, sorted by expert.
    """
    ranks, senders, experts = every.shape
    counts = torch.cat((every.flatten(1), padding[:, None]), 1)
    kinds = torch.arange(experts, device=every.device).repeat(senders)
    kinds = torch.cat((kinds, kinds.new_tensor([experts]))).repeat(ranks)
    return kinds.repeat_interleave(counts.flatten()).argsort(stable=True)


class _AllToAll(Function):
    """Parts of rows, one for each rank; backward the same way back."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup
    ) -> Tensor:
        ctx.sent, ctx.received, ctx.group = sent, received, group
        return _exchanged(rows, sent, received, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return _exchanged(gradients[0], ctx.received, ctx.sent, ctx.group), None, None, None


def _exchanged(
    rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup
) -> Tensor:
    there = rows.new_empty((sum(received), *rows.shape[1:]))
    dist.all_to_all_single(there, rows.contiguous(), received, sent, group=group)
    return there


class _Gather(Function):
    """Rows of all ranks, each padded to the ``longest``."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, longest: int, group: dist.ProcessGroup) -> Tensor:
        ctx.count, ctx.group = rows.shape[0], group
        return _gathered(rows, longest, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return _scattered(gradients[0], ctx.count, ctx.group), None, None


class _Scatter(Function):
    """The inverse, summed over ranks."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, count: int, group: dist.ProcessGroup) -> Tensor:
        ctx.longest, ctx.group = rows.shape[0] // group.size(), group
        return _scattered(rows, count, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return _gathered(gradients[0], ctx.longest, ctx.group), None, None


def _gathered(rows: Tensor, longest: int, group: dist.ProcessGroup) -> Tensor:
    padded = rows.new_zeros((longest, rows.shape[1]))
    padded[: rows.shape[0]] = rows
    every = rows.new_empty((group.size() * longest, rows.shape[1]))
    dist.all_gather_single(every, padded, group=group)
    return every


def _scattered(rows: Tensor, count: int, group: dist.ProcessGroup) -> Tensor:
    own = rows.new_empty((rows.shape[0] // group.size(), rows.shape[1]))
    dist.reduce_scatter_single(own, rows.contiguous(), group=group)
    return own[:count]
