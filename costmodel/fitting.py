"""Measured runs -> the efficiencies of a device and a software stack.

The fit minimises, over the parameters theta (logarithms of efficiencies; overlaps as they are),

    sum_i rho((log t_i - log f_i(theta)) / NOISE) + sum_j ((theta_j - prior_j) / spread_j)^2

where f_i is the estimated step of run i and rho is quadratic near 0 and linear beyond (pseudo
Huber), so that single odd runs do not steer. Every parameter has bounds with a physical meaning.

f is expensive and nearly linear in *prices*, the inverses of efficiencies: a step is a sum of
work times price along its critical path. So f is replaced, around the current point, by
f * (1 + sum_j share_j * (price_j / price_j now - 1)), whose shares come from one finite difference
each; that model is minimised, the true f evaluated there, and so on: a few rounds suffice.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from costmodel.context import Memo
from profiles.calibration import KernelEfficiency
from profiles.layers import Head

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from costmodel.replay import Replay
    from profiles.calibration import Calibration, Efficiencies

__all__ = [
    "LEAST_RUNS",
    "Fit",
    "LocalModel",
    "Parameter",
    "distance",
    "fit",
    "local_model",
    "log_measured",
    "log_steps",
    "middle",
    "refit",
    "relevant",
    "usual",
]

LEAST_RUNS: Final = 3
NOISE: Final = 0.03  # of a good measurement, in the logarithm
ENOUGH: Final = 300  # runs beyond which more of them no longer outweigh the prior further
STEP: Final = 0.04  # of the finite differences
ROUNDS: Final = 4
REACH: Final = 0.8  # how far one round may go, in the logarithm
SETTLED: Final = 0.02
DETERMINED: Final = 0.8  # of the prior's spread: what remains when runs say something
# The host's time a kernel that is counted here, as eager software needs it: fits of stacks on A100,
# H100, B200 and GB200 that determine it lie between 50 and 165 us (0.42 in the logarithm, their own
# error included). The datasheet's is one launch; a block launches about twice as many, from Python.
USUAL_LAUNCH_S: Final = 60e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """One efficiency that is fitted: how far it usually lies from the prior (``spread``, in the
    logarithm unless ``linear``), and the least and greatest value that make sense.
    """

    name: str
    spread: float
    low: float
    high: float
    linear: bool = False

    def value(self, efficiencies: Efficiencies) -> float:
        """Its value; an attention kernel counts by its forward pass."""
        kernel = self.name.removeprefix(ATTENTION)
        if kernel != self.name:
            return efficiencies.attention[kernel].forward
        return float(getattr(efficiencies, self.name))

    def bounds(self, efficiencies: Efficiencies) -> tuple[float, float]:
        """Least and greatest change from the value in ``efficiencies``."""
        now = self.value(efficiencies)
        if self.linear:
            return min(0.0, self.low - now), max(0.0, self.high - now)
        return min(0.0, math.log(self.low / now)), max(0.0, math.log(self.high / now))


ATTENTION: Final = "attention."

# Bounds: rates cannot beat the datasheet (1.0); the host launches a kernel in 1 to 200 us.
PARAMETERS: Final = (
    Parameter(name="gemm", spread=0.15, low=0.3, high=1.0),
    Parameter(name="gemm_half_k", spread=0.8, low=10, high=2000),
    Parameter(name="misaligned", spread=0.5, low=0.2, high=1.0),
    Parameter(name="quantised", spread=0.2, low=0.3, high=1.0),
    Parameter(name="stream", spread=0.25, low=0.15, high=1.0),
    Parameter(name="kernel_launch_s", spread=0.35, low=1e-6, high=2e-4),
    Parameter(name="micro_batch_s", spread=1.0, low=1e-5, high=0.2),
    Parameter(name="step_s", spread=1.0, low=1e-4, high=5.0),
    Parameter(name="hand_over_s", spread=1.0, low=1e-6, high=0.02),
    Parameter(name="gpu_link", spread=0.3, low=0.05, high=1.0),
    Parameter(name="nic", spread=0.4, low=0.05, high=1.0),
    Parameter(name="straggler", spread=0.5, low=1e-4, high=0.02),
    Parameter(name="moe_imbalance", spread=0.1, low=1.0, high=2.0),
    Parameter(name="tp_overlap", spread=0.3, low=0.0, high=0.95, linear=True),
    Parameter(name="dp_overlap", spread=0.2, low=0.0, high=1.0, linear=True),
    Parameter(name="ep_overlap", spread=0.3, low=0.0, high=0.95, linear=True),
    Parameter(name="p2p_overlap", spread=0.3, low=0.0, high=0.95, linear=True),
)


def relevant(replays: Sequence[Replay]) -> tuple[Parameter, ...]:
    """The parameters that some of these runs depend on."""
    meshes = [each.layout.mesh for each in replays]
    nodes = any(each.cluster.num_nodes > 1 for each in replays)
    applies = {
        "misaligned": any(_has_odd_vocabulary(each) for each in replays),
        "quantised": any(each.training.precision.is_quantised for each in replays),
        "moe_imbalance": any(each.run.num_experts for each in replays),
        "hand_over_s": any(mesh.pp > 1 for mesh in meshes),
        "p2p_overlap": any(mesh.pp > 1 for mesh in meshes),
        "tp_overlap": any(mesh.tp > 1 for mesh in meshes),
        "ep_overlap": any(mesh.ep > 1 for mesh in meshes),
        "dp_overlap": any(mesh.dp * mesh.cp > 1 for mesh in meshes),
        "gpu_link": any(mesh.num_ranks > 1 for mesh in meshes),
        "nic": nodes,
        "straggler": nodes,
    }
    kernels = sorted({each.training.attention.value for each in replays})
    return (
        *(p for p in PARAMETERS if applies.get(p.name, True)),
        *(Parameter(name=ATTENTION + k, spread=0.4, low=0.05, high=1.0) for k in kernels),
    )


def _has_odd_vocabulary(each: Replay) -> bool:
    heads = (run.layer for run in each.model.runs if isinstance(run.layer, Head))
    return each.layout.mesh.tp == 1 and any(head.vocab % 8 for head in heads)


def changed(
    calibration: Calibration, parameters: Sequence[Parameter], theta: NDArray[np.float64]
) -> Calibration:
    """The calibration with every parameter moved by its ``theta``."""
    now = calibration.efficiencies
    values: dict[str, Any] = {}
    attention = dict(now.attention)
    for parameter, change in zip(parameters, theta.tolist(), strict=True):
        kernel = parameter.name.removeprefix(ATTENTION)
        if parameter.linear:
            values[parameter.name] = parameter.value(now) + change
        elif kernel == parameter.name:
            values[kernel] = parameter.value(now) * math.exp(change)
        else:
            old, factor = now.attention[kernel], math.exp(change)
            attention[kernel] = KernelEfficiency(
                forward=min(1.0, old.forward * factor), backward=min(1.0, old.backward * factor)
            )
    return replace(calibration, efficiencies=replace(now, attention=attention, **values))


def usual(datasheet: Calibration) -> Calibration:
    """The prior where nothing is known of a device: the datasheet, but for the host."""
    own = replace(datasheet.efficiencies, kernel_launch_s=USUAL_LAUNCH_S)
    return replace(datasheet, efficiencies=own)


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


def distance(
    parameters: Sequence[Parameter], here: Calibration, there: Calibration
) -> NDArray[np.float64]:
    """How far the parameters of one calibration lie from those of another."""
    pairs = [(p, p.value(here.efficiencies), p.value(there.efficiencies)) for p in parameters]
    return np.array([b - a if p.linear else math.log(b / a) for p, a, b in pairs])


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
