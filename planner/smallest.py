"""How many GPUs a model needs: the smallest part of a cluster on which a layout fits.

Parts are the first GPUs of the first node, then whole nodes. A part that fits is found by halving,
since a larger part can leave GPUs idle; the search then has the last word on its neighbours.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from planner.choices import Restrictions
from planner.feasibility import explain_infeasible, fits_with, tightest_constraint
from planner.plan import MIN_FIT
from planner.planning import Planned, find_plan
from planner.space import SearchSpace
from profiles.catalog import load_cluster
from profiles.shorthand import shorthand_of_part

if TYPE_CHECKING:
    from planner.inputs import Inputs

__all__ = ["Smallest", "part_of", "plan_smallest"]


@dataclass(frozen=True, kw_only=True)
class Smallest:
    """The plan on the fewest GPUs. ``smaller`` is the next smaller part, which does not do (None
    if there is none), ``lacking`` what it lacks, in words.
    """

    planned: Planned
    num_gpus: int
    smaller: int | None
    lacking: str


def plan_smallest(
    inputs: Inputs,
    *,
    restrictions: Restrictions | None = None,
    launcher: str = "any",
    min_fit: float = MIN_FIT,
    **how: Any,
) -> Smallest:
    """The fastest plan on as few GPUs as possible; ``how`` as in ``plan_training``. A cluster in
    shorthand becomes a smaller one, of any other the plan leaves GPUs unused.

    Raises ``InfeasibleError`` where the whole cluster is too small.
    """
    own = restrictions or Restrictions()

    def space_of(num_gpus: int) -> SearchSpace:
        return SearchSpace(
            inputs.model,
            inputs.cluster,
            inputs.training,
            launcher=launcher,
            restrictions=_on_at_most(num_gpus, own),
        )

    def fits(num_gpus: int) -> bool:
        return fits_with(inputs.context, space_of(num_gpus), min_fit)

    def plan_on(num_gpus: int) -> Planned | None:
        part, restricted = part_of(inputs, own, num_gpus)
        return find_plan(part, restrictions=restricted, launcher=launcher, min_fit=min_fit, **how)

    sizes = _sizes(inputs)
    position = bisect_left(sizes, True, key=fits)
    planned = None
    while position < len(sizes) and (planned := plan_on(sizes[position])) is None:
        position += 1
    if planned is None:
        raise explain_infeasible(inputs.context, space_of(sizes[-1]), min_fit=min_fit)
    while position and (better := plan_on(sizes[position - 1])) is not None:
        planned, position = better, position - 1
    smaller = sizes[position - 1] if position else None
    lacking = ""
    if smaller is not None:
        lacking = tightest_constraint(inputs.context, space_of(smaller), min_fit=min_fit)
    return Smallest(planned=planned, num_gpus=sizes[position], smaller=smaller, lacking=lacking)


def _sizes(inputs: Inputs) -> list[int]:
    """GPUs of the parts that are tried."""
    first, *others = (node.num_gpus for node in inputs.cluster.nodes)
    return [*range(1, first), *accumulate(others, initial=first)]


def part_of(
    inputs: Inputs, restrictions: Restrictions, num_gpus: int
) -> tuple[Inputs, Restrictions]:
    """The inputs with the smallest cluster of ``num_gpus`` that can be named, and the restrictions
    that leave the GPUs beyond them unused.
    """
    ref = shorthand_of_part(inputs.cluster_ref, num_gpus)
    if ref is not None:
        inputs = replace(inputs, cluster=load_cluster(ref), cluster_ref=ref)
    if inputs.cluster.num_gpus <= num_gpus:
        return inputs, restrictions
    return inputs, _on_at_most(num_gpus, restrictions)


def _on_at_most(num_gpus: int, own: Restrictions) -> Restrictions:
    most = min(num_gpus, own.at_most.get("gpus", num_gpus))
    return replace(own, at_most={**own.at_most, "gpus": most})
