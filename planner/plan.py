"""Plan: a layout bound to its inputs and to what it costs; what two plans decide differently."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from itertools import groupby
from typing import TYPE_CHECKING, Any, Final

from profiles.fingerprint import fingerprint

if TYPE_CHECKING:
    from collections.abc import Mapping

    from costmodel.estimate import Estimate
    from costmodel.layout import Layout
    from planner.choices import Restrictions
    from planner.inputs import Inputs
    from profiles.model import ModelSpec

__all__ = [
    "MIN_FIT",
    "Certificate",
    "Difference",
    "Plan",
    "SearchFacts",
    "diff_plans",
    "layer_ranges",
    "layout_choices",
    "plan_of",
    "stage_layers",
]

MIN_FIT: Final = 0.9  # probability with which a plan has to fit unless another is asked for
SHARDING = ("zero", "shard_group", "sequence_parallel", "cp_comm")
DEGREES = ("tp", "cp", "ep", "expert_tp", "dp", "pp")


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificate:
    """``objective_s``: the closed form of the step of the best assignment known; ``bound_s``: what
    no assignment of the candidate is below, by ``solver``. ``note``: where a solver failed.
    """

    solver: str
    objective_s: float
    bound_s: float
    note: str = ""
    cpu_s: float = field(default=0.0, compare=False)

    @property
    def gap(self) -> float:
        """Relative distance of the two; about 1e-6 is the solver's tolerance."""
        return max(0.0, 1 - self.bound_s / self.objective_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchFacts:
    """What was searched and what was shown. ``restrictions`` include a fixed micro-batch.

    ``pruned`` counts candidates by what excluded them, ``refused`` what the space left out by
    rule. ``complete`` is False where the search was stopped early. ``bound_s`` is that of layouts
    whose layers have the same degrees; where a mix of degrees is faster than the best of them,
    ``equal_degrees_s`` is that one's step.
    """

    restrictions: Restrictions
    candidates: int
    pruned: Mapping[str, int]
    refused: Mapping[str, int]
    bound_s: float
    gap: float
    proven: bool
    complete: bool = True
    objective: str = "step-time"
    equal_degrees_s: float | None = None
    certificate: Certificate | None = None


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A layout with its inputs, its estimate and, where it was searched for, the proof.

    ``inputs.training.micro_batch`` is the layout's. ``remarks`` are about this plan alone;
    ``notes`` has everything that a reader should know.
    """

    inputs: Inputs
    layout: Layout
    estimate: Estimate
    launcher: str = "any"
    min_fit: float = MIN_FIT
    search: SearchFacts | None = None
    remarks: tuple[str, ...] = field(default=(), compare=False)

    @property
    def notes(self) -> tuple[str, ...]:
        """Calibration, ragged batch, unused GPUs, and what else was remarked."""
        return (
            *self.inputs.notes,
            *self.estimate.notes,
            *_layout_notes(self),
            *self.remarks,
        )


def plan_of(
    inputs: Inputs, layout: Layout, *, launcher: str = "any", min_fit: float = MIN_FIT
) -> Plan:
    """The plan of a layout that nobody searched for."""
    from costmodel.estimate import estimate  # noqa: PLC0415 - imports numpy, slowly

    bound = inputs.with_training(micro_batch=layout.micro_batch)
    own = estimate(bound.context, layout, min_fit=min_fit)
    return Plan(inputs=bound, layout=layout, estimate=own, launcher=launcher, min_fit=min_fit)


def _layout_notes(plan: Plan) -> list[str]:
    layout, notes = plan.layout, []
    batch = plan.inputs.training.global_batch
    padded = layout.mesh.dp * layout.micro_batch * layout.num_microbatches
    if padded != batch:
        notes.append(
            f"the global batch {batch} does not divide by micro-batch {layout.micro_batch} x dp "
            f"{layout.mesh.dp}: timed as {layout.num_microbatches} whole micro-batches a replica"
        )
    total, used = plan.inputs.cluster.num_gpus, layout.mesh.num_ranks
    if used < total:
        notes.append(f"{total - used} of {total} GPUs stay unused")
    return notes


def layer_ranges(model: ModelSpec, first: int, stop: int) -> list[str]:
    """Layers ``first`` .. ``stop - 1`` by name, numbers as ranges: ``["embedding", "0-9"]``."""
    names = model.layer_names[first:stop]
    found = []
    for numbered, group in groupby(names, key=str.isdigit):
        part = list(group)
        if numbered and len(part) > 1:
            found.append(f"{part[0]}-{part[-1]}")
        else:
            found += part
    return found


def stage_layers(model: ModelSpec, layout: Layout, stage: int) -> str:
    """All layers of a stage, its chunks one after another: ``embedding,0-4,40-44``."""
    chunks = layout.stage_chunks(stage)
    return ",".join(name for c in chunks for name in layer_ranges(model, c.first, c.stop))


def layout_choices(model: ModelSpec, layout: Layout) -> dict[str, Any]:
    """Every decision of a layout by name, as ``--fix`` calls them, then the cut of the chain and
    what is recomputed where.
    """
    mesh = layout.mesh
    return {
        **{name: getattr(mesh, name) for name in DEGREES},
        "chunks": layout.num_chunks,
        "schedule": layout.schedule,
        "micro_batch": layout.micro_batch,
        "num_microbatches": layout.num_microbatches,
        **{name: _by_layer(model, layout, name) for name in SHARDING},
        "rank_order": "-".join(mesh.order),
        "stage_layers": " | ".join(
            ",".join(layer_ranges(model, chunk.first, chunk.stop)) for chunk in layout.chunks
        ),
        "recompute": _by_layer(model, layout, "recompute"),
    }


def _by_layer(model: ModelSpec, layout: Layout, name: str) -> Any:
    """A choice that layers may take differently: its value, or the layers of each value."""
    found: dict[Any, list[str]] = {}
    spans = [span for chunk in layout.chunks for span in chunk.spans]
    for value, group in groupby(spans, key=lambda span: getattr(span.strategy, name)):
        own = list(group)
        found.setdefault(value, []).extend(layer_ranges(model, own[0].first, own[-1].stop))
    if len(found) == 1:
        only = next(iter(found))
        return only if isinstance(only, int) else str(only)
    return "; ".join(f"{value}: {','.join(layers)}" for value, layers in found.items())


@dataclass(frozen=True, slots=True)
class Difference:
    """A decision that two plans take differently."""

    choice: str
    left: str
    right: str

    def __str__(self) -> str:
        return f"{self.choice}: {self.left} -> {self.right}"


def diff_plans(left: Plan, right: Plan) -> list[Difference]:
    """The decisions and inputs in which two plans differ, in the order of the plan file."""
    ours, theirs = _decisions(left), _decisions(right)
    return [
        Difference(name, str(ours[name]), str(theirs[name]))
        for name in ours
        if ours[name] != theirs[name]
    ]


def _decisions(plan: Plan) -> dict[str, object]:
    inputs = plan.inputs
    training = {each.name: getattr(inputs.training, each.name) for each in fields(inputs.training)}
    training.pop("micro_batch")  # a choice of the layout
    return {
        "model": f"{inputs.model.name} ({fingerprint(inputs.model)[:8]})",
        "cluster": f"{inputs.cluster.name} ({fingerprint(inputs.cluster)[:8]})",
        **training,
        "calibration": f"{inputs.calibration.name} ({fingerprint(inputs.calibration)[:8]})",
        "profile": _profile_words(inputs),
        "launcher": plan.launcher,
        **layout_choices(inputs.model, plan.layout),
    }


def _profile_words(inputs: Inputs) -> str:
    own = inputs.profile
    return "none" if own is None else f"{own.name} ({fingerprint(own)[:8]})"
