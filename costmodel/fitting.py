"""Measured runs -> the efficiencies of a device and a software stack.

The fit minimises, over the parameters theta (logarithms of efficiencies; overlaps as they are),

    sum_i rho((log t_i - log f_i(theta)) / NOISE) + sum_j ((theta_j - prior_j) / spread_j)^2

where f_i is the estimated step of run i and rho is quadratic near 0 and linear beyond (pseudo
Huber), so that single odd runs do not steer. Every parameter has bounds with a physical meaning.
f is expensive, so its local model is minimised (``costmodel.localmodel``), the true f evaluated
there, and so on: a few rounds suffice.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

import numpy as np

from costmodel.localmodel import LocalModel, local_model, log_measured, log_steps
from costmodel.parameters import changed, relevant

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from costmodel.replay import Replay
    from profiles.calibration import Calibration

__all__ = ["LEAST_RUNS", "Fit", "fit", "middle", "refit", "solve"]

LEAST_RUNS: Final = 3
NOISE: Final = 0.03  # of a good measurement, in the logarithm
ENOUGH: Final = 300  # runs beyond which more of them no longer outweigh the prior further
ROUNDS: Final = 4
REACH: Final = 0.8  # how far one round may go, in the logarithm
SETTLED: Final = 0.02
DETERMINED: Final = 0.8  # of the prior's spread: what remains when runs say something


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """What a fit found. ``residuals``: log(estimate / measurement) of the runs in their order.
    ``left``: what remains of each parameter's prior spread (1: the runs say nothing about it).
    """

    calibration: Calibration
    residuals: tuple[float, ...]
    left: dict[str, float]
    model: LocalModel

    @property
    def undetermined(self) -> tuple[str, ...]:
        """Parameters that keep the prior, for want of runs that tell them apart."""
        return tuple(name for name, part in self.left.items() if part > DETERMINED)


def fit(replays: Sequence[Replay], prior: Calibration, *, tightness: float = 1.0) -> Fit:
    """Fit the efficiencies to runs with a measured step. ``tightness`` below 1 keeps them nearer
    to the prior.
    """
    parameters = relevant(replays)
    measured = log_measured(replays)
    centre = np.zeros(len(parameters))  # of the prior, seen from where the fit stands
    spread = np.array([parameter.spread for parameter in parameters]) * tightness
    now, log_s = prior, log_steps(replays, prior)
    model = local_model(replays, now, parameters, log_s)
    for _ in range(ROUNDS):
        change = solve(model, measured, centre, spread)
        before = _cost(measured - log_s, -centre / spread)
        for _ in range(4):
            moved = changed(now, parameters, change)
            after_s = log_steps(replays, moved)
            if _cost(measured - after_s, (change - centre) / spread) < before:
                break
            change = change / 3
        else:
            break
        now, log_s, centre = moved, after_s, centre - change
        settled = np.abs(change).max() < SETTLED
        model = replace(model, calibration=now, log_s=log_s)
        if settled:
            break
        model = local_model(replays, now, parameters, log_s, like=model)
    left = _left(model, measured, spread)
    return Fit(
        calibration=now,
        residuals=tuple((log_s - measured).tolist()),
        left=dict(zip((p.name for p in parameters), left.tolist(), strict=True)),
        model=model,
    )


def solve(
    model: LocalModel,
    measured: NDArray[np.float64],
    centre: NDArray[np.float64],
    spread: NDArray[np.float64],
) -> NDArray[np.float64]:
    """The change of the parameters that minimises the objective of the local model within bounds:
    Levenberg-Marquardt on the parameters that no bound holds back.
    """
    efficiencies = model.calibration.efficiencies
    bounds = np.array([parameter.bounds(efficiencies) for parameter in model.parameters])
    low, high = np.maximum(bounds[:, 0], -REACH), np.minimum(bounds[:, 1], REACH)
    change, damping = np.zeros(len(spread)), 1e-3
    log_s, slopes = model.at(change)
    cost = _cost(measured - log_s, (change - centre) / spread)
    for _ in range(100):
        residual = measured - log_s
        weight = _weight(residual)
        slope = slopes.T @ (weight * residual) - (change - centre) / spread**2
        curvature = slopes.T @ (slopes * weight[:, None]) + np.diag(spread**-2.0)
        free = ((change > low) | (slope > 0)) & ((change < high) | (slope < 0))
        if not free.any():
            break
        damped = curvature + damping * np.diag(np.diag(curvature))
        step = np.zeros_like(change)
        step[free] = np.linalg.solve(damped[np.ix_(free, free)], slope[free])
        tried = np.clip(change + step, low, high)
        tried_s, tried_slopes = model.at(tried)
        tried_cost = _cost(measured - tried_s, (tried - centre) / spread)
        if tried_cost < cost:
            settled = cost - tried_cost < 1e-6 * cost
            change, log_s, slopes, cost = tried, tried_s, tried_slopes, tried_cost
            damping = max(damping / 3, 1e-6)
            if settled:
                break
        else:
            damping *= 4
            if damping > 1e8:  # noqa: PLR2004 - no direction is downhill any more
                break
    return change


def refit(
    model: LocalModel,
    measured: NDArray[np.float64],
    centre: NDArray[np.float64],
    tightness: float,
) -> Calibration:
    """The calibration that fits the runs of a local model, with the prior at ``centre``."""
    spread = np.array([parameter.spread for parameter in model.parameters]) * tightness
    return changed(model.calibration, model.parameters, solve(model, measured, centre, spread))


def middle(
    model: LocalModel,
    measured: NDArray[np.float64],
    groups: Sequence[str],
    centre: NDArray[np.float64],
    tightness: float,
) -> Calibration:
    """The calibration that groups of runs differ least from, where each has one of its own: theta
    of a run is the middle plus what is its group's (a mixed-effects model). So a group of many runs
    does not outweigh one of few, and no parameter has to make up for what groups differ in.
    """
    labels = np.array(groups)
    masks = [labels == group for group in dict.fromkeys(groups)]
    wide = LocalModel(
        model.calibration,
        model.parameters * (1 + len(masks)),
        model.log_s,
        np.hstack([model.shares, *(model.shares * mask[:, None] for mask in masks)]),
        np.tile(model.signs, 1 + len(masks)),
    )
    spread = np.array([parameter.spread for parameter in model.parameters])
    spreads = np.concatenate([tightness * spread, *[spread] * len(masks)])
    centres = np.concatenate([centre, np.zeros(len(spread) * len(masks))])
    change = solve(wide, measured, centres, spreads)
    return changed(model.calibration, model.parameters, change[: len(spread)])


def _scale(count: int) -> float:
    return 1 / (NOISE**2 * max(1.0, count / ENOUGH))


def _weight(residual: NDArray[np.float64]) -> NDArray[np.float64]:
    """Of each run in the normal equations: full near 0, falling as 1 / |residual| beyond."""
    weight: NDArray[np.float64] = _scale(len(residual)) / np.sqrt(1 + (residual / NOISE) ** 2)
    return weight


def _cost(residual: NDArray[np.float64], from_prior: NDArray[np.float64]) -> float:
    robust = 2 * NOISE**2 * (np.sqrt(1 + (residual / NOISE) ** 2) - 1)
    return float(_scale(len(residual)) * robust.sum() + (from_prior**2).sum())


def _left(
    model: LocalModel, measured: NDArray[np.float64], spread: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Standard deviation after the fit over that before it, by parameter."""
    log_s, slopes = model.at(np.zeros(len(spread)))
    weight = _weight(measured - log_s)
    curvature = slopes.T @ (slopes * weight[:, None]) + np.diag(spread**-2.0)
    deviation: NDArray[np.float64] = np.sqrt(np.diag(np.linalg.inv(curvature)))
    return deviation / spread
