"""The timeline of a layout's step: its passes with their exposed traffic, and what stages hold."""

from __future__ import annotations

from typing import TYPE_CHECKING

from costmodel.occupancy import Sizes, held_over_time
from costmodel.schedules import SCHEDULES
from costmodel.simulate import PassTimes
from costmodel.stagecost import saved_bytes
from costmodel.timeline import Traffic, play

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from costmodel.estimate import LayoutCost
    from costmodel.occupancy import Held
    from costmodel.passes import PassCost
    from costmodel.timeline import Timeline

__all__ = ["passes_of_step", "step_timeline"]


def step_timeline(cost: LayoutCost) -> tuple[Timeline, tuple[list[Held], ...]]:
    """Every pass of the step, and the activations that each stage holds over time in bytes."""
    timeline = passes_of_step(cost)
    return timeline, held_over_time(timeline, Sizes(activations=saved_bytes(cost.stages)))


def passes_of_step(cost: LayoutCost) -> Timeline:
    """Every pass of the step. It ends where the simulated passes of the estimate end."""
    context, layout, stages = cost.context, cost.layout, cost.stages
    forward, inputs, weight = zip(*(each.durations() for each in stages), strict=True)
    there = [[_traffic_s(own) for own in each.forward] for each in stages]
    back = [[_traffic_s(own) for own in each.backward] for each in stages]
    p2p = context.hand_overs.seconds(layout.mesh, layout.strategies[0], layout.micro_batch)
    return play(
        SCHEDULES[layout.schedule],
        layout.shape,
        PassTimes(forward_s=_less(forward, there), input_s=_less(inputs, back), weight_s=weight),
        Traffic(
            link_s=[seconds * context.own.p2p_overlap for seconds in p2p],
            tensor_s=there,
            tensor_back_s=back,
        ),
    )


def _traffic_s(cost: PassCost) -> float:
    """Exposed communication of a pass."""
    return cost.tp_s + cost.cp_s + cost.ep_s + cost.zero_s


def _less(whole: Iterable[Sequence[float]], part: Iterable[Sequence[float]]) -> list[list[float]]:
    return [
        [max(0.0, a - b) for a, b in zip(*rows, strict=True)]
        for rows in zip(whole, part, strict=True)
    ]
