"""Recomputation inside a block: what the backward pass computes again instead of keeping."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["computed_again", "without_output"]


def computed_again(function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    """``function(*inputs)``, of which only the inputs are kept; nothing in it is random."""
    result: Tensor = checkpoint(
        function, *inputs, use_reentrant=False, preserve_rng_state=False, determinism_check="none"
    )
    return result


def without_output(
    function: Callable[[Tensor], Tensor], x: Tensor, then: Callable[[Tensor], Tensor]
) -> Tensor:
    """``then(function(x))``, in which nobody keeps ``function(x)``: whoever needs it backward gets
    it computed again from ``x``, which is kept anyway. For cheap functions before a GEMM.
    """
    middle = function(x)
    kept = _Kept(function, x.detach(), middle)
    with saved_tensors_hooks(kept.pack, kept.unpack):
        return then(middle)


class _Kept:
    """Knows a tensor by its memory, and computes it again once for all who saved it, in each
    backward pass anew where there are several (input gradients, then weight gradients).
    """

    def __init__(self, function: Callable[[Tensor], Tensor], x: Tensor, middle: Tensor) -> None:
        self.function, self.x = function, x
        self.place = _place(middle)
        self.packed = self.asked = 0
        self.again: Tensor | None = None

    def pack(self, saved: Tensor) -> Any:
        if _place(saved) != self.place:
            return saved
        self.packed += 1
        return saved.shape, saved.stride()

    def unpack(self, packed: Any) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        if self.again is None:
            with torch.no_grad():
                self.again = self.function(self.x)
        found = self.again.as_strided(*packed)
        self.asked = (self.asked + 1) % self.packed
        if not self.asked:
            self.again = None
        return found


def _place(tensor: Tensor) -> tuple[Any, ...]:
    """The memory that a tensor names, also of one without any (``FakeTensor``)."""
    storage = tensor.untyped_storage()._cdata  # noqa: SLF001 - it has no other name
    return storage, tensor.storage_offset(), tensor.numel()
