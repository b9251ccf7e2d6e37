"""Traffic: which collectives a rank runs, on which axis of the mesh, with how many bytes."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _resolve_process_group
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["Traffic", "TrafficLog"]

ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER = "all-reduce", "all-gather", "reduce-scatter"
ALL_TO_ALL: Final = "all-to-all"
SEND, RECEIVE = "send", "receive"
OTHER: Final = "ends"  # no axis: the two stages that hold a tied matrix
# Operator -> kind, and which argument is the whole tensor.
LEGACY: Final = {
    "allreduce_": (ALL_REDUCE, 0),
    "_allgather_base_": (ALL_GATHER, 0),
    "_reduce_scatter_base_": (REDUCE_SCATTER, 1),
    "send": (SEND, 0),
    "recv_": (RECEIVE, 0),
    "broadcast_": ("broadcast", 0),
    "allgather_": (ALL_GATHER, 0),
    "alltoall_base_": (ALL_TO_ALL, 1),
}
FUNCTIONAL: Final = {
    "all_reduce": ALL_REDUCE,
    "all_reduce_": ALL_REDUCE,
    "all_gather_into_tensor": ALL_GATHER,
    "reduce_scatter_tensor": REDUCE_SCATTER,
}


@dataclass(frozen=True, slots=True)
class Traffic:
    """Counts and bytes by (kind, axis). Bytes are those of the whole tensor, before a
    reduce-scatter and after an all-gather, and of all that a rank gives in an all-to-all, to itself
    as well, as the cost model counts them.
    """

    counts: Mapping[tuple[str, str], int]
    bytes: Mapping[tuple[str, str], int]

    def document(self) -> list[dict[str, Any]]:
        """As rows of a table."""
        return [
            {"kind": kind, "axis": axis, "count": count, "bytes": self.bytes[kind, axis]}
            for (kind, axis), count in sorted(self.counts.items())
        ]


class TrafficLog(TorchDispatchMode):
    """Counts the collectives that run inside it, those of backward passes too."""

    def __init__(self, axes: Mapping[str, str]) -> None:
        """``axes``: what groups are called, by torch's names of them."""
        super().__init__()  # type: ignore[no-untyped-call] # torch's has no types
        self.axes = axes
        self.counts: Counter[tuple[str, str]] = Counter()
        self.bytes: Counter[tuple[str, str]] = Counter()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled regions run as they are; their collectives are operators like others."""
        return True

    @property
    def traffic(self) -> Traffic:
        """What has run so far."""
        return Traffic(dict(self.counts), dict(self.bytes))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented  # it comes back with local tensors
        if func.namespace in ("c10d", "_c10d_functional"):
            self._note(func, args)
        return func(*args, **(kwargs or {}))

    def _note(self, func: Any, args: tuple[Any, ...]) -> None:
        name = func.overloadpacket.__name__
        if func.namespace == "c10d" and name in LEGACY:
            kind, whole = LEGACY[name]
            boxed = next(a for a in args if isinstance(a, torch.ScriptObject))
            group = dist.ProcessGroup.unbox(boxed)
            size = sum(_nbytes(each) for each in _tensors(args[whole]))
        elif func.namespace == "_c10d_functional" and name in FUNCTIONAL:
            kind = FUNCTIONAL[name]
            group = _resolve_process_group(args[-1])
            parts = group.size() if kind == ALL_GATHER else 1
            size = _nbytes(args[0]) * parts
        else:
            return
        if group.size() == 1:
            return
        key = (kind, self.axes.get(group.group_name, OTHER))
        self.counts[key] += 1
        self.bytes[key] += size


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [each for part in value for each in _tensors(part)]


def _nbytes(tensor: torch.Tensor) -> int:
    return math.prod(tensor.shape) * tensor.element_size()
