"""Measured peaks and out-of-memory labels -> the allocator's reserve and the spread of memory.

Two numbers of a stack are chosen by maximum likelihood on a grid: ``reserve`` (allocator and
fragmentation, part of what comes and goes) and ``memory_sigma`` (standard deviation of the
logarithm). A run that worked or failed has the likelihood of a normal distribution of
log(usable / device total); a measured peak that of its own error. Some labels are wrong for
reasons of their own, so each has at least a small likelihood.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import product
from statistics import NormalDist
from typing import TYPE_CHECKING, Final, Self

import numpy as np

from costmodel.estimate import LayoutCost
from profiles.units import GB, GIB

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from costmodel.context import Memo
    from costmodel.replay import Replay
    from profiles.calibration import Calibration

__all__ = ["LEAST_EVIDENCE", "Evidence", "fit_memory"]

LEAST_EVIDENCE: Final = 8
RESERVES: Final = tuple(0.02 * step for step in range(31))
SIGMAS: Final = (0.03, 0.04, 0.05, 0.06, 0.08, 0.10, 0.13, 0.16, 0.20, 0.25, 0.30)
USUAL_RESERVE: Final = (0.12, 0.08)  # mean and standard deviation before any evidence
USUAL_SIGMA: Final = (math.log(0.08), 0.5)
WRONG: Final = 0.03
NORMAL: Final = NormalDist()
_PHI: Final = np.vectorize(NORMAL.cdf, otypes=[float])


@dataclass(frozen=True, slots=True)
class Evidence:
    """What one run says of memory: bytes allocated (estimated), of them those that come and go,
    outside the allocator, and usable;
    whether it worked (None: nothing was out of memory in its sweep), and its measured peak in
    bytes with the part of reserve and context that this peak contains.
    """

    allocated: float
    passing: float
    outside: float
    usable: float
    worked: bool | None
    peak: float | None
    with_reserve: float
    with_outside: float

    @classmethod
    def of(cls, each: Replay, calibration: Calibration, memo: Memo) -> Self | None:
        """The evidence of a run; None if it has none."""
        run = each.run
        if run.outcome not in ("ok", "oom") or (run.outcome == "ok" and not run.gpu_mem_gb):
            return None
        cost = LayoutCost(each.context(calibration, memo), each.layout)
        full = cost.fullest
        basis = run.memory_basis
        in_gb = basis == "device" or "GB" in basis
        unit = GB if in_gb else GIB
        return cls(
            allocated=full.allocated_bytes,
            passing=full.activations + full.working + full.buffers,
            outside=full.context,
            usable=cost.context.usable_bytes,
            worked=run.outcome == "ok",
            peak=run.peak_mem_gib * unit if run.peak_mem_gib else None,
            with_reserve=float(basis in ("device", "reserved")),
            with_outside=float(basis == "device"),
        )


def fit_memory(evidence: Sequence[Evidence]) -> tuple[float, float]:
    """The likeliest (reserve, memory_sigma)."""
    columns = {
        name: np.array([getattr(each, name) for each in evidence], dtype=float)
        for name in (
            "allocated",
            "passing",
            "outside",
            "usable",
            "peak",
            "with_reserve",
            "with_outside",
        )
    }
    worked = np.array([bool(each.worked) for each in evidence])
    labelled = np.full(len(evidence), not worked.all())
    return max(
        product(RESERVES, SIGMAS),
        key=lambda pair: _log_likelihood(pair[0], pair[1], columns, worked, labelled),
    )


def _log_likelihood(
    reserve: float,
    sigma: float,
    columns: dict[str, NDArray[np.float64]],
    worked: NDArray[np.bool_],
    labelled: NDArray[np.bool_],
) -> float:
    mean, deviation = USUAL_RESERVE
    total = -(((reserve - mean) / deviation) ** 2) / 2
    mean, deviation = USUAL_SIGMA
    total -= ((math.log(sigma) - mean) / deviation) ** 2 / 2
    device = columns["allocated"] + reserve * columns["passing"] + columns["outside"]
    if labelled.any():
        fits = _PHI(np.log(columns["usable"] / device) / sigma)
        right = np.where(worked, fits, 1 - fits)
        total += float(np.log(WRONG / 2 + (1 - WRONG) * right).sum())
    seen = ~np.isnan(columns["peak"])
    if seen.any():
        estimated = (
            columns["allocated"]
            + reserve * columns["passing"] * columns["with_reserve"]
            + columns["outside"] * columns["with_outside"]
        )
        error = np.log(columns["peak"][seen] / estimated[seen]) / sigma
        density = np.exp(-(error**2) / 2) / sigma
        total += float(np.log(WRONG + (1 - WRONG) * density).sum())
    return total
