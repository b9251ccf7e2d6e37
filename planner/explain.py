"""Why this plan: where its time goes, what binds it, and why the next best ones lost."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Final

from costmodel.estimate import estimate, fit_limit
from costmodel.schedules import SCHEDULES
from costmodel.simulate import in_flight
from planner.plan import diff_plans
from planner.planning import InterruptedSearchError, plan_training, question_of
from planner.sensitivity import levers, sensitivity
from profiles.errors import InfeasibleError

if TYPE_CHECKING:
    from collections.abc import Callable

    from costmodel.estimate import MemoryBytes
    from costmodel.stagecost import StepSplit
    from planner.finalists import Finalist
    from planner.plan import Difference, Plan
    from planner.sensitivity import Lever, Shift

__all__ = [
    "BubbleBinding",
    "Explanation",
    "MemoryBinding",
    "Rival",
    "ScheduleBinding",
    "TimeBinding",
    "explain_plan",
    "memory_kinds",
    "rival_of",
    "seconds_by_cause",
]

USUAL: Final = "1f1b"
ACCEPTED_BUBBLE: Final = 0.05
MOST_DOUBLED: Final = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeBinding:
    """The cause that takes most of the step beside useful compute, and its part of the step."""

    cause: str
    seconds: float
    part: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryBinding:
    """The fullest stage: its device total against what is usable and against ``limit_bytes``, the
    most that fits with the plan's probability; its largest kind.
    """

    stage: int
    device_bytes: int
    limit_bytes: int
    usable_bytes: int
    kind: str
    kind_bytes: int

    @property
    def part(self) -> float:
        """How full the device is."""
        return self.device_bytes / self.usable_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleBinding:
    """What the schedule does for the plan, against 1F1B over the same stages: micro-batches of a
    stage's whole share held at most, idle part of the step (of 1F1B by its closed form), and the
    device total of the fullest stage.
    """

    name: str
    in_flight: float
    idle: float
    usual_in_flight: float
    usual_idle: float
    usual_bytes: int
    usable_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BubbleBinding:
    """Too few micro-batches for the stages: the part of the step for which the busiest stage waits,
    and the fewest, doubled again and again, with which it waits for ``ACCEPTED_BUBBLE`` or less.
    """

    microbatches: int
    idle: float
    cure_microbatches: int
    cure_global_batch: int
    cure_idle: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Rival:
    """Another plan: what it decides differently, and what that costs in seconds by cause.

    The seconds are those of either plan's busiest stage, so they add up to ``slower_s``.
    """

    plan: Plan
    slower_s: float
    by_cause_s: dict[str, float]
    differences: tuple[Difference, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """Everything that ``parplan explain`` prints."""

    plan: Plan
    time: TimeBinding
    memory: MemoryBinding
    schedule: ScheduleBinding | None
    bubble: BubbleBinding | None
    rivals: tuple[Rival, ...]
    levers: tuple[Lever, ...]
    shifts: tuple[Shift, ...]


def explain_plan(
    plan: Plan,
    rivals: tuple[Plan, ...] | None = None,
    *,
    should_stop: Callable[[], bool] = lambda: False,
    on_progress: Callable[[int, Finalist | None, float], None] | None = None,
) -> Explanation:
    """Explain a plan. ``rivals`` None searches the plan's own space again for them."""
    if rivals is None:
        rivals = _searched(plan, should_stop, on_progress)
    return Explanation(
        plan=plan,
        time=_time(plan),
        memory=_memory(plan),
        schedule=_schedule(plan),
        bubble=_bubble(plan),
        rivals=tuple(rival_of(plan, each) for each in rivals),
        levers=() if should_stop() else levers(plan),
        shifts=sensitivity((plan, *rivals)),
    )


def _searched(
    plan: Plan,
    should_stop: Callable[[], bool],
    on_progress: Callable[[int, Finalist | None, float], None] | None,
) -> tuple[Plan, ...]:
    """The best plans of the space that the plan came from, itself left out."""
    try:
        inputs, space = question_of(plan)
        planned = plan_training(inputs, **space, should_stop=should_stop, on_progress=on_progress)
    except (InfeasibleError, InterruptedSearchError):
        return ()
    found = (planned.plan, *planned.runners_up)
    return tuple(each for each in found if each.layout != plan.layout)


