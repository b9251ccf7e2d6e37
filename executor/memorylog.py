"""MemoryLog: bytes of the tensors that live, as an allocator counts them."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, Self
from unittest.mock import patch

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

if TYPE_CHECKING:
    from torch import UntypedStorage

__all__ = ["MemoryLog"]


class MemoryLog(TorchDispatchMode):
    """Follows each storage that operators make until it is freed, or resized, which is how FSDP
    frees gathered weights. ``live`` is now, ``peak`` the most since it was last set.
    """

    def __init__(self) -> None:
        """Nothing lives yet."""
        super().__init__()  # type: ignore[no-untyped-call] # torch's has no types
        self.live = self.peak = 0
        self._sizes: dict[int, int] = {}  # by address of the storage
        self._resizing: Any = None

    def __enter__(self) -> Self:
        resize = torch.UntypedStorage.resize_

        def resized(storage: UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            self._follow(storage)
            return result

        self._resizing = patch.object(torch.UntypedStorage, "resize_", resized)
        self._resizing.start()
        entered: Self = super().__enter__()  # type: ignore[no-untyped-call] # torch's has no types
        return entered

    def __exit__(self, *error: object) -> None:
        self._resizing.stop()
        super().__exit__(*error)  # type: ignore[no-untyped-call] # torch's has no types

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented  # it comes back with local tensors
        result = func(*args, **(kwargs or {}))
        for each in tree_leaves(result):
            if isinstance(each, torch.Tensor) and not each.is_meta:
                self._follow(each.untyped_storage())
        return result

    def _follow(self, storage: UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()  # noqa: SLF001 - it has no other name
        if key not in self._sizes:
            self._sizes[key] = 0
            weakref.finalize(storage, self._forget, key)
        self.live += size - self._sizes[key]
        self._sizes[key] = size
        self.peak = max(self.peak, self.live)

    def _forget(self, key: int) -> None:
        self.live -= self._sizes.pop(key)
