"""Context parallelism: sequences split over ranks, keys and values gathered for attention.

A sequence is cut into 2 cp pieces, of which rank r has the r-th from either end. So causal
attention is as much work on every rank, which is what the cost model prices. Each piece of
queries attends to the keys and values that it sees of the whole sequence.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.autograd import Function
from torch.nn import functional
from torch.nn.attention.bias import CausalBias, causal_lower_right
from torch.utils._python_dispatch import _disable_current_modes

if TYPE_CHECKING:
    from torch import Tensor

    from profiles.layers import Attention

__all__ = ["WHOLE", "ContextGroup", "attend", "forget_masks"]


@dataclass(frozen=True, slots=True)
class ContextGroup:
    """The ranks that split sequences. ``group`` None: one rank alone. ``ring``: keys and values
    go round instead of being gathered.
    """

    group: dist.ProcessGroup | None = None
    ring: bool = False

    @property
    def size(self) -> int:
        """Ranks that split a sequence."""
        return 1 if self.group is None else self.group.size()

    @property
    def rank(self) -> int:
        """Number of this one among them."""
        return 0 if self.group is None else self.group.rank()

    @property
    def pieces(self) -> tuple[int, ...]:
        """Numbers of this rank's pieces."""
        return (0,) if self.group is None else (self.rank, 2 * self.size - 1 - self.rank)

    def own(self, whole: Tensor, dim: int) -> Tensor:
        """Of all positions, which lie along ``dim``, those of this rank."""
        if self.group is None:
            return whole
        pieces = whole.chunk(2 * self.size, dim)
        return torch.cat([pieces[number] for number in self.pieces], dim)

    def gather(self, x: Tensor) -> Tensor:
        """(..., own positions, width) -> (..., all positions, width)."""
        if self.group is None:
            return x
        whole: Tensor = _Gather.apply(x, self)  # type: ignore[no-untyped-call] # torch's
        return whole


WHOLE = ContextGroup()


class _Gather(Function):
    """All-gather; backward each rank gets the sum of the gradients of its positions."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, own: ContextGroup) -> Tensor:
        ctx.own = own
        parts = x.new_empty((own.size * x.shape[0], *x.shape[1:]))
        dist.all_gather_single(parts, x.contiguous(), group=own.group)
        early, late = parts.unflatten(0, (own.size, -1)).chunk(2, -2)
        return torch.cat((*early, *reversed(late.unbind())), -2)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        size, whole = ctx.own.size, gradients[0]
        pieces = whole.chunk(2 * size, -2)
        parts = whole.new_empty((size, *whole.shape[:-2], whole.shape[-2] // size, whole.shape[-1]))
        for part, early, late in zip(parts, pieces, pieces[::-1], strict=False):
            torch.cat((early, late), -2, out=part)
        summed = torch.empty_like(parts[0])
        dist.reduce_scatter_single(summed, parts.flatten(0, 1), group=ctx.own.group)
        return summed, None


def attend(spec: Attention, q: Tensor, k: Tensor, v: Tensor, first: int) -> Tensor:
    """Queries at positions from ``first`` on attend to the keys that they see.

    ``q``: (batch, heads, queries, head_dim), ``k`` and ``v``: (batch, key/value heads, all
    positions, head_dim). Keys that no query sees are left out.
    """
    last, length = first + q.shape[2], k.shape[2]
    begin, end = 0, last if spec.causal else length
    mask = None
    if spec.window is not None and spec.window < length:
        begin = max(0, first - spec.window + 1)
        end = min(end, last + spec.window - 1)
        mask = _window_mask((first, last), (begin, end), spec.window, spec.causal, q.device)
    elif spec.causal and first:
        mask = _last_queries(q.shape[2], end)
    context: Tensor = functional.scaled_dot_product_attention(
        q, k[:, :, begin:end], v[:, :, begin:end],
        attn_mask=mask,
        is_causal=spec.causal and mask is None,
        enable_gqa=q.shape[1] != k.shape[1],
    )  # fmt: skip
    return context


@lru_cache(maxsize=8)
def _last_queries(queries: int, keys: int) -> CausalBias:
    """Causal, the last query seeing all keys. It has no data, so that flash kernels can run, and
    comes into being outside of modes that log what is dispatched.
    """
    with _disable_current_modes():
        return causal_lower_right(queries, keys)


@lru_cache(maxsize=8)
def _window_mask(
    queries: tuple[int, int],
    keys: tuple[int, int],
    window: int,
    causal: bool,  # noqa: FBT001
    device: torch.device,
) -> Tensor:
    """Which keys each query sees: the nearest ``window`` before it, and after it if not causal."""
    distance = torch.arange(*queries, device=device)[:, None] - torch.arange(*keys, device=device)
    near = distance.abs() < window
    return near & (distance >= 0) if causal else near


def forget_masks() -> None:
    """Forget masks that blocks share: they are real or fake as whoever made them was."""
    _last_queries.cache_clear()
    _window_mask.cache_clear()
