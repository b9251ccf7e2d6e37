"""The main job: inputs in, the best plan out, with what was shown about it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from planner.choices import Restrictions
from planner.feasibility import explain_infeasible
from planner.launchers import LAUNCHERS
from planner.native import model_problems, training_problems
from planner.plan import MIN_FIT, Plan, SearchFacts
from planner.search import search
from planner.space import SearchSpace
from profiles.errors import ExitCode, InputError, ParplanError, Problem

if TYPE_CHECKING:
    from planner.finalists import Finalist, SearchResult
    from planner.inputs import Inputs

__all__ = [
    "AfterSearch",
    "InterruptedSearchError",
    "NothingInTimeError",
    "Planned",
    "find_plan",
    "plan_training",
    "question_of",
]

RUNNERS_UP: Final = 3
NATIVE: Final = "native"


class InterruptedSearchError(ParplanError):
    """The search was stopped before it had found a layout that fits."""

    exit_code = ExitCode.INTERRUPTED


class NothingInTimeError(ParplanError):
    """The time was up before the search had found a layout that fits."""

    exit_code = ExitCode.NO


@dataclass(frozen=True, kw_only=True)
class Planned:
    """The best plan and the next best different ones, fastest first. ``tried``: every layout that
    the search simulated and that fits.
    """

    plan: Plan
    runners_up: tuple[Plan, ...]
    tried: tuple[Plan, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class AfterSearch:
    """What follows the search. ``mix_degrees``: layers may differ in tp, dp and ZeRO stage
    (``planner.mixing``). ``prove``: a certificate of the best plan (``planner.certificate``).
    """

    mix_degrees: bool = False
    prove: bool = False

    def check(self, launcher: str) -> None:
        """Raises InputError where the launcher cannot do what is asked."""
        if self.mix_degrees and not LAUNCHERS[launcher].mixes_degrees:
            able = ", ".join(name for name, rules in LAUNCHERS.items() if rules.mixes_degrees)
            message = f"{launcher} gives all layers the same tp, dp and ZeRO stage"
            where = "--mix-degrees"
            raise InputError(Problem(where=where, message=message, expected=f"launcher {able}"))


def plan_training(
    inputs: Inputs,
    *,
    launcher: str = "any",
    restrictions: Restrictions | None = None,
    min_fit: float = MIN_FIT,
    **how: Any,
) -> Planned:
    """The fastest layout that ``launcher`` can express and that fits with ``min_fit``; ``how`` as
    in ``find_plan``.

    Raises ``InfeasibleError`` where nothing fits, ``InterruptedSearchError`` where ``should_stop``
    came before the first layout that does.
    """
    planned = find_plan(
        inputs, launcher=launcher, restrictions=restrictions, min_fit=min_fit, **how
    )
    if planned is None:
        space = _space(inputs, launcher, restrictions)
        raise explain_infeasible(inputs.context, space, min_fit=min_fit)
    return planned


def find_plan(
    inputs: Inputs,
    *,
    launcher: str = "any",
    restrictions: Restrictions | None = None,
    min_fit: float = MIN_FIT,
    runners_up: int = RUNNERS_UP,
    after: AfterSearch | None = None,
    **how: Any,
) -> Planned | None:
    """As ``plan_training``, but None where nothing fits; ``how`` as in ``search``."""
    after = after or AfterSearch()
    after.check(launcher)
    if launcher == NATIVE:
        _refuse_what_native_lacks(inputs)
    space = _space(inputs, launcher, restrictions)
    result = search(
        inputs.context,
        space,
        min_fit=min_fit,
        runners_up=runners_up,
        **how,
    )
    if result.best is None:
        if not result.complete:
            raise InterruptedSearchError("interrupted before a layout that fits was found")
        return None
    own = restrictions or Restrictions()
    facts = _facts(result, _with_micro_batch(own, inputs.training.micro_batch))
    finalists = list(result.finalists)
    if after.prove:
        from planner.certificate import certify  # noqa: PLC0415 - its solvers, seldom asked for

        proof = certify(inputs.context, finalists[0], min_fit=min_fit)
        facts = replace(facts, certificate=proof)
    mixed = None
    if after.mix_degrees:
        from planner.mixing import best_mix  # noqa: PLC0415 - its solvers, seldom asked for

        mixed = best_mix(inputs.context, space, result.finalists, min_fit=min_fit)
    if mixed is not None:
        facts = replace(facts, equal_degrees_s=finalists[0].estimate.step_s, proven=False)
        finalists = [mixed, *finalists[: max(1, runners_up)]]
    best, *others = (_plan(inputs, each, launcher, min_fit) for each in finalists)
    tried = tuple(_plan(inputs, each, launcher, min_fit) for each in result.tried)
    return Planned(plan=replace(best, search=facts), runners_up=tuple(others), tried=tried)


def question_of(plan: Plan) -> tuple[Inputs, dict[str, Any]]:
    """What a plan was the answer to: its inputs, and the space as keywords of ``plan_training``."""
    space = {
        "launcher": plan.launcher,
        "restrictions": None if plan.search is None else plan.search.restrictions,
        "min_fit": plan.min_fit,
    }
    return plan.inputs.with_training(micro_batch=None), space


def _refuse_what_native_lacks(inputs: Inputs) -> None:
    """Raise ``InputError`` where no layout could be executed."""
    problems = {
        f"model {inputs.model.name}": model_problems(inputs.model, inputs.training),
        "training": training_problems(inputs.training),
    }
    found = [
        Problem(where=where, message=f"{message} (launcher native)")
        for where, messages in problems.items()
        for message in messages
    ]
    if found:
        raise InputError(found)


def _space(inputs: Inputs, launcher: str, restrictions: Restrictions | None) -> SearchSpace:
    return SearchSpace(
        inputs.model, inputs.cluster, inputs.training, launcher=launcher, restrictions=restrictions
    )


def _plan(inputs: Inputs, finalist: Finalist, launcher: str, min_fit: float) -> Plan:
    return Plan(
        inputs=inputs.with_training(micro_batch=finalist.layout.micro_batch),
        layout=finalist.layout,
        estimate=finalist.estimate,
        launcher=launcher,
        min_fit=min_fit,
    )


def _with_micro_batch(restrictions: Restrictions, micro_batch: int | None) -> Restrictions:
    """A micro-batch that the training run states restricts the space like ``--fix``."""
    if micro_batch is None:
        return restrictions
    fixed = {**restrictions.fixed, "micro_batch": frozenset({str(micro_batch)})}
    return replace(restrictions, fixed=fixed)


def _facts(result: SearchResult, restrictions: Restrictions) -> SearchFacts:
    return SearchFacts(
        restrictions=restrictions,
        candidates=result.candidates,
        pruned=dict(sorted(result.pruned.items())),
        refused=dict(sorted(result.refused.items())),
        bound_s=result.bound_s,
        gap=result.gap,
        proven=result.proven,
        complete=result.complete,
    )
