"""Intervals of step times: how far measurements lie from estimates, by what a calibration has seen.

log(measurement / estimate) of a run has two parts: what its source differs in from others of the
device, which all runs of the source share, and what the run differs in under a stack that is known.

The second has a scale of its own in every run (``relative_scale``), in which residuals of different
runs are alike. So a stack's residuals are divided by their scales before their quantiles are taken,
and an interval is multiplied by that of the run it is made for: conformal prediction with a
normalised score (Papadopoulos, Gammerman and Vovk 2008), quantiles across models left out (Barber
et al. 2021).

What sources differ in, and what a stack of few models may, is estimated from groups of residuals
(sources, or models of a stack), each group alike, beside a usual scale that counts as a few groups.
With few groups the scale itself is uncertain, so the ends are those of Student's t.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from costmodel.stagecost import StepSplit
    from profiles.calibration import Efficiencies, Seen

__all__ = [
    "Ends",
    "Scale",
    "interval_of",
    "known_stack",
    "octaves_beyond",
    "of_known_stack",
    "of_unseen_source",
    "relative_scale",
]

# Standard deviation of the logarithm of a run of a model left out: of a step that is compute alone,
# of its exposed communication for itself, of routing, and of each octave by which parameters or
# sequence lie beyond those that the calibration has seen. By maximum likelihood (Student's t with 4
# degrees of freedom, each source's models by the root of their runs), routing by the least interval
# score (Gneiting and Raftery 2007), each source alike. Chosen without any one source they are the
# same within a quarter, routing between 0.05 and 0.12. Host time, degrees, nodes, precision,
# waiting and memory add nothing that is determined once these are there.
COMPUTE: Final = 0.041
COMMUNICATION: Final = 0.415
EXPERTS: Final = 0.08
OCTAVE: Final = 0.027
USUAL_RUN: Final = 0.06  # of the run in the middle of those published

USUAL_BETWEEN: Final = 0.22  # standard deviation of what a source differs in from its device's
USUAL_SHIFT: Final = 0.1  # by which a source is slower than the middle of others of its device
USUAL_WITHIN: Final = 0.032  # of what a usual run differs in under a stack that is known
GROUPS_BETWEEN: Final = 3  # that the usual scales stand for
GROUPS_SHIFT: Final = 8
GROUPS_WITHIN: Final = 3
NORMAL_95: Final = 1.645
ENDS: Final = (0.05, 0.95)


def octaves_beyond(seen: Seen | None, params: int, seq_len: int) -> float:
    """How far a model's parameters and its sequences lie outside of what was seen, together."""
    if seen is None:
        return 0.0
    sizes = ((max(1, params), seen.params), (seq_len, seen.seq_len))
    outside = (max(least / size, size / most, 1.0) for size, (least, most) in sizes)
    return math.hypot(*map(math.log2, outside))


def relative_scale(split: StepSplit, *, experts: bool, beyond: float) -> float:
    """Standard deviation of what a run's time differs in from its estimate, over a usual run's: the
    parts of the step of which less is known add up like independent errors. ``beyond``: octaves
    by which the run lies outside of what its calibration has seen.
    """
    parts = (
        COMPUTE,
        COMMUNICATION * split.traffic_s / split.total_s,
        EXPERTS if experts else 0.0,
        OCTAVE * beyond,
    )
    return math.hypot(*parts) / USUAL_RUN


def interval_of(own: Efficiencies, scale: float) -> tuple[float, float]:
    """Quantiles of measurement / estimate for a run of that scale: of the variance behind the
    calibration's, the part that varies goes with the square of the scale.
    """
    wider = math.sqrt(1 + own.step_time_varies * (scale**2 - 1))
    fast, slow = own.step_time_90
    return fast**wider, slow**wider


class Ends(NamedTuple):
    """Both ends of an interval for a usual run, in the logarithm, and the part of the variance
    behind them that is the run's own.
    """

    fast: float
    slow: float
    varies: float


class Scale(NamedTuple):
    """A standard deviation in the logarithm, how many groups it is known from, and what from."""

    sigma: float
    groups: int
    centre: float = 0.0

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

    @property
    def varies(self) -> float:
        """The part of the variance that is a run's own."""
        return min(1.0, (USUAL_WITHIN / self.sigma) ** 2)

    @property
    def ends(self) -> Ends:
        """The interval that reaches as far on both sides of the centre."""
        return Ends(self.centre - self.reach, self.centre + self.reach, self.varies)


def of_unseen_source(sources: Sequence[NDArray[np.float64]]) -> Scale:
    """For a source never seen, from residuals of others, each left out as a whole. Software can be
    slower than what tuned one reaches by any factor and faster by little only: hence the shift.
    """
    middles = sum(float(np.median(own)) for own in sources)
    centre = (GROUPS_SHIFT * USUAL_SHIFT + middles) / (GROUPS_SHIFT + len(sources))
    moments = [(np.quantile(np.abs(own - centre), 0.9) / NORMAL_95) ** 2 for own in sources]
    groups = GROUPS_BETWEEN + len(moments)
    sigma = math.sqrt((GROUPS_BETWEEN * USUAL_BETWEEN**2 + sum(moments)) / groups)
    return Scale(sigma, groups, centre)


def known_stack(num_runs: int, source: Scale) -> Scale:
    """For a stack known by so many runs: of what its source may differ in, little is left."""
    sigma = math.hypot(USUAL_WITHIN, source.sigma / math.sqrt(1 + num_runs))
    return Scale(sigma, GROUPS_WITHIN)


def of_known_stack(sources: Sequence[Sequence[NDArray[np.float64]]], source: Scale) -> Ends:
    """For another model of a stack, from residuals of its sources' models over their scales, each
    model left out as a whole: their quantiles, drawn towards the usual ones where models are few.
    That a few models were all too fast says little of the next one's side: their quantiles are as
    far up as down, the more the fewer they are.
    """
    models = [own for each in sources for own in each]
    usual = known_stack(sum(map(len, models)), source)
    if not models:
        return usual.ends
    weights = [np.full(len(own), len(own) ** -0.5 / len(each)) for each in sources for own in each]
    values, weight = np.concatenate(models), np.concatenate(weights)
    wider = Scale(1 / NORMAL_95, GROUPS_WITHIN + len(models)).reach
    share = len(models) / (len(models) + GROUPS_WITHIN)
    far = _quantiles(np.abs(values), weight, (ENDS[1] - ENDS[0],))
    both_ways = np.concatenate([-far, far])
    found = share * _quantiles(values, weight, ENDS) + (1 - share) * both_ways
    drawn = share * wider * found + (1 - share) * np.array([-usual.reach, usual.reach])
    return Ends(float(drawn[0]), float(drawn[1]), varies=share + (1 - share) * usual.varies)


def _quantiles(
    values: NDArray[np.float64], weights: NDArray[np.float64], parts: tuple[float, ...]
) -> NDArray[np.float64]:
    order = np.argsort(values)
    below = (np.cumsum(weights[order]) - weights[order] / 2) / weights.sum()
    return np.interp(parts, below, values[order])
