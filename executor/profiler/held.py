"""Bytes that are alive, counted by the storages of tensors, real or fake."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["Held"]


class Held(TorchDispatchMode):
    """Counts the storages that operators make while it is on, until they are freed. ``now`` and
    ``most`` are in bytes; what was there before is told to it by ``know``.
    """

    def __init__(self) -> None:
        """Nothing is counted yet."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.most = 0
        self._alive: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def know(self, tensors: Iterable[torch.Tensor]) -> None:
        """Count the storages of tensors that nobody counts yet."""
        for tensor in tensors:
            self._add(getattr(tensor, "_local_tensor", tensor))
        self.most = max(self.most, self.now)

    def _add(self, tensor: torch.Tensor) -> None:
        storage, key = tensor.untyped_storage(), _key(tensor)
        size = storage.nbytes()
        if key in self._alive:
            return

        def freed(_: object) -> None:
            self._alive.pop(key, None)
            self.now -= size

        self._alive[key] = weakref.ref(storage, freed)
        self.now += size

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run the operator and count what it made."""
        if any(getattr(kind, "__name__", "") == "DTensor" for kind in types):
            return NotImplemented
        found = func(*args, **(kwargs or {}))
        given = {_key(each) for each in tree_iter((args, kwargs)) if isinstance(each, torch.Tensor)}
        made = [each for each in tree_iter(found) if isinstance(each, torch.Tensor)]
        self.know(each for each in made if _key(each) not in given)
        return found


def _key(tensor: torch.Tensor) -> int:
    """What tells the storage of a living tensor from all others."""
    return int(StorageWeakRef(tensor.untyped_storage()).cdata)
