"""What the seconds of an estimate rest on: measured layers and links, or formulas, and how sure
that is.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from costmodel.interpolation import Basis

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from costmodel.context import CostContext
    from costmodel.layerstep import LayerStep
    from costmodel.measuredlinks import LinkTimes

__all__ = ["Known", "known_of"]

# 5 % and 95 % quantiles of measurement / estimate by what an estimate rests on: stated so that they
# cover the steps of benchmarks/profiler.py and profiler_links.py, wider for what is extrapolated or
# doubtful.
SURE: Final = {
    Basis.MEASURED: (0.92, 1.12),
    Basis.INTERPOLATED: (0.90, 1.15),
    Basis.DOUBTFUL: (0.80, 1.30),
    Basis.EXTRAPOLATED: (0.75, 1.40),
}
MOST: Final = 0.9  # of the layers' time that must be measured for an estimate to be called so


@dataclass(frozen=True, slots=True)
class Known:
    """Seconds of a step's layers, and of its exposed communication, by what they rest on; no layers
    where no profile is used.
    """

    layers: Mapping[Basis, float] = field(default_factory=dict)
    traffic: Mapping[Basis, float] = field(default_factory=dict)

    @property
    def seconds(self) -> dict[Basis, float]:
        """Both together."""
        return {
            basis: self.layers.get(basis, 0.0) + self.traffic.get(basis, 0.0)
            for basis in {**self.layers, **self.traffic}
        }

    def level(self, otherwise: str) -> str:
        """``measured`` where nearly all of the time is, else that of the calibration."""
        if not self.layers:
            return otherwise
        seconds = self.seconds
        formula = seconds.get(Basis.FORMULA, 0.0)
        return "measured" if formula <= (1 - MOST) * sum(seconds.values()) else otherwise

    def interval(self, formula: tuple[float, float], step_s: float) -> tuple[float, float]:
        """Quantiles of measurement / estimate: each part of the step with its own, the mean of
        their logarithms. What is neither a layer's nor traffic's time rests on formulas.
        """
        if not self.layers or not step_s:
            return formula
        parts = {**SURE, Basis.FORMULA: formula}
        seconds = self.seconds
        total = max(step_s, sum(seconds.values()))
        shares = {basis: own / total for basis, own in seconds.items()}
        shares[Basis.FORMULA] = shares.get(Basis.FORMULA, 0.0) + 1 - sum(shares.values())
        fast, slow = (
            math.exp(sum(share * math.log(parts[basis][end]) for basis, share in shares.items()))
            for end in (0, 1)
        )
        return fast, slow

    def notes(self) -> tuple[str, ...]:
        """What a reader should know of it: what is not simply measured."""
        return (
            *_notes(self.layers, "the layers' time", "of layers that the profile does not have"),
            *_notes(self.traffic, "the communication", "of groups that no profile has measured"),
        )


def _notes(seconds: Mapping[Basis, float], what: str, unknown: str) -> Iterator[str]:
    total = sum(seconds.values())
    words = {
        Basis.DOUBTFUL: "rests on doubtful points of the profile",
        Basis.EXTRAPOLATED: "lies beyond the points of the profile",
        Basis.FORMULA: f"is {unknown}",
    }
    if total and seconds.get(Basis.FORMULA, 0.0) < total:  # else nothing of the kind is measured
        for basis, text in words.items():
            if seconds.get(basis, 0.0) > 0:
                yield f"{100 * seconds[basis] / total:.0f} % of {what} {text}"


def known_of(
    context: CostContext,
    steps: Sequence[tuple[LayerStep, int]],
    microbatches: int,
    *,
    traffic_s: float,
    links: LinkTimes | None,
) -> Known:
    """What the layers of a stage rest on, and ``traffic_s`` of exposed communication, of which
    ``links`` was asked.
    """
    if context.profile is None:
        return Known()
    seconds: dict[Basis, float] = defaultdict(float)
    for step, count in steps:
        passes = (step.forward, step.backward)
        computing = sum(own.compute_s + own.recompute_s + own.host_s for own in passes)
        seconds[step.basis] += count * (microbatches * computing + step.states.optimizer_s)
    shares = {Basis.FORMULA: 1.0} if links is None else links.shares()
    traffic = {basis: share * traffic_s for basis, share in shares.items() if traffic_s > 0}
    return Known(dict(seconds), traffic)
