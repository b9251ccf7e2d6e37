"""Ring attention: keys and values visit the ranks of a context group, one block at a time.

While a rank attends to one block, the next is on its way (Liu et al. 2023). Each block gives a
softmax over its own keys; two of them are merged by the logarithms of their sums, which flash
kernels return. Backward the blocks go round again, and the gradients of each behind it, home.

Of the two pieces of a sequence that a rank has, causal attention sees all of its own block's, the
first piece of a block from a lower rank, and with its second piece alone both of a higher one's:
as much work for each block.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.autograd import Function

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from executor.models.context import ContextGroup

__all__ = ["attend_in_ring"]

ATEN = torch.ops.aten
WHOLE = slice(None)


def attend_in_ring(q: Tensor, both: Tensor, own: ContextGroup, *, causal: bool) -> Tensor:
    """Own queries to the keys and values of whole sequences: (batch, heads, positions, head_dim).

    ``q``: like the result; ``both``: own keys and values, (2, batch, key/value heads, positions,
    head_dim).
    """
    out: Tensor = _Ring.apply(q, both, own, causal)  # type: ignore[no-untyped-call] # torch's
    return out


class _Ring(Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, both: Tensor, own: ContextGroup, causal: bool) -> Tensor:  # noqa: FBT001
        ctx.own, ctx.causal = own, causal
        wide = torch.promote_types(q.dtype, torch.float32)
        out = torch.zeros_like(q, dtype=wide)
        sums = q.new_full(q.shape[:-1], -torch.inf, dtype=wide)
        for source, block in _visits(own, both):
            queries, keys, masked = _seen(own, source, q.shape[2], causal=causal)
            part = _forward(q[:, :, queries], *block[:, :, :, keys], causal=masked)
            ctx.rest = part[2:]
            _merge(out[:, :, queries], sums[:, :, queries], *part[:2])
        out = out.to(q.dtype)
        ctx.save_for_backward(q, both, out, sums)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        q, both, out, sums = ctx.saved_tensors
        of_q = torch.zeros_like(q, dtype=sums.dtype)
        home = behind = None
        for source, block in _visits(ctx.own, both):
            queries, keys, masked = _seen(ctx.own, source, q.shape[2], causal=ctx.causal)
            rows = [each[:, :, queries] for each in (gradients[0], q, out, sums)]
            found = _backward(rows, block[:, :, :, keys], ctx.rest, causal=masked)
            of_q[:, :, queries] += found[0]
            of_block = torch.zeros_like(block)
            of_block[:, :, :, keys] = torch.stack(found[1:])
            if home is None:
                home = of_block
                continue
            if behind is not None:
                of_block += behind.wait()
            behind = _Moving.start(of_block, ctx.own)
        assert home is not None
        assert behind is not None
        return of_q.to(q.dtype), home + behind.wait(), None, None


def _visits(own: ContextGroup, block: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Each rank's block with its number, the own one first. The next travels while one is used."""
    for step in range(own.size - 1):
        moving = _Moving.start(block, own)
        yield (own.rank - step) % own.size, block
        block = moving.wait()
    yield (own.rank + 1) % own.size, block


@dataclass(frozen=True, slots=True)
class _Moving:
    """What goes to the next rank of the ring, and what comes from the one before."""

    going: Tensor  # kept until it has gone
    coming: Tensor
    works: list[dist.Work]

    @classmethod
    def start(cls, going: Tensor, own: ContextGroup) -> _Moving:
        coming, place = torch.empty_like(going), own.rank
        there, back = (place + 1) % own.size, (place - 1) % own.size
        works = dist.batch_isend_irecv([
            dist.P2POp(dist.isend, going, group=own.group, group_peer=there),
            dist.P2POp(dist.irecv, coming, group=own.group, group_peer=back),
        ])  # fmt: skip
        return cls(going, coming, works)

    def wait(self) -> Tensor:
        for work in self.works:
            work.wait()
        return self.coming


def _seen(
    own: ContextGroup, source: int, length: int, *, causal: bool
) -> tuple[slice, slice, bool]:
    """Which own queries see which keys of a rank's block, and whether causally."""
    if not causal or source == own.rank:
        return WHOLE, WHOLE, causal
    half = length // 2
    return (WHOLE, slice(half), False) if source < own.rank else (slice(half, None), WHOLE, False)


def _merge(out: Tensor, sums: Tensor, part: Tensor, part_sums: Tensor) -> None:
    """Add the softmax over other keys to ``out``; ``sums``: logarithms of sums of exponentials."""
    both = torch.logaddexp(sums, part_sums)
    out *= (sums - both).exp()[..., None]
    out += part * (part_sums - both).exp()[..., None]
    sums.copy_(both)


def _forward(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> tuple[Any, ...]:
    """Context, logarithms of sums of exponentials, and what else the backward kernel wants."""
    if q.device.type == "cpu":
        found: tuple[Any, ...] = ATEN._scaled_dot_product_flash_attention_for_cpu(  # noqa: SLF001
            q, k, v, 0.0, causal
        )
        return found
    out, sums, *rest = ATEN._scaled_dot_product_flash_attention(q, k, v, 0.0, causal)  # noqa: SLF001
    return out, sums, *rest[:6]


def _backward(
    rows: list[Tensor], block: Tensor, rest: tuple[Any, ...], *, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of queries, keys and values. ``rows``: gradient, queries, output and logarithms of
    sums, both of all keys; ``block``: of which these are some; ``rest``: from ``_forward``.
    """
    gradient, q, out, sums = rows
    found: tuple[Tensor, Tensor, Tensor]
    if q.device.type == "cpu":
        found = ATEN._scaled_dot_product_flash_attention_for_cpu_backward(  # noqa: SLF001
            gradient, q, *block, out, sums, 0.0, causal
        )
        return found
    cum_q, cum_k, _, _, seed, unused = rest
    found = ATEN._scaled_dot_product_flash_attention_backward(  # noqa: SLF001
        gradient, q, *block, out, sums.contiguous(), cum_q, cum_k,
        q.shape[2], block.shape[3], 0.0, causal, seed, unused,
    )  # fmt: skip
    return found
