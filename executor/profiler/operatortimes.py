"""Times of plain operators, from which layers that were not measured are predicted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.nn import functional

from executor.profiler.layertimes import BACKWARD, FORWARD
from executor.profiler.timing import sampled

if TYPE_CHECKING:
    from collections.abc import Callable

    from executor.clock import Clock
    from executor.profiler.timing import Sample

__all__ = ["DTYPES", "OperatorPoint", "operator_points", "operator_samples"]

DTYPES: Final = {"fp32": torch.float32, "bf16": torch.bfloat16}
SQUARES: Final = (128, 256, 512, 1024, 2048, 4096, 8192)
INNER: Final = (64, 128, 256, 512, 2048, 8192)  # of GEMMs whose outer sizes are ROWS
ROWS: Final = 1024
HEADS: Final = (64, 128)  # sizes of a head
LENGTHS: Final = (256, 1024, 4096)
ELEMENTS: Final = (2**14, 2**18, 2**22, 2**26)
MOST_FLOP: Final = {"cpu": 2e10, "cuda": 2e13}  # of one sample


@dataclass(frozen=True, slots=True)
class OperatorPoint:
    """An operator of a shape, as ``OperatorTime`` says it."""

    operator: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.operator} {' x '.join(str(size) for size in self.shape)}"

    @property
    def flop(self) -> float:
        """Of the pass that is measured, about."""
        if self.operator == "gemm":
            m, n, k = self.shape
            return 2.0 * m * n * k
        if self.operator == "attention":
            batch, heads, length, size = self.shape
            return 7.0 * batch * heads * length**2 * size
        return float(self.shape[0])


def operator_points(device_type: str) -> list[OperatorPoint]:
    """The operators that are measured, small ones first."""
    gemms = [(size, size, size) for size in SQUARES] + [(ROWS, ROWS, k) for k in INNER]
    found = [OperatorPoint("gemm", shape) for shape in gemms]
    found += [
        OperatorPoint("attention", (1, 8, length, size)) for length in LENGTHS for size in HEADS
    ]
    found += [OperatorPoint("stream", (count,)) for count in ELEMENTS]
    most = MOST_FLOP[device_type]
    return sorted((p for p in found if p.flop <= most), key=lambda p: (p.flop, str(p)))


def operator_samples(point: OperatorPoint, precision: str, device: torch.device) -> list[Sample]:
    """Samples of an operator, of attention forward and backward."""
    how: dict[str, Any] = {"dtype": DTYPES[precision], "device": device}
    if point.operator == "gemm":
        m, n, inner = point.shape
        x, weight, y = (torch.randn(*own, **how) for own in ((m, inner), (n, inner), (m, n)))
        return _repeated(lambda: torch.matmul(x, weight.t(), out=y), device)
    if point.operator == "stream":
        x, y, out = (torch.randn(point.shape, **how) for _ in range(3))
        return _repeated(lambda: torch.add(x, y, out=out), device)
    q, k, v, gradient = (torch.randn(point.shape, **how) for _ in range(4))
    for each in (q, k, v):
        each.requires_grad_()

    def both(clock: Clock) -> None:
        with clock.busy(FORWARD):
            context = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        with clock.busy(BACKWARD):
            torch.autograd.grad(context, (q, k, v), gradient)

    return sampled(both, device)


def _repeated(call: Callable[[], object], device: torch.device) -> list[Sample]:
    def once(clock: Clock) -> None:
        with clock.busy(FORWARD):
            call()

    return sampled(once, device)
