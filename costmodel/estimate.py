"""Layout -> Estimate: step time and memory, split by cause and by stage, with intervals."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist
from typing import TYPE_CHECKING

from costmodel.backwardpeaks import Peak, backward_peaks
from costmodel.fsdpmemory import receive_buffers
from costmodel.intervals import interval_of, octaves_beyond, relative_scale
from costmodel.knowledge import known_of
from costmodel.schedules import SCHEDULES
from costmodel.simulate import PassTimes, peak_held, simulate
from costmodel.stagecost import (
    StageCost,
    StepSplit,
    gathered_bytes,
    held_bytes,
    saved_bytes,
    stages_of,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from costmodel.context import CostContext
    from costmodel.layout import Layout
    from costmodel.measuredlinks import LinkTimes

__all__ = [
    "Estimate",
    "LayoutCost",
    "MemoryBytes",
    "StageEstimate",
    "estimate",
    "fit_limit",
    "scale_of",
    "step_seconds",
]

COVERAGE = 0.9
Z_COVERAGE = NormalDist().inv_cdf((1 + COVERAGE) / 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryBytes:
    """Peak bytes of one rank by kind.

    ``activations`` are held between passes, ``working`` appears on top while a layer runs
    (recomputed tensors, logits, gathered weights), ``buffers`` belong to communication;
    ``parameters`` and ``gradients`` are those that are there at the peak.
    ``reserved`` is the allocator's overhead on what comes and goes, ``context`` what lies outside
    it.
    """

    parameters: int
    gradients: int
    optimizer: int
    activations: int
    working: int
    buffers: int
    reserved: int
    context: int

    @property
    def states_bytes(self) -> int:
        """Parameters, gradients and optimizer states."""
        return self.parameters + self.gradients + self.optimizer

    @property
    def allocated_bytes(self) -> int:
        """What tensors need at the peak."""
        return self.states_bytes + self.activations + self.working + self.buffers

    @property
    def reserved_bytes(self) -> int:
        """What the allocator takes from the device."""
        return self.allocated_bytes + self.reserved

    @property
    def device_bytes(self) -> int:
        """What the device shows as used."""
        return self.reserved_bytes + self.context


@dataclass(frozen=True, slots=True, kw_only=True)
class StageEstimate:
    """One stage: layers, time and memory."""

    stage: int
    num_layers: int
    split: StepSplit
    memory: MemoryBytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """What a layout costs. ``split`` is that of the busiest stage."""

    step_s: float
    interval_s: tuple[float, float]
    tokens_per_s_per_gpu: float
    mfu: float
    peak_mem_bytes: int
    allocated_bytes: int
    reserved_bytes: int
    peak_mem_interval_bytes: tuple[int, int]
    fit_probability: float
    fits: bool
    split: StepSplit
    stages: tuple[StageEstimate, ...]
    knowledge: str
    calibration: str
    bubble: float
    notes: tuple[str, ...] = ()


def fit_limit(context: CostContext, min_fit: float) -> int:
    """Greatest device total in bytes that fits with probability ``min_fit``."""
    z = NormalDist().inv_cdf(min_fit)
    return int(context.usable_bytes / math.exp(z * context.own.memory_sigma))


def estimate(context: CostContext, layout: Layout, *, min_fit: float = 0.9) -> Estimate:
    """Estimate a layout. Raises ValueError if the layout does not belong to the model."""
    return LayoutCost(context, layout).estimate(min_fit=min_fit)


def step_seconds(context: CostContext, layout: Layout) -> float:
    """The step alone, without memory or causes."""
    stages = stages_of(context, layout)
    return _step(context, layout, stages)


def scale_of(context: CostContext, layout: Layout) -> float:
    """How far a measurement of the layout may lie from its estimate, against a usual run's."""
    stages = stages_of(context, layout)
    step_s = _step(context, layout, stages)
    splits = [stage.split(step_s, context, layout) for stage in stages]
    return _scale(context, min(splits, key=lambda split: split.bubble_s))


def _scale(context: CostContext, busiest: StepSplit) -> float:
    params, seq_len = context.model.params_total, context.training.seq_len
    beyond = octaves_beyond(context.calibration.seen, params, seq_len)
    return relative_scale(busiest, experts=context.model.has_experts, beyond=beyond)


