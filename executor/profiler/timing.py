"""Samples -> seconds: the least of the undisturbed ones, with their spread.

Interference only ever adds time, so the least sample is the nearest to what the device needs;
medians of a busy machine move by a third, the least by a few per cent. On a CPU with one thread
seconds are those on the processor, and a sample is disturbed where the process was off it for
more than a twentieth of the time; disturbed samples are dropped unless fewer than three are left.
``spread`` is (median - least) / least of those that count. A figure is doubtful where it rests on
disturbed samples, or its spread is above a quarter.
"""

from __future__ import annotations

import math
import os
import time
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Final

from executor.clock import Clock

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

__all__ = [
    "METHOD",
    "WIDE",
    "Figure",
    "Sample",
    "figure_of",
    "merged",
    "sampled",
    "sampling_s",
    "told",
    "undisturbed",
]

WARM_UP: Final = 2
FEWEST: Final = 5  # samples
MOST: Final = 30
ENOUGH_S: Final = 0.4  # of sampling, once there are the fewest
PATIENCE: Final = 4  # times as long for undisturbed ones
LONG_S: Final = 1.0  # a sample that takes longer needs no more than three
UNDISTURBED: Final = 3
OFF_CPU: Final = 0.05
TICK_S: Final = 1e-4  # below it the two clocks say nothing of one another
WIDE: Final = 0.25
LINE: Final = 80  # more bytes than three numbers have
NANO: Final = 1e-9
METHOD: Final = (
    f"least of {FEWEST} to {MOST} samples after {WARM_UP} for warming up; events on a GPU, time "
    f"on the processor on a CPU; samples that were off it for more than {OFF_CPU:.0%} dropped; "
    f"doubtful where the median is more than {WIDE:.0%} above the least"
)


@dataclass(frozen=True, slots=True)
class Sample:
    """Seconds by what was done, and whether something else ran meanwhile."""

    seconds: dict[str, float]
    disturbed: bool = False

    @property
    def total_s(self) -> float:
        """All of it."""
        return sum(self.seconds.values())


@dataclass(frozen=True, slots=True)
class Figure:
    """What samples come to."""

    seconds: dict[str, float]
    spread: float
    doubtful: bool


def told(value: float, digits: int = 5) -> float:
    """With the digits that a measurement has."""
    return float(f"{value:.{digits}g}")


def undisturbed() -> Callable[[], float]:
    """A clock in seconds, for a thread with a core of its own that also waits for other ranks: it
    stands still while the thread is ready to run and another has the core. The wall's where the
    kernel, no Linux, does not tell.
    """
    try:
        file = os.open("/proc/thread-self/schedstat", os.O_RDONLY)
    except OSError:
        return time.perf_counter

    def seconds() -> float:
        _, delayed_ns, _ = os.pread(file, LINE, 0).split()
        return time.perf_counter() - int(delayed_ns) * NANO

    return seconds


def figure_of(samples: list[Sample]) -> Figure:
    """The figure of samples of the same work."""
    quiet = [sample for sample in samples if not sample.disturbed]
    counted = quiet if len(quiet) >= UNDISTURBED else samples
    totals = [sample.total_s for sample in counted]
    spread = median(totals) / min(totals) - 1 if min(totals) else 0.0
    least = {what: min(sample.seconds[what] for sample in counted) for what in counted[0].seconds}
    return Figure(least, spread, doubtful=counted is not quiet or spread > WIDE)


def merged(figures: list[Figure]) -> Figure:
    """The figure of several rounds: the least of each part. Doubtful where all rounds are, or where
    the best two are further apart than samples may be.
    """
    totals = sorted(sum(figure.seconds.values()) for figure in figures)
    apart = len(totals) > 1 and totals[1] > (1 + WIDE) * totals[0]
    return Figure(
        {what: min(figure.seconds[what] for figure in figures) for what in figures[0].seconds},
        min(figure.spread for figure in figures),
        doubtful=apart or all(figure.doubtful for figure in figures),
    )


def sampled(work: Callable[[Clock], None], device: torch.device) -> list[Sample]:
    """Samples of ``work``, which tells the clock what it does."""
    clock = Clock(device, counter=time.process_time)
    on_cpu = device.type == "cpu"
    samples: list[Sample] = []
    warm, started_s = WARM_UP, time.perf_counter()
    while True:
        began_s, busy_s = time.perf_counter(), time.process_time()
        work(clock)
        seconds = clock.take()  # waits for the device
        wall_s, busy_s = time.perf_counter() - began_s, time.process_time() - busy_s
        if warm:
            warm = 0 if wall_s > LONG_S else warm - 1
            started_s = time.perf_counter()
            continue
        off_s = wall_s - busy_s
        samples.append(Sample(seconds, on_cpu and off_s > OFF_CPU * wall_s + TICK_S))
        if _enough(samples, time.perf_counter() - started_s):
            return samples


def sampling_s(sample_s: float) -> float:
    """Seconds that ``sampled`` takes for work of ``sample_s`` that nothing disturbs."""
    if sample_s > LONG_S:
        return (1 + UNDISTURBED) * sample_s
    count = min(MOST, max(FEWEST, math.ceil(ENOUGH_S / max(sample_s, NANO))))
    return (WARM_UP + count) * sample_s


def _enough(samples: list[Sample], spent_s: float) -> bool:
    if len(samples) >= MOST:
        return True
    quiet = sum(not sample.disturbed for sample in samples)
    if samples[-1].total_s > LONG_S:
        return len(samples) >= UNDISTURBED
    if len(samples) < FEWEST or spent_s < ENOUGH_S:
        return False
    return quiet >= UNDISTURBED or spent_s >= PATIENCE * ENOUGH_S
