"""Answers as plain data: what ``--format json`` prints."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from costmodel.layout import describe_ranks
from planner.advice import advice
from planner.explain import memory_kinds, rival_of, seconds_by_cause
from planner.plan import layer_ranges, layout_choices, stage_layers
from planner.plandocument import plan_document, restrictions_document
from planner.spend import spend_of
from reports.words import layout_words

if TYPE_CHECKING:
    from collections.abc import Sequence

    from costmodel.estimate import StageEstimate
    from planner.explain import Explanation, Rival
    from planner.plan import Certificate, Plan
    from planner.planning import Planned
    from planner.sensitivity import Shift
    from planner.smallest import Smallest
    from profiles.catalog import CatalogEntry

__all__ = [
    "catalog_answer",
    "estimate_answer",
    "explain_answer",
    "json_text",
    "plan_answer",
    "sensitivity_answer",
    "smallest_answer",
]

TOTALS = (
    "step_s",
    "interval_s",
    "tokens_per_s_per_gpu",
    "mfu",
    "peak_mem_bytes",
    "allocated_bytes",
    "reserved_bytes",
    "peak_mem_interval_bytes",
    "fits",
    "fit_probability",
)
COSTED = ("estimate", "search")


def json_text(answer: dict[str, Any] | list[Any]) -> str:
    """The answer as JSON that every reader takes."""
    return json.dumps(answer, indent=2, allow_nan=False)


def estimate_answer(plan: Plan) -> dict[str, Any]:
    """Totals, seconds by cause, stages, and what the numbers rest on. ``plan`` is the plan file
    without what it estimates.
    """
    own = plan.estimate
    return {
        **{name: getattr(own, name) for name in TOTALS},
        "usable_bytes": plan.inputs.context.usable_bytes,
        "spend": asdict(spend_of(plan)),
        "split": seconds_by_cause(own.split),
        "stages": [_stage(plan, stage) for stage in own.stages],
        "knowledge": own.knowledge,
        "calibration": own.calibration,
        "layout": _layout(plan),
        "notes": list(plan.notes),
        "advice": list(advice(plan)),
        "plan": {key: part for key, part in plan_document(plan).items() if key not in COSTED},
    }


def plan_answer(planned: Planned, *, cpu_s: float) -> dict[str, Any]:
    """The estimate of the best plan, what the search found out, the runners-up, and every layout
    that was simulated and fits.
    """
    plan = planned.plan
    return {
        **estimate_answer(plan),
        "search": _search(plan, cpu_s),
        "runners_up": [_rival(rival_of(plan, other)) for other in planned.runners_up],
        "tried": [
            {
                "step_s": each.estimate.step_s,
                "peak_mem_bytes": each.estimate.peak_mem_bytes,
                "layout": layout_words(each.layout),
            }
            for each in planned.tried
        ],
    }


def smallest_answer(smallest: Smallest) -> dict[str, Any]:
    """How many GPUs are needed, and what the next smaller part of the cluster lacks."""
    return {
        "smallest": {
            "num_gpus": smallest.num_gpus,
            "next_smaller": smallest.smaller,
            "next_smaller_lacks": smallest.lacking or None,
            "state_bytes_per_parameter": smallest.planned.plan.inputs.training.state_bytes,
        }
    }


def explain_answer(explanation: Explanation) -> dict[str, Any]:
    """The estimate, what binds time and memory, and the rivals."""
    plan, time, memory = explanation.plan, explanation.time, explanation.memory
    return {
        **estimate_answer(plan),
        "binds": {
            "time": {"cause": time.cause, "seconds": time.seconds, "part": time.part},
            "memory": {
                "stage": memory.stage,
                "device_bytes": memory.device_bytes,
                "limit_bytes": memory.limit_bytes,
                "usable_bytes": memory.usable_bytes,
                "part": memory.part,
                "kind": memory.kind,
                "kind_bytes": memory.kind_bytes,
            },
            "schedule": None if explanation.schedule is None else asdict(explanation.schedule),
            "bubble": None if explanation.bubble is None else asdict(explanation.bubble),
        },
        "levers": [asdict(lever) for lever in explanation.levers],
        "search": _search(plan, None),
        "runners_up": [_rival(rival) for rival in explanation.rivals],
        "sensitivity": sensitivity_answer(explanation.shifts),
    }


def sensitivity_answer(shifts: Sequence[Shift]) -> list[dict[str, Any]]:
    """The plan and its runners-up under other inputs: ``best`` is a position among them."""
    return [{**asdict(each), "changes_choice": each.changes_choice} for each in shifts]


def _stage(plan: Plan, stage: StageEstimate) -> dict[str, Any]:
    return {
        "stage": stage.stage,
        "layers": stage_layers(plan.inputs.model, plan.layout, stage.stage),
        "ranks": describe_ranks(plan.layout.mesh.stage_ranks(stage.stage)),
        "split": seconds_by_cause(stage.split),
        "memory": memory_kinds(stage.memory),
        "allocated_bytes": stage.memory.allocated_bytes,
        "reserved_bytes": stage.memory.reserved_bytes,
        "device_bytes": stage.memory.device_bytes,
    }


def _layout(plan: Plan) -> dict[str, Any]:
    """Every choice by name, and the layers of each chunk."""
    model, layout = plan.inputs.model, plan.layout
    return {
        **layout_choices(model, layout),
        "used_gpus": layout.mesh.num_ranks,
        "placement": [
            {
                "stage": chunk.stage,
                "chunk": chunk.chunk,
                "layers": layer_ranges(model, chunk.first, chunk.stop),
            }
            for chunk in layout.chunks
        ],
    }


def _search(plan: Plan, cpu_s: float | None) -> dict[str, Any] | None:
    facts = plan.search
    if facts is None:
        return None
    restricted = restrictions_document(facts.restrictions)
    found = {
        "objective": facts.objective,
        "space": {"launcher": plan.launcher, **restricted, "min_fit": plan.min_fit},
        "candidates": facts.candidates,
        "pruned": dict(facts.pruned),
        "refused": dict(facts.refused),
        "bound_s": facts.bound_s,
        "gap": facts.gap,
        "proven": facts.proven,
        "complete": facts.complete,
        "equal_degrees_s": facts.equal_degrees_s,
        "certificate": None if facts.certificate is None else _certificate(facts.certificate),
    }
    return found if cpu_s is None else {**found, "cpu_s": cpu_s}


def _certificate(own: Certificate) -> dict[str, Any]:
    return {**asdict(own), "gap": own.gap}


def _rival(rival: Rival) -> dict[str, Any]:
    own = rival.plan.estimate
    return {
        "step_s": own.step_s,
        "slower_s": rival.slower_s,
        "mfu": own.mfu,
        "peak_mem_bytes": own.peak_mem_bytes,
        "fit_probability": own.fit_probability,
        "layout": _layout(rival.plan),
        "slower_by_cause_s": rival.by_cause_s,
        "differences": [
            {"choice": each.choice, "plan": each.left, "this": each.right}
            for each in rival.differences
        ],
    }


def catalog_answer(entries: list[CatalogEntry]) -> list[dict[str, Any]]:
    """The entries of a shelf."""
    return [{"name": e.name, "aliases": list(e.aliases), **e.facts} for e in entries]
