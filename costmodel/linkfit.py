"""Measured collectives -> what the links of a device really give.

Four numbers are fitted to the collectives of one device on nodes of one kind: ``gpu_link`` and
``nic`` (see ``profiles.calibration``); ``exchange``, the rate of an all-to-all between GPUs over
that of rings, since it goes through all links of a mesh at once and rings only through some; and
``start_s``, the time that every measurement contains beside the collective itself: launch, and
synchronisation of the program that measured. The fit
minimises the sum over collectives of rho(log estimate / measurement) plus the squared distances
from what is usual; rho is quadratic near 0 and linear beyond (pseudo Huber).
"""

from __future__ import annotations

import math
from dataclasses import astuple, dataclass, replace
from typing import TYPE_CHECKING, Final

from costmodel.collectives import collective_seconds
from costmodel.work import CollectiveKind

if TYPE_CHECKING:
    from collections.abc import Sequence

    from profiles.calibration import Efficiencies
    from profiles.topology import GroupLink

__all__ = ["LinkFit", "MeasuredCollective", "fit_links"]

NOISE: Final = 0.05  # of a good measurement, in the logarithm
USUAL_START_S: Final = 2e-5
SPREADS: Final = (0.3, 1.0, 0.4, 1.0)  # of the four in their order, in the logarithm
LOW: Final = (0.02, 0.005, 0.1, 1e-7)
HIGH: Final = (1.0, 1.0, 10.0, 0.1)
FIRST_STEP: Final = 0.4
LAST_STEP: Final = 0.005


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredCollective:
    """One collective of ``size`` bytes (as ``costmodel.work.Collective`` counts them) in a group,
    and the seconds it took.
    """

    kind: CollectiveKind
    size: int
    link: GroupLink
    seconds: float


@dataclass(frozen=True, slots=True)
class LinkFit:
    """What was fitted; see the module."""

    gpu_link: float
    nic: float
    exchange: float
    start_s: float

    def seconds(self, measured: Sequence[MeasuredCollective], own: Efficiencies) -> list[float]:
        """Estimates of measured collectives."""
        rings = replace(own, gpu_link=self.gpu_link, nic=self.nic)
        exchange = replace(rings, gpu_link=self.gpu_link * self.exchange)
        return [
            self.start_s
            + collective_seconds(
                each.kind,
                each.size,
                each.link,
                exchange if each.kind is CollectiveKind.ALL_TO_ALL else rings,
            )
            for each in measured
        ]


def fit_links(measured: Sequence[MeasuredCollective], own: Efficiencies) -> LinkFit:
    """The likeliest links; those in ``own`` where nothing was measured. A search along one
    parameter after the other, in steps that halve.
    """
    usual = (own.gpu_link, own.nic, 1.0, USUAL_START_S)
    now: tuple[float, ...] = usual
    step = FIRST_STEP
    least = _cost(now, usual, measured, own)
    while step > LAST_STEP:
        before = least
        for place in range(len(usual)):
            for factor in (math.exp(step), math.exp(-step)):
                value = min(HIGH[place], max(LOW[place], now[place] * factor))
                tried = (*now[:place], value, *now[place + 1 :])
                cost = _cost(tried, usual, measured, own)
                if cost < least:
                    now, least = tried, cost
                    break
        if least == before:
            step /= 2
    gpu_link, nic, exchange, start_s = now
    return LinkFit(gpu_link, nic, exchange, start_s)


def _cost(
    values: tuple[float, ...],
    usual: tuple[float, ...],
    measured: Sequence[MeasuredCollective],
    own: Efficiencies,
) -> float:
    found = LinkFit(*values)
    far = sum(
        (math.log(value / centre) / spread) ** 2
        for value, centre, spread in zip(astuple(found), usual, SPREADS, strict=True)
    )
    pairs = zip(found.seconds(measured, own), measured, strict=True)
    errors = (math.log(seconds / each.seconds) / NOISE for seconds, each in pairs)
    return far + sum(2 * (math.sqrt(1 + error**2) - 1) for error in errors)
