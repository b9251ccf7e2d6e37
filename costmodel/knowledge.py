"""What the seconds of an estimate rest on: measured layers, or formulas, and how sure that is."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from costmodel.interpolation import Basis

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from costmodel.context import CostContext, LayerStep

__all__ = ["Known", "known_of"]

# 5 % and 95 % quantiles of measurement / estimate by what an estimate rests on: stated so that they
# cover the steps of benchmarks/profiler.py, wider for what is extrapolated or doubtful.
SURE: Final = {
    Basis.MEASURED: (0.92, 1.12),
    Basis.INTERPOLATED: (0.90, 1.15),
    Basis.DOUBTFUL: (0.80, 1.30),
    Basis.EXTRAPOLATED: (0.75, 1.40),
}
MOST: Final = 0.9  # of the layers' time that must be measured for an estimate to be called so


@dataclass(frozen=True, slots=True)
class Known:
    """Seconds of a step's layers by what they rest on; None where no profile is used."""

    seconds: Mapping[Basis, float] | None

    def level(self, otherwise: str) -> str:
        """``measured`` where nearly all of the layers' time is, else that of the calibration."""
        if not self.seconds:
            return otherwise
        formula = self.seconds.get(Basis.FORMULA, 0.0)
        return "measured" if formula <= (1 - MOST) * sum(self.seconds.values()) else otherwise

    def interval(self, formula: tuple[float, float], step_s: float) -> tuple[float, float]:
        """Quantiles of measurement / estimate: each part of the step with its own, the mean of
        their logarithms. What is no layer's time rests on formulas.
        """
        if not self.seconds or not step_s:
            return formula
        parts = {**SURE, Basis.FORMULA: formula}
        total = max(step_s, sum(self.seconds.values()))
        shares = {basis: own / total for basis, own in self.seconds.items()}
        shares[Basis.FORMULA] = shares.get(Basis.FORMULA, 0.0) + 1 - sum(shares.values())
        fast, slow = (
            math.exp(sum(share * math.log(parts[basis][end]) for basis, share in shares.items()))
            for end in (0, 1)
        )
        return fast, slow

    def notes(self) -> tuple[str, ...]:
        """What a reader should know of it: what is not simply measured."""
        if not self.seconds:
            return ()
        total = sum(self.seconds.values())
        words = {
            Basis.DOUBTFUL: "rests on doubtful points of the profile",
            Basis.EXTRAPOLATED: "lies beyond the points of the profile",
            Basis.FORMULA: "is of layers that the profile does not have",
        }
        return tuple(
            f"{100 * self.seconds[basis] / total:.0f} % of the layers' time {text}"
            for basis, text in words.items()
            if self.seconds.get(basis, 0.0) > 0
        )


def known_of(
    context: CostContext, steps: Sequence[tuple[LayerStep, int]], microbatches: int
) -> Known:
    """What the layers of a stage rest on."""
    if context.profile is None:
        return Known(None)
    seconds: dict[Basis, float] = defaultdict(float)
    for step, count in steps:
        passes = (step.forward, step.backward)
        computing = sum(own.compute_s + own.recompute_s + own.host_s for own in passes)
        seconds[step.basis] += count * (microbatches * computing + step.states.optimizer_s)
    return Known(dict(seconds))
