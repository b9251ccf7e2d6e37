"""Estimated steps around a calibration as a function of its parameters.

A step is a sum of work times price along its critical path, so it is nearly linear in *prices*, the
inverses of efficiencies: f * (1 + sum_j share_j * (price_j / price_j now - 1)), whose shares come
from one finite difference each.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

import numpy as np

from costmodel.context import Memo
from costmodel.parameters import changed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from costmodel.parameters import Parameter
    from costmodel.replay import Replay
    from profiles.calibration import Calibration

__all__ = ["LocalModel", "local_model", "log_measured", "log_steps"]

STEP: Final = 0.04  # of the finite differences


@dataclass(frozen=True, slots=True)
class LocalModel:
    """Estimated steps around one calibration: their logarithms there, shares of prices
    ``[run, parameter]``, and the sign with which each price follows its parameter.
    """

    calibration: Calibration
    parameters: tuple[Parameter, ...]
    log_s: NDArray[np.float64]
    shares: NDArray[np.float64]
    signs: NDArray[np.float64]

    @property
    def _linear(self) -> NDArray[np.bool_]:
        return np.array([parameter.linear for parameter in self.parameters])

    def at(self, change: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Logarithms of the steps after a change of the parameters, and their derivatives."""
        prices = np.where(self._linear, change, np.expm1(self.signs * change))
        slopes = np.where(self._linear, 1.0, self.signs * np.exp(self.signs * change))
        factor = np.maximum(1 + self.shares @ prices, 0.05)
        return self.log_s + np.log(factor), self.shares * slopes / factor[:, None]

    def of(self, rows: NDArray[np.bool_]) -> LocalModel:
        """The model of some of the runs."""
        return replace(self, log_s=self.log_s[rows], shares=self.shares[rows])


def log_steps(replays: Sequence[Replay], calibration: Calibration) -> NDArray[np.float64]:
    """Logarithms of the estimated steps."""
    memo = Memo()
    return np.log([each.step_s(calibration, memo) for each in replays])


def log_measured(replays: Sequence[Replay]) -> NDArray[np.float64]:
    """Logarithms of the measured steps."""
    return np.log([each.run.step_time_s or math.nan for each in replays])


def local_model(
    replays: Sequence[Replay],
    calibration: Calibration,
    parameters: tuple[Parameter, ...],
    log_s: NDArray[np.float64] | None = None,
    like: LocalModel | None = None,
) -> LocalModel:
    """The model of some runs around a calibration, by one finite difference a parameter: of the
    runs that depend on it in the model ``like``, where there is one.
    """
    here = log_steps(replays, calibration) if log_s is None else log_s
    shares = np.zeros((len(replays), len(parameters)))
    signs = np.ones(len(parameters))
    for j, parameter in enumerate(parameters):
        _, most = parameter.bounds(calibration.efficiencies)
        step = STEP if most >= STEP else -STEP
        theta = np.zeros(len(parameters))
        theta[j] = step
        rows = np.arange(len(replays)) if like is None else np.flatnonzero(like.shares[:, j])
        moved = np.zeros(len(replays))
        there = log_steps([replays[int(i)] for i in rows], changed(calibration, parameters, theta))
        moved[rows] = np.expm1(there - here[rows])
        if parameter.linear:
            shares[:, j] = moved / step
        else:
            signs[j] = -1.0 if moved.sum() * step < 0 else 1.0
            shares[:, j] = moved / np.expm1(signs[j] * step)
    return LocalModel(calibration, parameters, here, shares, signs)
