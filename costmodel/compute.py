"""Work on one device -> seconds, by a calibrated roofline."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, assert_never

from costmodel.work import AttentionCore, Gemm, Stream

if TYPE_CHECKING:
    from profiles.calibration import Efficiencies
    from profiles.cluster import DeviceSpec
    from profiles.training import Precision

__all__ = ["DeviceModel"]

# Output tiles (rows, columns) that GEMM libraries choose from, and how well each one keeps the
# tensor cores fed compared with the largest: a smaller tile reads more operand bytes per FLOP.
TILES = ((256, 128, 1.0), (128, 128, 0.96), (128, 64, 0.86), (64, 64, 0.72))

# Bytes that converting one element of an activation or a gradient moves: read in 16 bits, written
# in fewer by rows and by columns; for fp4 read once more, for the greatest of all (the recipes of
# Transformer Engine).
CONVERSION_BYTES = {"fp8": 2 + 1 + 1, "fp4": 2 + 2 + 0.5 + 0.5}
LEAST_KERNEL_S = 3e-6  # what the smallest kernel takes on the device
# Tensor cores want 16-bit rows of a multiple of 16 bytes (NVIDIA, "Matrix Multiplication Background
# User's Guide"); other heads were measured at about a quarter of the rate (BigScience, 2022: heads
# of 108 and 150 against those of 104 and 144).
TENSOR_CORE_MULTIPLE = 8
MISALIGNED = 0.25


@dataclass(frozen=True, slots=True)
class DeviceModel:
    """A device under a calibration and a precision. ``gradient_bytes``: what a GEMM moves for each
    element of a weight's gradient.
    """

    device: DeviceSpec
    efficiencies: Efficiencies
    precision: Precision
    gradient_bytes: int = 2

    def seconds(self, work: Gemm | AttentionCore | Stream) -> float:
        """Seconds that the device takes for one piece of work."""
        match work:
            case Gemm():
                return self._gemm(work)
            case AttentionCore():
                return self._attention(work)
            case Stream():
                return max(self.stream_seconds(work.bytes), work.kernels * LEAST_KERNEL_S)
            case _:
                assert_never(work)

    def stream_seconds(self, size: float) -> float:
        """Seconds to move ``size`` bytes through device memory."""
        return size / (self.device.memory_bytes_per_s * self.efficiencies.stream)

    def peak(self, key: str) -> float:
        """Sustained peak in FLOP/s for a data type."""
        return self.device.peak_flop_per_s[key] * self.device.sustained

    @property
    def highest_gemm_rate(self) -> float:
        """FLOP/s of a block's GEMM that none exceeds, whatever its shape."""
        own = self.efficiencies
        best = own.gemm * max(1.0, own.misaligned) * max(1.0, own.quantised)
        return self.peak(self.precision.gemm) * best

    def _gemm(self, work: Gemm) -> float:
        """max(FLOP / (peak * efficiency), bytes / bandwidth), at least the shortest kernel.

        Efficiency = gemm * k / (k + half_k) * the best tile's share of full waves over the SMs,
        and less where rows of operand or result are no multiple of 16 bytes.
        Ignores split-K and stream-K, which soften the last wave. Source of the wave term:
        NVIDIA, "Matrix Multiplication Background User's Guide".
        """
        own = self.efficiencies
        key = self.precision.gemm if work.block else self.precision.other
        shape = own.gemm * work.k / (work.k + own.gemm_half_k) * _waves(work, self.device.num_sms)
        if work.n % TENSOR_CORE_MULTIPLE or work.k % TENSOR_CORE_MULTIPLE:
            shape *= own.misaligned
        if key in CONVERSION_BYTES:
            shape *= own.quantised
        element = 1 if key in CONVERSION_BYTES else self.precision.bytes
        operands = work.groups * (work.m * work.k + work.k * work.n)
        written = self.gradient_bytes if work.weight_gradient else self.precision.bytes
        result = work.groups * work.m * work.n * written
        seconds = max(
            work.flop / (self.peak(key) * shape),
            self.stream_seconds(operands * element + result),
            LEAST_KERNEL_S,
        )
        if key in CONVERSION_BYTES and not work.weight_gradient:  # that finds both converted
            elements = work.groups * work.m * work.k
            seconds += self.stream_seconds(CONVERSION_BYTES[key] * elements)
        return seconds

    def _attention(self, work: AttentionCore) -> float:
        """Executed FLOP / rate; unfused kernels are also bound by the traffic of the scores."""
        own = self.efficiencies
        kernel = own.attention[work.kernel.value]
        part = kernel.backward if work.backward else kernel.forward
        executed = work.flop * work.visible / work.key_len
        seconds = executed / (self.peak(self.precision.other) * part)
        if work.head_dim % TENSOR_CORE_MULTIPLE or work.value_head_dim % TENSOR_CORE_MULTIPLE:
            seconds /= MISALIGNED
        if work.kernel.stores_scores:
            scores = work.batch * work.heads * work.query_len * work.key_len
            passes = 4 if work.backward else 2
            seconds = max(seconds, self.stream_seconds(passes * scores * self.precision.bytes))
        return max(seconds, LEAST_KERNEL_S)


@lru_cache(maxsize=65536)
def _waves(work: Gemm, num_sms: int) -> float:
    """Share of useful work in full waves of output tiles, for the best tile shape."""
    best = 0.0
    useful = work.m * work.n * work.groups
    for rows, columns, feed in TILES:
        tiles = math.ceil(work.m / rows) * math.ceil(work.n / columns) * work.groups
        waves = math.ceil(tiles / num_sms)
        share = useful / (waves * num_sms * rows * columns)
        best = max(best, feed * share)
    # few tiles are split along k, which fills the device at some cost
    splits = min(work.k // 512, num_sms)
    return max(best, min(0.6, best * max(1, splits)))
