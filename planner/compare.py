"""Two plans or more side by side: whether they can be compared, what they decide, what it costs.

Other work (another model, another batch) makes steps incomparable, another basis (calibration,
precision, ...) their estimates. Another cluster is a difference like any other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from planner.explain import memory_kinds, seconds_by_cause
from planner.plan import diff_plans
from planner.planreader import load_plan
from profiles.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from planner.plan import Difference, Plan

__all__ = ["Comparison", "Contender", "compare_plans", "load_sound_plans"]

SAME_WORK: Final = ("model", "global_batch", "seq_len")
SAME_BASIS: Final = (
    "calibration",
    "precision",
    "optimizer",
    "grad_dtype",
    "attention",
    "fused_kernels",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """A plan beside the first one. ``slower``: relative difference of the times of the same work
    (steps, or tokens where steps differ in size). ``within_uncertainty``: the intervals overlap.
    """

    name: str
    plan: Plan
    differences: tuple[Difference, ...]
    other_work: tuple[str, ...]
    other_basis: tuple[str, ...]
    slower: float
    within_uncertainty: bool
    by_cause_s: dict[str, float]
    by_kind_bytes: dict[str, int]

    @property
    def comparable(self) -> bool:
        """Whether both do the same work under the same assumptions."""
        return not self.other_work and not self.other_basis

    def passes(self, tolerance: float) -> bool:
        """Whether it can be compared and is slower by no more than ``tolerance``, as 0.02."""
        return self.comparable and self.slower <= tolerance


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The first plan and the others against it."""

    name: str
    plan: Plan
    others: tuple[Contender, ...]

    @property
    def plans(self) -> tuple[tuple[str, Plan], ...]:
        """Every plan with its name, the first one first."""
        return ((self.name, self.plan), *((each.name, each.plan) for each in self.others))


def load_sound_plans(paths: Iterable[str]) -> tuple[list[tuple[str, Plan]], list[str]]:
    """The plans of the files that are sound, by path, and a line on each of the others."""
    sound, refused = [], []
    for path in paths:
        try:
            sound.append((path, load_plan(path)))
        except InputError as error:
            more = len(error.problems) - 1
            refused.append(f"{error.problems[0]}" + (f" (and {more} more)" if more else ""))
    return sound, refused


def compare_plans(plans: Sequence[tuple[str, Plan]]) -> Comparison:
    """Compare the first of (name, plan) with the others, costs by the busiest and the fullest
    stage of each.
    """
    (name, first), *others = plans
    return Comparison(
        name=name, plan=first, others=tuple(_contender(first, *other) for other in others)
    )


def _contender(first: Plan, name: str, other: Plan) -> Contender:
    differences = diff_plans(first, other)
    changed = {each.choice for each in differences}
    ours, theirs = (seconds_by_cause(plan.estimate.split) for plan in (first, other))
    held, holds = (_fullest(plan) for plan in (first, other))
    low, high = _per_token(first)
    other_low, other_high = _per_token(other)
    return Contender(
        name=name,
        plan=other,
        differences=tuple(differences),
        other_work=tuple(each for each in SAME_WORK if each in changed),
        other_basis=tuple(each for each in SAME_BASIS if each in changed),
        slower=_seconds_per_token(other) / _seconds_per_token(first) - 1,
        within_uncertainty=low <= other_high and other_low <= high,
        by_cause_s={cause: theirs[cause] - ours[cause] for cause in ours},
        by_kind_bytes={kind: holds[kind] - held[kind] for kind in held},
    )


def _fullest(plan: Plan) -> dict[str, int]:
    stage = max(plan.estimate.stages, key=lambda each: each.memory.device_bytes)
    return memory_kinds(stage.memory)


def _seconds_per_token(plan: Plan) -> float:
    return plan.estimate.step_s / plan.inputs.training.tokens


def _per_token(plan: Plan) -> tuple[float, float]:
    low, high = plan.estimate.interval_s
    return low / plan.inputs.training.tokens, high / plan.inputs.training.tokens