def rival_of(plan: Plan, other: Plan) -> Rival:
    """``other`` as a rival of ``plan``."""
    ours = seconds_by_cause(plan.estimate.split)
    theirs = seconds_by_cause(other.estimate.split)
    return Rival(
        plan=other,
        slower_s=other.estimate.step_s - plan.estimate.step_s,
        by_cause_s={cause: theirs[cause] - ours[cause] for cause in ours},
        differences=tuple(diff_plans(plan, other)),
    )


def seconds_by_cause(split: StepSplit) -> dict[str, float]:
    """Seconds of a step by cause: ``compute_s``, ``bubble_s``, ..."""
    return {field.name: getattr(split, field.name) for field in fields(split)}


def memory_kinds(memory: MemoryBytes) -> dict[str, int]:
    """Peak bytes of one rank by kind, the allocator's and the context's included."""
    return {field.name: getattr(memory, field.name) for field in fields(memory)}


def _time(plan: Plan) -> TimeBinding:
    causes = seconds_by_cause(plan.estimate.split)
    cause = max(causes, key=lambda name: (name != "compute_s", causes[name]))
    seconds = causes[cause]
    return TimeBinding(cause=cause, seconds=seconds, part=seconds / plan.estimate.step_s)


def _memory(plan: Plan) -> MemoryBinding:
    fullest = max(plan.estimate.stages, key=lambda stage: stage.memory.device_bytes)
    kinds = memory_kinds(fullest.memory)
    kind = max(kinds, key=lambda name: kinds[name])
    return MemoryBinding(
        stage=fullest.stage,
        device_bytes=fullest.memory.device_bytes,
        limit_bytes=fit_limit(plan.inputs.context, plan.min_fit),
        usable_bytes=plan.inputs.context.usable_bytes,
        kind=kind,
        kind_bytes=kinds[kind],
    )


def _schedule(plan: Plan) -> ScheduleBinding | None:
    """None where the plan's schedule is 1F1B, or there is no pipeline."""
    layout, stages = plan.layout, plan.layout.num_stages
    if stages == 1 or layout.schedule == USUAL:
        return None
    shape = layout.shape
    own = in_flight(SCHEDULES[layout.schedule], shape)
    usual = in_flight(SCHEDULES[USUAL], replace(shape, chunks=1))
    reserve = plan.inputs.context.own.reserve
    totals = [
        each.memory.device_bytes + (1 + reserve) * each.memory.activations * (u / o - 1)
        for each, o, u in zip(plan.estimate.stages, own, usual, strict=True)
    ]
    return ScheduleBinding(
        name=layout.schedule,
        in_flight=max(own),
        idle=plan.estimate.bubble,
        usual_in_flight=max(usual),
        usual_idle=(stages - 1) / (shape.microbatches + stages - 1),
        usual_bytes=round(max(totals)),
        usable_bytes=plan.inputs.context.usable_bytes,
    )


def _bubble(plan: Plan) -> BubbleBinding | None:
    """None where stages wait little, or where more micro-batches do not change it."""
    layout, training = plan.layout, plan.inputs.training
    if layout.num_stages == 1 or plan.estimate.bubble <= ACCEPTED_BUBBLE:
        return None
    for doubled in range(1, MOST_DOUBLED + 1):
        factor = 2**doubled
        inputs = plan.inputs.with_training(global_batch=factor * training.global_batch)
        longer = replace(layout, num_microbatches=factor * layout.num_microbatches)
        idle = estimate(inputs.context, longer).bubble
        if idle <= ACCEPTED_BUBBLE:
            return BubbleBinding(
                microbatches=layout.num_microbatches,
                idle=plan.estimate.bubble,
                cure_microbatches=longer.num_microbatches,
                cure_global_batch=inputs.training.global_batch,
                cure_idle=idle,
            )
    return None
