"""What is best is not always what is fastest: money, energy, and the time to a target.

A step on fewer GPUs takes longer and costs less; a larger batch makes steps longer and fewer.
Each such choice is planned for itself, and the best by the objective is taken from the answers;
those that no other beats in both time and price are the front.

Time to target = step time x steps, and steps = epochs(global batch) x samples / global batch: how
many epochs a batch needs is what the user has measured or believes (Pal et al., IEEE Micro 2019).
Data parallelism raises the batch, so it stops paying where epochs grow; splitting the model does
not. A hybrid of M ways wins over N-way data parallelism on the same GPUs where its speed-up is
greater than M x SE_MN / SE_N x E_N / E_MN (their inequality).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from planner.choices import Restrictions
from planner.planning import Planned, find_plan
from planner.smallest import part_of
from planner.spend import spend_of
from profiles.errors import InputError, Problem

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from planner.inputs import Inputs
    from planner.plan import Plan

__all__ = ["Choice", "Objective", "Target", "plan_for"]


class Objective(StrEnum):
    """What a plan should have least of."""

    STEP_TIME = "step-time"
    COST = "cost"
    ENERGY = "energy"
    TIME_TO_TARGET = "time-to-target"


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """How long training goes on: ``samples`` of the data set, and the epochs that each global batch
    needs; between those given, epochs are interpolated, beyond them they are not known.
    """

    samples: int
    epochs: Mapping[int, float]

    def steps(self, global_batch: int) -> float:
        """Steps to the target. Raises ValueError beyond the table."""
        return self.epochs_at(global_batch) * self.samples / global_batch

    def epochs_at(self, global_batch: int) -> float:
        """Epochs by straight lines between the table's batches."""
        table = sorted(self.epochs.items())
        for (low, below), (high, above) in pairwise(table):
            if low <= global_batch <= high:
                return below + (above - below) * (global_batch - low) / (high - low)
        if global_batch in self.epochs:
            return self.epochs[global_batch]
        raise ValueError(f"epochs are given for batches from {table[0][0]} to {table[-1][0]}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One planned choice. ``value`` is what the objective counts (price, kWh or seconds)."""

    gpus: int
    global_batch: int
    planned: Planned
    value: float
    step_s: float
    on_front: bool = True


def plan_for(
    objective: Objective,
    inputs: Inputs,
    *,
    restrictions: Restrictions | None = None,
    target: Target | None = None,
    **how: Any,
) -> list[Choice]:
    """Every planned choice, the best by the objective first; empty if nothing fits. ``how`` as in
    ``planner.planning.find_plan``.

    Cost and energy try the cluster and its halves, down to what still fits; time to target tries
    the batches of its table. Raises InputError where prices, watts or the table are missing.
    """
    own = restrictions or Restrictions()
    if objective is Objective.TIME_TO_TARGET:
        if target is None:
            message = "time-to-target needs the epochs of each global batch"
            raise InputError(
                Problem(where="--objective", message=message, expected="--target FILE")
            )
        batches = sorted(target.epochs)
        tried = [(inputs.with_training(global_batch=batch), own) for batch in batches]
    else:
        tried = [part_of(inputs, own, size) for size in _halves(inputs.cluster.num_gpus)]
    found = []
    for part, restricted in tried:
        planned = find_plan(part, restrictions=restricted, **how)
        if planned is not None:
            found.append(_choice(objective, planned, target))
        elif objective is not Objective.TIME_TO_TARGET:
            break  # fewer GPUs hold even less
    found.sort(key=lambda choice: (choice.value, choice.step_s))
    return [_marked(choice, found) for choice in found]


def _halves(size: int) -> Iterator[int]:
    while size:
        yield size
        size //= 2


def _choice(objective: Objective, planned: Planned, target: Target | None) -> Choice:
    plan = planned.plan
    return Choice(
        gpus=plan.layout.mesh.num_ranks,
        global_batch=plan.inputs.training.global_batch,
        planned=planned,
        value=_value(objective, plan, target),
        step_s=plan.estimate.step_s,
    )


def _value(objective: Objective, plan: Plan, target: Target | None) -> float:
    spend = spend_of(plan)
    if objective is Objective.TIME_TO_TARGET:
        assert target is not None
        return plan.estimate.step_s * target.steps(plan.inputs.training.global_batch)
    if objective is Objective.STEP_TIME:
        return plan.estimate.step_s
    value = spend.price_per_step if objective is Objective.COST else spend.kwh_per_step
    if value is None:
        wanted = "price_per_gpu_hour" if objective is Objective.COST else "watts of its devices"
        message = f"the cluster {plan.inputs.cluster.name} does not say the {wanted}"
        hint = "a cluster YAML can"
        raise InputError(Problem(where="--objective", message=message, hint=hint))
    return value


def _marked(choice: Choice, others: list[Choice]) -> Choice:
    """Whether no other is better in both the objective and the time of a step."""
    beaten = any(
        other.value <= choice.value
        and other.step_s <= choice.step_s
        and (other.value, other.step_s) != (choice.value, choice.step_s)
        for other in others
    )
    return replace(choice, on_front=not beaten)
