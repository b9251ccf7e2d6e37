"""The operations that links are measured with, as calls on tensors that are made before each."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist

from executor.profiler.linkpoints import ELEMENT
from profiles.measured import Operation

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from executor.profiler.linkpoints import LinkPoint

__all__ = ["LinkCall", "call_of", "start_of"]


class LinkCall(NamedTuple):
    """``make`` tensors as the layers of a model do it, new for each call, and ``run`` with them."""

    make: Callable[[], tuple[Tensor, ...]]
    run: Callable[..., object]


def call_of(
    point: LinkPoint, group: dist.ProcessGroup, ranks: list[int], device: torch.device
) -> LinkCall:
    """One operation, waited for as its user does. p2p goes there and back, half of which counts:
    the call stands for two.
    """
    whole = torch.zeros(point.num_bytes // ELEMENT, device=device)
    part = whole[: whole.numel() // len(ranks)]
    match point.operation:
        case Operation.ALL_REDUCE:
            return LinkCall(lambda: (whole.clone(),), lambda own: dist.all_reduce(own, group=group))
        case Operation.ALL_GATHER:
            return LinkCall(
                lambda: (torch.empty_like(whole), part.clone()),
                lambda every, own: dist.all_gather_single(every, own, group=group),
            )
        case Operation.REDUCE_SCATTER:
            return LinkCall(
                lambda: (torch.empty_like(part), whole.clone()),
                lambda own, every: dist.reduce_scatter_single(own, every, group=group),
            )
        case Operation.ALL_TO_ALL:
            return LinkCall(
                lambda: (torch.empty_like(whole), whole.clone()),
                lambda coming, going: dist.all_to_all_single(coming, going, group=group),
            )
        case Operation.P2P:
            return LinkCall(lambda: (whole,), _there_and_back(ranks))


def start_of(
    point: LinkPoint, group: dist.ProcessGroup, device: torch.device
) -> Callable[[], dist.Work]:
    """An all-reduce that is started and not waited for."""
    whole = torch.zeros(point.num_bytes // ELEMENT, device=device)

    def start() -> dist.Work:
        work: dist.Work = dist.all_reduce(whole, group=group, async_op=True)
        return work

    return start


def _there_and_back(ranks: list[int]) -> Callable[[Tensor], object]:
    first, second = ranks
    if dist.get_rank() == first:

        def lead(whole: Tensor) -> None:
            dist.send(whole, second)
            dist.recv(whole, second)

        return lead

    def follow(whole: Tensor) -> None:
        dist.recv(whole, first)
        dist.send(whole, first)

    return follow
