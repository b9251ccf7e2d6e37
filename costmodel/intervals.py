"""Intervals of step times: how far measurements lie from estimates, by what a calibration has seen.

log(measurement / estimate) of a run has two parts: what its source differs in from others of the
device, which all runs of the source share, and what its model differs in under a stack that is
known. The scale of either is estimated from groups of residuals (sources, or models of a stack),
each group alike, beside a usual scale that counts as a few groups. With few groups the scale itself
is uncertain, so the ends are those of Student's t.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

__all__ = ["Scale", "known_stack", "of_known_stack", "of_unseen_source"]

USUAL_BETWEEN: Final = 0.22  # standard deviation of what a source differs in from its device's
USUAL_WITHIN: Final = 0.05  # of what a model differs in under a stack that is known
GROUPS_BETWEEN: Final = 3  # that the usual scales stand for
GROUPS_WITHIN: Final = 3
NORMAL_95: Final = 1.645
ENDS: Final = (0.05, 0.95)


class Scale(NamedTuple):
    """A standard deviation in the logarithm, and how many groups it is known from."""

    sigma: float
    groups: int

    @classmethod
    def reaching(cls, reach: float) -> Scale:
        """The scale of an interval that reaches so far."""
        return cls(reach / cls(1.0, GROUPS_BETWEEN).reach, GROUPS_BETWEEN)

    @property
    def reach(self) -> float:
        """From 0 to the 95 % quantile of Student's t (Abramowitz and Stegun 26.7.5)."""
        z, df = NORMAL_95, self.groups
        wider = 1 + (z**2 + 1) / (4 * df) + (5 * z**4 + 16 * z**2 + 3) / (96 * df**2)
        return z * wider * self.sigma


def of_unseen_source(sources: Sequence[NDArray[np.float64]]) -> Scale:
    """For a source never seen, from residuals of others, each left out as a whole."""
    moments = [(np.quantile(np.abs(own), 0.9) / NORMAL_95) ** 2 for own in sources]
    groups = GROUPS_BETWEEN + len(moments)
    sigma = math.sqrt((GROUPS_BETWEEN * USUAL_BETWEEN**2 + sum(moments)) / groups)
    return Scale(sigma, groups)


def known_stack(num_runs: int, source: Scale) -> Scale:
    """For a stack known by so many runs: of what its source may differ in, little is left."""
    sigma = math.hypot(USUAL_WITHIN, source.sigma / math.sqrt(1 + num_runs))
    return Scale(sigma, GROUPS_WITHIN)


def of_known_stack(models: Sequence[NDArray[np.float64]], source: Scale) -> NDArray[np.float64]:
    """Both ends of the logarithm for another model of a stack, from residuals of its models, each
    left out as a whole: their quantiles, a model counting by the root of its runs, drawn towards
    the usual ones where models are few. That a few models were all too fast says little of
    the next one's side: their quantiles are as far up as down, the more the fewer they are.
    """
    reach = known_stack(sum(map(len, models)), source).reach
    ends = np.array([-reach, reach])
    if not models:
        return ends
    wider = Scale(1 / NORMAL_95, GROUPS_WITHIN + len(models)).reach
    share = len(models) / (len(models) + GROUPS_WITHIN)
    far = _quantiles([np.abs(own) for own in models], (ENDS[1] - ENDS[0],))
    both_ways = np.concatenate([-far, far])
    found = share * _quantiles(models, ENDS) + (1 - share) * both_ways
    drawn: NDArray[np.float64] = share * wider * found + (1 - share) * ends
    return drawn


def _quantiles(
    groups: Sequence[NDArray[np.float64]], parts: tuple[float, ...]
) -> NDArray[np.float64]:
    values = np.concatenate(groups)
    weights = np.concatenate([np.full(len(own), len(own) ** -0.5) for own in groups])
    order = np.argsort(values)
    below = (np.cumsum(weights[order]) - weights[order] / 2) / weights.sum()
    return np.interp(parts, below, values[order])
