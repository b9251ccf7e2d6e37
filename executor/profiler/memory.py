"""Bytes that one layer holds on one rank, by what it recomputes.

On a GPU they are the allocator's; else tensors are fake, and their storages are counted: no memory
is taken, no time spent, and the bytes are those of a run on a CPU.
"""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import combinations
from typing import TYPE_CHECKING, Final, Protocol

import torch

from costmodel.layout import MODULES, NO_RECOMPUTE, Recompute, RecomputeKind
from executor.precision import Numbers, numbers_of
from executor.profiler.held import Held
from executor.profiler.probe import Probe, pretended_tensors

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from executor.profiler.points import Point
    from profiles.model import ModelSpec
    from profiles.training import TrainingSpec

__all__ = ["RECOMPUTES", "Bytes", "held_bytes"]

RECOMPUTES: Final = (
    NO_RECOMPUTE,
    *(
        Recompute(RecomputeKind.SELECTIVE, modules)
        for count in range(1, len(MODULES) + 1)
        for modules in combinations(sorted(MODULES), count)
    ),
    Recompute(RecomputeKind.FULL),
)


@dataclass(frozen=True, slots=True)
class Bytes:
    """As ``LayerHeld`` says them."""

    saved: int
    transient: int
    state: int


class _Counter(Protocol):
    @property
    def now(self) -> int: ...

    @property
    def most(self) -> int: ...


class _Allocator:
    """What torch's allocator has given out on a GPU."""

    def __init__(self) -> None:
        torch.cuda.reset_peak_memory_stats()

    @property
    def now(self) -> int:
        return torch.cuda.memory_allocated()

    @property
    def most(self) -> int:
        return torch.cuda.max_memory_allocated()


@contextmanager
def _counting(probe: Probe, device: torch.device) -> Iterator[_Counter]:
    if device.type == "cuda":
        yield _Allocator()
        return
    held = Held()
    there = [probe.x, probe.targets, probe.gradient, *probe.parameters()]
    there += [own.grad for own in probe.parameters()]
    held.know(each for each in there if each is not None)
    with held:
        yield held


def held_bytes(
    model: ModelSpec,
    training: TrainingSpec,
    point: Point,
    recompute: Recompute,
    device: torch.device,
) -> Bytes:
    """What a layer holds where it recomputes so. Needs a process group of the point's size."""
    strategy = replace(point.strategy, recompute=recompute)
    numbers = Numbers(numbers_of(training).activations)
    tensors = nullcontext() if device.type == "cuda" else pretended_tensors()
    with tensors:
        probe = Probe(model, training, point, device, copies=1, strategy=strategy, numbers=numbers)
        probe.backward(probe.forward())  # makes gradients, and tables that blocks share
        with _counting(probe, device) as count:
            before = count.now
            y = probe.forward()
            between = count.now
            saved = between - before + _size(probe.x) - (_size(y) if y.dim() else 0)
        with _counting(probe, device) as count:
            y = probe.forward()
            start = count.now
            probe.backward(y)
            transient = count.most - start
        del y
        probe.optimizer.step()
        state = sum(_size(each) for each in _states(probe))
    return Bytes(saved, max(0, transient), state)


def _size(tensor: Tensor) -> int:
    own: Tensor = getattr(tensor, "_local_tensor", tensor)
    return own.untyped_storage().nbytes()


def _states(probe: Probe) -> Iterator[Tensor]:
    for own in probe.parameters():
        yield own
        if own.grad is not None:
            yield own.grad
        for state in probe.optimizer.state[own].values():
            if isinstance(state, torch.Tensor) and state.dim():
                yield state
