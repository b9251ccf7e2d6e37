"""Recomputation inside a block: what the backward pass computes again instead of keeping."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["computed_again", "without_output"]

Result = TypeVar("Result")


def computed_again(function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    """``function(*inputs)``, of which only the inputs are kept; nothing in it is random."""
    result: Tensor = checkpoint(
        function, *inputs, use_reentrant=False, preserve_rng_state=False, determinism_check="none"
    )
    return result


def without_output(
    function: Callable[[Tensor], Tensor], x: Tensor, then: Callable[[Tensor], Result]
) -> Result:
    """``then(function(x))``, in which nobody keeps ``function(x)`` or a view of it: whoever needs
    it backward gets it computed again from ``x``, which is kept anyway. For cheap functions.
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
        self.memory, self.offset = _memory(middle), middle.storage_offset()
        self.packed = self.asked = 0
        self.again: Tensor | None = None

    def pack(self, saved: Tensor) -> Any:
        if _memory(saved) != self.memory:
            return saved
        self.packed += 1
        return saved.shape, saved.stride(), saved.storage_offset() - self.offset

    def unpack(self, packed: Any) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        if self.again is None:
            with torch.no_grad():
                self.again = self.function(self.x)
        shape, stride, offset = packed
        found = self.again.as_strided(shape, stride, self.again.storage_offset() + offset)
        self.asked = (self.asked + 1) % self.packed
        if not self.asked:
            self.again = None
        return found


def _memory(tensor: Tensor) -> int:
    """What tells the memory of a living tensor from all other, also where it is only pretended."""
    return int(StorageWeakRef(tensor.untyped_storage()).cdata)