class LayoutCost:
    """A layout with its costs: memory, which its orders alone decide, and the simulated step."""

    def __init__(self, context: CostContext, layout: Layout) -> None:
        """Cost the stages. Raises ValueError if the layout does not belong to the model."""
        problems = layout.problems(context.model.num_layers)
        if problems:
            raise ValueError("; ".join(problems))
        self.context = context
        self.layout = layout
        self.stages = stages_of(context, layout)
        self.memory = _memory(context, layout, self.stages)

    @property
    def fullest(self) -> MemoryBytes:
        """Memory of the stage that takes most of its device."""
        return max(self.memory, key=lambda each: each.device_bytes)

    @property
    def fit_probability(self) -> float:
        """Probability that the fullest stage fits its device."""
        margin = math.log(self.context.usable_bytes / self.fullest.device_bytes)
        return NormalDist().cdf(margin / self.context.own.memory_sigma)

    def estimate(self, *, min_fit: float) -> Estimate:
        """Simulate the step and put everything together."""
        context, layout, own = self.context, self.layout, self.context.own
        step_s = _step(context, layout, self.stages)
        estimates = tuple(
            StageEstimate(
                stage=stage.number,
                num_layers=stage.num_layers,
                split=stage.split(step_s, context, layout),
                memory=held,
            )
            for stage, held in zip(self.stages, self.memory, strict=True)
        )
        busiest = min(estimates, key=lambda each: each.split.bubble_s)
        known = known_of(
            context,
            self.stages[busiest.stage].steps,
            layout.num_microbatches,
            traffic_s=busiest.split.traffic_s,
            links=_links_asked(context, layout),
        )
        worst, used = self.fullest, layout.mesh.num_ranks
        fast, slow = known.interval(interval_of(own, _scale(context, busiest.split)), step_s)
        spread = math.exp(Z_COVERAGE * own.memory_sigma)
        total_flop = context.model_flop_per_sequence * context.training.global_batch
        probability = self.fit_probability
        return Estimate(
            step_s=step_s,
            interval_s=(step_s * fast, step_s * slow),
            tokens_per_s_per_gpu=context.training.tokens / step_s / used,
            mfu=total_flop / (step_s * used * context.peak_flop_per_s),
            peak_mem_bytes=worst.device_bytes,
            allocated_bytes=worst.allocated_bytes,
            reserved_bytes=worst.reserved_bytes,
            peak_mem_interval_bytes=(
                int(worst.device_bytes / spread),
                int(worst.device_bytes * spread),
            ),
            fit_probability=probability,
            fits=probability >= min_fit,
            split=busiest.split,
            stages=estimates,
            knowledge=known.level(context.calibration.knowledge),
            calibration=context.calibration.name,
            bubble=busiest.split.bubble_s / step_s,
            notes=known.notes(),
        )


def _links_asked(context: CostContext, layout: Layout) -> LinkTimes | None:
    """The measured links, with what this layout alone asks of them; None where there are none."""
    if context.link_times is None:
        return None
    fresh = context.anew()
    stages_of(fresh, layout)
    return fresh.link_times


def _step(context: CostContext, layout: Layout, stages: Sequence[StageCost]) -> float:
    """The simulated step in seconds."""
    forward, inputs, weight = zip(*(stage.durations() for stage in stages), strict=True)
    p2p = context.hand_overs.seconds(layout.mesh, layout.strategies[0], layout.micro_batch)
    span = simulate(
        SCHEDULES[layout.schedule],
        layout.shape,
        PassTimes(forward_s=forward, input_s=inputs, weight_s=weight),
        [seconds * context.own.p2p_overlap for seconds in p2p],
    )
    ends = [
        end + stage.gradient_s + stage.optimizer_s
        for end, stage in zip(span.ends_s, stages, strict=True)
    ]
    return context.whole_step_s(max(ends), layout.mesh.num_ranks)


def _memory(context: CostContext, layout: Layout, stages: Sequence[StageCost]) -> list[MemoryBytes]:
    schedule = SCHEDULES[layout.schedule]
    if context.training.fsdp2:
        peaks = _fsdp_peaks(context, layout, stages)
    else:
        held = peak_held(schedule, layout.shape, saved_bytes(stages))
        peaks = [_peak(*each) for each in zip(stages, held, strict=True)]
    gathered = max(context.gathered_bytes(s, layout.micro_batch_of(s)) for s in layout.strategies)
    outside = context.own.context_bytes + context.communicator_bytes(
        *(layout.mesh_of(s) for s in layout.strategies)
    )
    found = []
    for stage, peak in zip(stages, peaks, strict=True):
        buffers = gathered
        if context.training.fsdp2:
            buffers = receive_buffers(context, layout, stage.number)
        parts = {
            "parameters": stage.parameter_bytes
            * (1 if schedule.drains else layout.num_stages - stage.number)  # versions in use
            - peak.released,
            "gradients": peak.gradients,
            "optimizer": sum(s.states.optimizer_bytes * n for s, n in stage.steps),
            "activations": math.ceil(peak.activations),
            "working": peak.working,
            "buffers": buffers + (gathered_bytes(stage) if schedule.gathers_by_unit else 0),
        }
        reserved = int(context.own.reserve * (peak.activations + peak.working + buffers))
        found.append(MemoryBytes(**parts, reserved=reserved, context=outside))
    return found


def _peak(stage: StageCost, activations: float) -> Peak:
    """The greatest of each kind, with gradients that have their place from the start of the step,
    as in Megatron-LM.
    """
    return Peak(activations, stage.gradient_bytes, max(s.transient_bytes for s, _ in stage.steps))


def _fsdp_peaks(context: CostContext, layout: Layout, stages: Sequence[StageCost]) -> list[Peak]:
    return backward_peaks(
        SCHEDULES[layout.schedule],
        layout.shape,
        held_bytes(context, layout, stages),
        [stage.chunks for stage in stages],
    )
