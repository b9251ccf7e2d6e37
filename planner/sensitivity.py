"""Inputs a little other than stated: whether the choice stays, and what would make it faster.

Neither is a new search of the whole space: the choice is among plans that are known already (one
that does not fit any more becomes the best layout of its degrees that does), and what would help is
looked for among layouts of the same degrees.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final

from costmodel.estimate import LayoutCost
from planner.choices import Restrictions
from planner.planning import find_plan, question_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from planner.inputs import Inputs
    from planner.plan import Plan
    from profiles.cluster import NodeSpec

__all__ = ["Lever", "Shift", "Stated", "levers", "scaled", "sensitivity"]

SHARE: Final = 0.1
DEGREES: Final = ("tp", "cp", "ep", "expert_tp", "dp", "pp")
NOTICED: Final = 1e-3  # of the step: less is no help


class Stated(StrEnum):
    """An input that is known only so well."""

    BANDWIDTH = "bandwidth"
    EFFICIENCY = "efficiency"
    MEMORY = "memory"
    NODE_LINKS = "links inside a node"
    NETWORK = "network between nodes"


@dataclass(frozen=True, slots=True, kw_only=True)
class Shift:
    """The plans under an input ``factor`` times as large: steps in seconds, whether they fit,
    whether they had to be laid out anew for that, and the position of the fastest that does fit
    (None: none does).
    """

    what: Stated
    factor: float
    step_s: tuple[float, ...]
    fits: tuple[bool, ...]
    relayout: tuple[bool, ...]
    best: int | None

    @property
    def changes_choice(self) -> bool:
        """Whether the first plan is not the best any more."""
        return self.best != 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Lever:
    """A change and what the best layout of the same degrees gains by it: ``faster`` is a part of
    the plan's time for the same tokens, ``relayout`` says whether the layout is another.
    """

    change: str
    faster: float
    relayout: bool


def scaled(inputs: Inputs, what: Stated, factor: float) -> Inputs:
    """The inputs with ``what`` times ``factor``. Efficiency is that of GEMMs and attention."""
    if what is Stated.EFFICIENCY:
        own = inputs.calibration.efficiencies
        attention = {
            name: replace(each, forward=each.forward * factor, backward=each.backward * factor)
            for name, each in own.attention.items()
        }
        faster = replace(own, gemm=own.gemm * factor, attention=attention)
        return replace(inputs, calibration=replace(inputs.calibration, efficiencies=faster))
    groups = tuple(
        replace(group, node=_scaled_node(group.node, what, factor))
        for group in inputs.cluster.groups
    )
    return replace(inputs, cluster=replace(inputs.cluster, groups=groups))


def _scaled_node(node: NodeSpec, what: Stated, factor: float) -> NodeSpec:
    changed: dict[str, Any] = {}
    if what in (Stated.BANDWIDTH, Stated.NODE_LINKS):
        changed["gpu_bytes_per_s"] = node.gpu_bytes_per_s * factor
        changed["islands"] = tuple(
            replace(each, bytes_per_s=each.bytes_per_s * factor) for each in node.islands
        )
    if what in (Stated.BANDWIDTH, Stated.NETWORK):
        changed["nic_bytes_per_s"] = node.nic_bytes_per_s * factor
    if what is Stated.MEMORY:
        memory = round(node.device.memory_bytes * factor)
        changed["device"] = replace(node.device, memory_bytes=memory)
    return replace(node, **changed)


def sensitivity(plans: Sequence[Plan], *, share: float = SHARE) -> tuple[Shift, ...]:
    """The plans, all of the first one's inputs, with bandwidth, efficiency and memory lower and
    higher by ``share``.
    """
    return tuple(
        _shift(plans, what, factor)
        for what in (Stated.BANDWIDTH, Stated.EFFICIENCY, Stated.MEMORY)
        for factor in (1 - share, 1 + share)
    )


def _shift(plans: Sequence[Plan], what: Stated, factor: float) -> Shift:
    inputs = scaled(plans[0].inputs, what, factor)
    found = [
        LayoutCost(inputs.context, plan.layout).estimate(min_fit=plan.min_fit) for plan in plans
    ]
    relayout = []
    for at, plan in enumerate(plans):
        other = None
        if plan.estimate.fits and not found[at].fits:
            other = _of_its_degrees(plan, inputs)
        relayout.append(other is not None)
        if other is not None:
            found[at] = other.estimate
    fitting = [at for at, own in enumerate(found) if own.fits]
    return Shift(
        what=what,
        factor=factor,
        step_s=tuple(own.step_s for own in found),
        fits=tuple(own.fits for own in found),
        relayout=tuple(relayout),
        best=min(fitting, key=lambda at: found[at].step_s, default=None),
    )


def _of_its_degrees(plan: Plan, inputs: Inputs) -> Plan | None:
    """The fastest layout with the degrees of a plan under other inputs, None if none fits."""
    _, space = question_of(plan)
    own = space["restrictions"] or Restrictions()
    mesh = plan.layout.mesh
    degrees = {name: frozenset({str(getattr(mesh, name))}) for name in DEGREES}
    space["restrictions"] = replace(own, fixed={**own.fixed, **degrees})
    planned = find_plan(inputs.with_training(micro_batch=None), **space, runners_up=0)
    return None if planned is None else planned.plan


def levers(plan: Plan, *, share: float = SHARE) -> tuple[Lever, ...]:
    """What would make a plan faster, the greatest gain first; what gains nothing is left out. Each
    change has been tried: the layouts of the plan's degrees were searched under it.
    """
    inputs = plan.inputs
    more = f"{100 * share:.0f} % more"
    faster = f"{100 * share:.0f} % faster"
    tried = [
        ("other choices with the same degrees", inputs),
        (f"{more} memory a device", scaled(inputs, Stated.MEMORY, 1 + share)),
        (f"{faster} {Stated.NODE_LINKS}", scaled(inputs, Stated.NODE_LINKS, 1 + share)),
        (f"{faster} {Stated.NETWORK}", scaled(inputs, Stated.NETWORK, 1 + share)),
        (f"{faster} GEMMs and attention", scaled(inputs, Stated.EFFICIENCY, 1 + share)),
        (
            "twice the global batch (for the same tokens)",
            inputs.with_training(global_batch=2 * inputs.training.global_batch),
        ),
    ]
    found = [_lever(plan, change, changed) for change, changed in tried]
    return tuple(sorted((each for each in found if each.faster > NOTICED), key=_by_gain))


def _by_gain(lever: Lever) -> float:
    return -lever.faster


def _lever(plan: Plan, change: str, inputs: Inputs) -> Lever:
    """The gain of a change: of the plan itself, or of the best layout of its degrees."""
    now = plan.estimate.step_s / plan.inputs.training.tokens
    best, relayout = _kept(plan, inputs), False
    other = _of_its_degrees(plan, inputs)
    if other is not None and other.estimate.step_s < best * (1 - NOTICED):
        best, relayout = other.estimate.step_s, other.layout != plan.layout
    return Lever(change=change, faster=1 - best / inputs.training.tokens / now, relayout=relayout)


def _kept(plan: Plan, inputs: Inputs) -> float:
    """The step of the plan's own layout under other inputs, where it can be kept."""
    times = inputs.training.global_batch // plan.inputs.training.global_batch
    layout = replace(plan.layout, num_microbatches=plan.layout.num_microbatches * times)
    return LayoutCost(inputs.context, layout).estimate(min_fit=plan.min_fit).step_s
