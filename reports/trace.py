"""One step of a plan as a trace that Chrome's and Perfetto's viewers open (Trace Event Format).

A process per stage, a thread per stream, arrows for activations and their gradients, a memory
counter per stage. Times are whole microseconds, so that slices of one thread never overlap.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from costmodel.estimate import LayoutCost
from costmodel.schedules import BACKWARD, FORWARD, INPUT, WEIGHT
from costmodel.steptimeline import step_timeline
from costmodel.timeline import COMPUTE, DATA, HANDOVER, TENSOR

if TYPE_CHECKING:
    from collections.abc import Iterator

    from costmodel.occupancy import Held
    from costmodel.timeline import Event, Timeline
    from planner.plan import Plan

__all__ = ["trace_answer"]

MICRO: Final = 1e6
THREADS: Final = {
    COMPUTE: (0, "compute"),
    TENSOR: (1, "traffic of passes (tp, cp, ep, ZeRO)"),
    HANDOVER: (2, "hand-over (pp)"),
    DATA: (3, "gradients (dp)"),
}
NAMES: Final = {
    FORWARD: "forward",
    BACKWARD: "backward",
    INPUT: "input grad",
    WEIGHT: "weight grad",
}
Record = dict[str, Any]


def trace_answer(plan: Plan) -> Record:
    """The trace of one step. It leaves out host time once a step and jitter, which the estimate
    adds to the whole: ``otherData`` has both figures.
    """
    cost = LayoutCost(plan.inputs.context, plan.layout)
    timeline, held = step_timeline(cost)
    records: list[Record] = []
    for stage in range(plan.layout.num_stages):
        records += _names(stage)
    records += [_slice(event) for event in timeline.events if _shown(event)]
    records += _arrows(timeline)
    for stage, points in enumerate(held):
        records += _memory(stage, points, cost)
        records += _after_passes(stage, timeline, cost)
    return {
        "traceEvents": records,
        "displayTimeUnit": "ms",
        "otherData": {
            "schedule": plan.layout.schedule,
            "step_s": plan.estimate.step_s,
            "passes_s": timeline.makespan_s,
        },
    }


def _shown(event: Event) -> bool:
    return _micro(event.end_s) > _micro(event.start_s)


def _micro(seconds: float) -> int:
    return round(seconds * MICRO)


def _names(stage: int) -> Iterator[Record]:
    yield _record("M", "process_name", stage, args={"name": f"stage {stage}"})
    yield _record("M", "process_sort_index", stage, args={"sort_index": stage})
    for number, name in THREADS.values():
        yield _record("M", "thread_name", stage, tid=number, args={"name": name})


def _record(phase: str, name: str, stage: int, *, tid: int = 0, **more: Any) -> Record:
    return {"ph": phase, "name": name, "pid": stage, "tid": tid, **more}


def _slice(event: Event) -> Record:
    start, end = _micro(event.start_s), _micro(event.end_s)
    kind = NAMES.get(event.kind, "hand-over")
    return _record(
        "X",
        event.name,
        event.device,
        tid=THREADS[event.stream][0],
        ts=start,
        dur=end - start,
        cat=kind,
        args={"pass": kind, "micro_batch": event.microbatch, "chunk": event.chunk},
    )


def _arrows(timeline: Timeline) -> Iterator[Record]:
    """From the pass that makes an activation or a gradient to the one on another stage that needs
    it, past the hand-over between them.
    """
    number = 0
    for event, waits in zip(timeline.events, timeline.waits, strict=True):
        if event.stream != COMPUTE:
            continue
        for i in waits:
            sent = timeline.events[i]
            if sent.stream != HANDOVER or sent.device == event.device:
                continue
            made = timeline.events[timeline.waits[i][0]]
            number += 1
            name = "activation" if event.kind == FORWARD else "gradient"
            ends = (("s", made, made.end_s), ("f", event, event.start_s))
            for phase, own, moment in ends:
                extra: Record = {"bp": "e"} if phase == "f" else {}
                inside = max(_micro(own.start_s), min(_micro(moment), _micro(own.end_s) - 1))
                tid = THREADS[own.stream][0]
                yield _record(
                    phase, name, own.device, tid=tid, ts=inside, id=number, cat="hand-over", **extra
                )


def _memory(stage: int, points: list[Held], cost: LayoutCost) -> Iterator[Record]:
    """States that stay, and activations as they come and go, in bytes."""
    own = cost.memory[stage]
    states = own.parameters + own.gradients + own.optimizer
    for at, point in enumerate(points):
        moment = _micro(point.time_s)
        if at + 1 < len(points) and _micro(points[at + 1].time_s) == moment:
            continue  # only what a moment ends with
        held = {
            "states": states,
            "activations": round(point.activations),
            "for weight gradients": round(point.for_weights),
        }
        yield _record("C", "memory", stage, ts=moment, args=held)


def _after_passes(stage: int, timeline: Timeline, cost: LayoutCost) -> Iterator[Record]:
    """Gradient traffic that is exposed, then the optimizer."""
    end = max(event.end_s for event in timeline.events if event.device == stage)
    own = cost.stages[stage]
    for name, stream, seconds in (
        ("gradients", DATA, own.gradient_s),
        ("optimizer", COMPUTE, own.optimizer_s),
    ):
        start, end = end, end + seconds
        if _micro(end) > _micro(start):
            at = _micro(start)
            tid = THREADS[stream][0]
            yield _record("X", name, stage, tid=tid, ts=at, dur=_micro(end) - at, cat=name)
