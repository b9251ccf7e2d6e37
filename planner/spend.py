"""Money and energy: what a step costs on the GPUs that a plan uses.

Prices are those of the cluster file per GPU and hour, in whatever currency it is written; energy
counts the devices at their power limit, without hosts, network and cooling.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

    from planner.plan import Plan
    from profiles.cluster import ClusterSpec, NodeSpec

__all__ = ["Spend", "spend_of"]

HOUR_S: Final = 3600.0
KWH_J: Final = 3.6e6
MILLION: Final = 1e6


@dataclass(frozen=True, slots=True, kw_only=True)
class Spend:
    """Of one step and per million trained tokens; None where a price or a power is not known."""

    price_per_step: float | None
    price_per_million_tokens: float | None
    kwh_per_step: float | None
    kwh_per_million_tokens: float | None


def spend_of(plan: Plan) -> Spend:
    """What a plan's step costs."""
    cluster, used = plan.inputs.cluster, plan.layout.mesh.num_ranks
    step_s, millions = plan.estimate.step_s, plan.inputs.training.tokens / MILLION
    rate = _total(cluster, used, lambda node: node.price_per_gpu_hour)
    watts = _total(cluster, used, lambda node: node.device.watts)
    price = None if rate is None else rate * step_s / HOUR_S
    energy = None if watts is None else watts * step_s / KWH_J
    return Spend(
        price_per_step=price,
        price_per_million_tokens=None if price is None else price / millions,
        kwh_per_step=energy,
        kwh_per_million_tokens=None if energy is None else energy / millions,
    )


def _total(
    cluster: ClusterSpec, used: int, of_gpu: Callable[[NodeSpec], float | None]
) -> float | None:
    """The sum over the first ``used`` GPUs, None if one of them does not say."""
    total, left = 0.0, used
    for group in cluster.groups:
        taken = min(left, group.count * group.node.num_gpus)
        own = of_gpu(group.node)
        if taken and own is None:
            return None
        total += taken * (own or 0.0)
        left -= taken
    return total
