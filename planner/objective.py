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
from typing import TYPE_CHECKING, Any

from planner.choices import Restrictions
from planner.planning import InterruptedSearchError, Planned, find_plan, plan_training
from planner.smallest import part_of
from planner.spend import spend_of
from profiles.errors import InputError, Problem

if TYPE_CHECKING:
    from collections.abc import Iterator

    from planner.inputs import Inputs
    from planner.plan import Plan
    from profiles.target import Target

__all__ = ["Choice", "Objective", "plan_for"]


class Objective(StrEnum):
    """What a plan should have least of."""

    STEP_TIME = "step-time"
    COST = "cost"
    ENERGY = "energy"
    TIME_TO_TARGET = "time-to-target"


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One planned choice. ``value`` is what the objective counts (price, kWh or seconds). On the
    front no other choice is better in both ``value`` and ``step_s``.
    """

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
    """Every planned choice, the best by the objective first. ``how`` as in
    ``planner.planning.find_plan``; interrupted, it is the choices so far.

    Cost and energy try the cluster and its halves, down to what still fits; time to target tries
    the batches of its table. Raises InputError where prices, watts or the table are missing,
    InfeasibleError where nothing fits.
    """
    own = restrictions or Restrictions()
    stop = how.get("should_stop", lambda: False)
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
    _require_known(objective, inputs)
    found: list[Choice] = []
    for part, restricted in tried:
        try:
            planned = find_plan(part, restrictions=restricted, **how)
        except InterruptedSearchError:
            if not found:
                raise
            break
        if planned is not None:
            found.append(_choice(objective, planned, target))
        elif objective is not Objective.TIME_TO_TARGET:
            break  # fewer GPUs hold even less
    if not found:
        plan_training(tried[0][0], restrictions=restrictions, **how)  # says why
    found.sort(key=lambda choice: (choice.value, choice.step_s))
    marked = [_marked(choice, found) for choice in found]
    return [_chosen(marked[0], objective, complete=not stop()), *marked[1:]]


def _chosen(choice: Choice, objective: Objective, *, complete: bool) -> Choice:
    """The best choice, whose plan says what it is the best by."""
    plan = choice.planned.plan
    assert plan.search is not None
    facts = replace(
        plan.search, objective=objective.value, complete=plan.search.complete and complete
    )
    return replace(choice, planned=replace(choice.planned, plan=replace(plan, search=facts)))


def _require_known(objective: Objective, inputs: Inputs) -> None:
    """Raise InputError where a device of the cluster has no price or no watts."""
    for node in {group.node: None for group in inputs.cluster.groups}:
        if objective is Objective.COST and node.price_per_gpu_hour is None:
            wanted = f"price_per_gpu_hour of {node.name}"
            hint = "nodes of a cluster YAML say it"
        elif objective is Objective.ENERGY and node.device.watts is None:
            wanted, hint = f"watts of {node.device.name}", "devices of a cluster YAML say them"
        else:
            continue
        message = f"{objective} needs the {wanted}"
        raise InputError(Problem(where="--objective", message=message, hint=hint))


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
    assert value is not None  # _require_known
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
