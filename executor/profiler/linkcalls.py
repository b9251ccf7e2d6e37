"""The operations that links are measured with, as calls on buffers that stay."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch
import torch.distributed as dist

from profiles.measured import Operation

if TYPE_CHECKING:
    from collections.abc import Callable

    from executor.profiler.linkpoints import LinkPoint

__all__ = ["call_of", "start_of"]

ELEMENT: Final = 4


def call_of(
    point: LinkPoint, group: dist.ProcessGroup, ranks: list[int], device: torch.device
) -> Callable[[], object]:
    """One operation, waited for as its user does. p2p goes there and back, half of which counts:
    the call stands for two.
    """
    whole = torch.zeros(point.num_bytes // ELEMENT, device=device)
    part = whole[: whole.numel() // len(ranks)].clone()
    match point.operation:
        case Operation.ALL_REDUCE:
            return lambda: dist.all_reduce(whole, group=group)
        case Operation.ALL_GATHER:
            return lambda: dist.all_gather_single(whole, part, group=group)
        case Operation.REDUCE_SCATTER:
            return lambda: dist.reduce_scatter_single(part, whole, group=group)
        case Operation.ALL_TO_ALL:
            other = torch.empty_like(whole)
            return lambda: dist.all_to_all_single(other, whole, group=group)
        case Operation.P2P:
            return _there_and_back(whole, ranks)


def start_of(
    point: LinkPoint, group: dist.ProcessGroup, device: torch.device
) -> Callable[[], dist.Work]:
    """An all-reduce that is started and not waited for."""
    whole = torch.zeros(point.num_bytes // ELEMENT, device=device)

    def start() -> dist.Work:
        work: dist.Work = dist.all_reduce(whole, group=group, async_op=True)
        return work

    return start


def _there_and_back(whole: torch.Tensor, ranks: list[int]) -> Callable[[], object]:
    first, second = ranks
    if dist.get_rank() == first:

        def lead() -> None:
            dist.send(whole, second)
            dist.recv(whole, second)

        return lead

    def follow() -> None:
        dist.recv(whole, first)
        dist.send(whole, first)

    return follow
