"""The efficiencies that are fitted to measured runs: which, how far they move, how a calibration
moves with them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from profiles.calibration import KernelEfficiency
from profiles.layers import Head

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from costmodel.replay import Replay
    from profiles.calibration import Calibration, Efficiencies

__all__ = ["PARAMETERS", "Parameter", "changed", "distance", "relevant", "usual"]

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


def distance(
    parameters: Sequence[Parameter], here: Calibration, there: Calibration
) -> NDArray[np.float64]:
    """How far the parameters of one calibration lie from those of another."""
    pairs = [(p, p.value(here.efficiencies), p.value(there.efficiencies)) for p in parameters]
    return np.array([b - a if p.linear else math.log(b / a) for p, a, b in pairs])
