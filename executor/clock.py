"""Clock: how long this rank computes, forward and backward, in one step."""

from __future__ import annotations

import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["Clock"]

MILLI = 1e-3


class Clock:
    """Adds up seconds by what was done. On a GPU they are between events of its stream."""

    def __init__(
        self, device: torch.device, *, counter: Callable[[], float] = time.perf_counter
    ) -> None:
        """At zero. ``counter``: of seconds, where the device is no GPU."""
        self._counter = counter
        self._on_gpu = device.type == "cuda"
        self._seconds: dict[str, float] = {}
        self._events: list[tuple[str, torch.Event, torch.Event]] = []

    @contextmanager
    def busy(self, what: str) -> Iterator[None]:
        """Time the body as ``what``."""
        if self._on_gpu:
            first, last = (torch.Event(enable_timing=True) for _ in range(2))
            first.record()
            yield
            last.record()
            self._events.append((what, first, last))
            return
        began_s = self._counter()
        yield
        self._add(what, self._counter() - began_s)

    def _add(self, what: str, seconds: float) -> None:
        self._seconds[what] = self._seconds.get(what, 0.0) + seconds

    def take(self) -> dict[str, float]:
        """Seconds since the last time; waits for the GPU."""
        if self._events:
            torch.accelerator.synchronize()
        for what, first, last in self._events:
            self._add(what, first.elapsed_time(last) * MILLI)
        found, self._seconds, self._events = self._seconds, {}, []
        return found
