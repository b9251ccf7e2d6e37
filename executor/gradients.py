"""Gradients after the passes: sums that are still due, tied matrices, norm and clipping."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import Tensor, nn

    from costmodel.layout import Layout
    from executor.pipeline import Part
    from profiles.model import ModelSpec

__all__ = ["TiedEnds", "local_tensor", "scale_gradients", "squared_norm", "sum_partial"]


def local_tensor(tensor: Tensor) -> Tensor:
    """The part of this rank."""
    if not isinstance(tensor, DTensor):
        return tensor
    local: Tensor = tensor.to_local()
    return local


def sum_partial(parameters: Iterable[nn.Parameter]) -> None:
    """Sum over tp what ranks have parts of; FSDP has done so for those that it wraps."""
    for parameter in parameters:
        gradient = parameter.grad
        if isinstance(gradient, DTensor) and isinstance(parameter, DTensor):
            wanted = parameter.placements
            if gradient.placements != wanted:
                parameter.grad = gradient.redistribute(placements=wanted)


class TiedEnds:
    """A matrix that two chunks hold, one as embedding and one as projection: its gradient is the
    sum of both, so that the copies stay equal.
    """

    def __init__(self, model: ModelSpec, layout: Layout, parts: Sequence[Part]) -> None:
        """Every rank makes the groups of all pairs, in the same order."""
        self.copies: list[nn.Parameter] = []
        self.group: dist.ProcessGroup | None = None
        first, last = layout.chunks[0].stage, layout.chunks[-1].stage
        if not model.tied or len(layout.chunks) == 1:
            return
        for part in parts:
            if "embedding" in part.chain.layers:
                self.copies.append(part.chain.embedding.get_parameter("tokens"))
            if "head" in part.chain.layers:
                self.copies.append(part.chain.head.get_parameter("projection"))
        if first == last:
            return
        columns = ([*ranks] for ranks in _columns(layout, first, last))
        for pair in columns:
            group = dist.new_group(pair)
            if dist.get_rank() in pair:
                self.group = group

    def sum(self) -> None:
        """Give all copies the whole gradient."""
        gradients = [local_tensor(copy.grad) for copy in self.copies if copy.grad is not None]
        if not gradients:
            return
        total = gradients[0] if len(gradients) == 1 else gradients[0] + gradients[1]
        if self.group is not None:
            dist.all_reduce(total, group=self.group)
        for gradient in gradients:
            gradient.copy_(total)


def _columns(layout: Layout, first: int, last: int) -> Iterable[tuple[int, int]]:
    """Ranks of two stages that stand at the same place in them."""
    ranks = [
        [rank for part in layout.mesh.stage_ranks(stage) for rank in part]
        for stage in (first, last)
    ]
    return zip(*ranks, strict=True)


@torch.no_grad()  # so that local tensors cost nothing
def squared_norm(parameters: Iterable[nn.Parameter], twice: Sequence[nn.Parameter]) -> Tensor:
    """What this rank adds to the squared norm of all gradients: over all ranks, each element counts
    once. ``twice``: copies of which the model holds two.
    """
    halves = {id(parameter) for parameter in twice}
    weights: list[int] = []
    own: list[Tensor] = []
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is None:
            continue
        weight = 2 if id(parameter) in halves else 1
        if isinstance(gradient, DTensor):
            weight *= math.prod(
                gradient.device_mesh.size(axis)
                for axis, placement in enumerate(gradient.placements)
                if isinstance(placement, Replicate)
            )
        weights.append(weight)
        own.append(local_tensor(gradient))
    wide = torch.promote_types(own[0].dtype, torch.float32)
    norms = torch._foreach_norm(own, dtype=wide)  # noqa: SLF001 - those with names have no dtype
    squares = torch.stack(norms).square()
    return (squares / squares.new_tensor(weights)).sum()


@torch.no_grad()
def scale_gradients(parameters: Iterable[nn.Parameter], factor: float) -> None:
    """Multiply all gradients."""
    own = [local_tensor(p.grad) for p in parameters if p.grad is not None]
    torch._foreach_mul_(own, factor)
