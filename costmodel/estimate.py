"""Layout -> Estimate: step time and memory, split by cause and by stage, with intervals."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from statistics import NormalDist
from typing import TYPE_CHECKING

from costmodel.collectives import collective_seconds
from costmodel.fsdpmemory import fsdp_working, held_beside, receive_buffers
from costmodel.knowledge import known_of
from costmodel.layers import PassCost
from costmodel.resharding import reshard_s
from costmodel.schedules import SCHEDULES
from costmodel.simulate import PassTimes, peak_held, send_seconds, simulate
from costmodel.work import CollectiveKind
from profiles.layers import Embedding, Head

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from costmodel.context import CostContext, LayerStep
    from costmodel.layout import LayerSpan, Layout, Strategy
    from costmodel.measuredlinks import LinkTimes
    from profiles.layers import Layer

__all__ = [
    "Estimate",
    "LayoutCost",
    "MemoryBytes",
    "StageEstimate",
    "StepSplit",
    "estimate",
    "fit_limit",
    "held_bytes",
    "saved_bytes",
    "step_seconds",
]

COVERAGE = 0.9
ROUNDING = 1e-12  # of the step: a wait below it is what additions leave behind
Z_COVERAGE = NormalDist().inv_cdf((1 + COVERAGE) / 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSplit:
    """Seconds of one step of one stage, by cause. Communication is what is exposed;
    ``bubble_s`` is the wait for other stages, ``gradient_s`` the reduction of gradients and the
    gathering of updated weights, ``overhead_s`` host time and jitter.
    """

    compute_s: float
    recompute_s: float
    tp_s: float
    cp_s: float
    ep_s: float
    zero_s: float
    p2p_s: float
    bubble_s: float
    gradient_s: float
    optimizer_s: float
    overhead_s: float

    @property
    def traffic_s(self) -> float:
        """Communication that nothing hides."""
        return self.tp_s + self.cp_s + self.ep_s + self.zero_s + self.p2p_s + self.gradient_s

    @property
    def total_s(self) -> float:
        """All causes together: the step."""
        return float(sum(getattr(self, field.name) for field in fields(self)))


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryBytes:
    """Peak bytes of one rank by kind.

    ``activations`` are held between passes, ``working`` appears on top while a layer runs
    (recomputed tensors, logits, gathered weights), ``buffers`` belong to communication.
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
    stages = _stages(context, layout)
    return _step(context, layout, stages)


class LayoutCost:
    """A layout with its costs: memory, which its orders alone decide, and the simulated step."""

    def __init__(self, context: CostContext, layout: Layout) -> None:
        """Cost the stages. Raises ValueError if the layout does not belong to the model."""
        problems = layout.problems(context.model.num_layers)
        if problems:
            raise ValueError("; ".join(problems))
        self.context = context
        self.layout = layout
        self.stages = _stages(context, layout)
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
        fast, slow = known.interval(own.step_time_90, step_s)
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
    _stages(fresh, layout)
    return fresh.link_times


class _Stage:
    """One stage's layers with their costs, summed per chunk. Equal layers are costed once."""

    def __init__(
        self, context: CostContext, layout: Layout, number: int, sends: list[float]
    ) -> None:
        self.number = number
        self.sends = sends
        self.copies = SCHEDULES[layout.schedule].copies
        self.chunks = _counted_steps(context, layout, number)
        if self.copies > 1:  # the other direction's copy of the opposite stage
            self.chunks += _counted_steps(context, layout, layout.num_stages - 1 - number)
        self.steps = [counted for chunk in self.chunks for counted in chunk]
        self.num_layers = sum(count for _, count in self.steps)
        self.forward = [_sum((s.forward, n) for s, n in chunk) for chunk in self.chunks]
        self.backward = [_sum((s.backward, n) for s, n in chunk) for chunk in self.chunks]
        for chunk, (there, back) in enumerate(_resharded(context, layout, number)):
            self.forward[chunk] += PassCost(tp_s=there)
            self.backward[chunk] += PassCost(tp_s=back)
        self.host_s = context.own.micro_batch_s / 2
        self.weight_s = [sum(s.weight_s * n for s, n in chunk) for chunk in self.chunks]
        self.optimizer_s = sum(s.states.optimizer_s * n for s, n in self.steps)
        self.gradient_s = self._gradients(context) + self._tied(context, layout)
        self.gradient_s += self._copied(context, layout)

    def durations(self) -> tuple[list[float], list[float], list[float]]:
        """Seconds of one micro-batch's forward, input gradients and weight gradients on each chunk.
        A pass pays its host time and its hand-over, a backward the one over the same boundary.
        """
        extra = [sent + self.host_s for sent in self.sends]
        forward = [c.total_s + e for c, e in zip(self.forward, extra, strict=True)]
        inputs = [
            c.total_s + e - w for c, e, w in zip(self.backward, extra, self.weight_s, strict=True)
        ]
        return forward, inputs, self.weight_s

    def _gradients(self, context: CostContext) -> float:
        """Reduction hides behind the last micro-batch's backward, all but the last layer's;
        gathering behind the next step's first forward, all but the first layer's.
        """
        part = (self.num_layers - 1) / self.num_layers
        windows = (self.backward, self.forward)
        exposed = 0.0
        for window, name in zip(windows, ("reduce_s", "gather_s"), strict=True):
            traffic: float = sum(getattr(s.states, name) * n for s, n in self.steps)
            behind = part * sum(cost.total_s for cost in window)
            exposed += context.exposed(traffic * part, behind) + traffic * (1 - part)
        return exposed

    def _tied(self, context: CostContext, layout: Layout) -> float:
        """A tied matrix on two stages: its gradient is summed over both once a step."""
        last = layout.num_stages - 1
        together = last == 0 or SCHEDULES[layout.schedule].folds
        if not context.model.tied or together or self.number not in (0, last):
            return 0.0
        head = next(r.layer for r in context.model.runs if isinstance(r.layer, Head))
        tp = layout.chunks[-1].spans[-1].strategy.tp
        size = head.vocab * head.hidden // tp * context.training.grad_dtype.bytes
        link = context.stage_pair(layout.mesh, 0, last)
        return collective_seconds(CollectiveKind.ALL_REDUCE, size, link, context.own)

    def _copied(self, context: CostContext, layout: Layout) -> float:
        """Two copies of the weights: gradients are summed over the device that holds the other
        one, once a step, each rank's shard of them under ZeRO.
        """
        other = layout.num_stages - 1 - self.number
        if self.copies == 1 or other == self.number:
            return 0.0
        strategy = layout.strategies[0]
        gradients = (
            sum(s.states.parameter_bytes * n for s, n in self.steps)
            // context.training.param_bytes
            * context.training.grad_dtype.bytes
        )
        size = gradients // (strategy.shard_group if strategy.zero in (1, 2) else 1)
        link = context.stage_pair(layout.mesh, self.number, other)
        return collective_seconds(CollectiveKind.ALL_REDUCE, size, link, context.own)

    def split(self, step_s: float, context: CostContext, layout: Layout) -> StepSplit:
        """The step as this stage spends it; what is not busy is bubble."""
        count = layout.num_microbatches / self.copies  # micro-batches of each chunk
        passes = _sum((cost, count) for cost in (*self.forward, *self.backward))
        host = 2 * self.host_s * len(self.chunks) * count + passes.host_s
        jitter = context.jitter(layout.mesh.num_ranks)
        overhead = host + context.own.step_s + step_s * jitter / (1 + jitter)
        p2p = 2 * count * sum(self.sends)
        busy = passes.device_s + p2p + overhead + self.gradient_s + self.optimizer_s
        waiting = step_s - busy
        return StepSplit(
            compute_s=passes.compute_s,
            recompute_s=passes.recompute_s,
            tp_s=passes.tp_s,
            cp_s=passes.cp_s,
            ep_s=passes.ep_s,
            zero_s=passes.zero_s,
            p2p_s=p2p,
            bubble_s=waiting if waiting > ROUNDING * step_s else 0.0,
            gradient_s=self.gradient_s,
            optimizer_s=self.optimizer_s,
            overhead_s=overhead,
        )


def _stages(context: CostContext, layout: Layout) -> list[_Stage]:
    sends = _sends(context, layout)
    return [_Stage(context, layout, stage, sends[stage]) for stage in range(layout.num_stages)]


def _sends(context: CostContext, layout: Layout) -> list[list[float]]:
    """Seconds for which each device is held up by handing each of its chunks' results on."""
    blocked = 1 - context.own.p2p_overlap
    p2p = context.p2p_s(layout.mesh, layout.strategies[0], layout.micro_batch)
    links = [blocked * seconds for seconds in p2p]
    found: list[list[float]] = [[] for _ in range(layout.num_stages)]
    places = send_seconds(SCHEDULES[layout.schedule], layout.shape, links)
    for (device, _), seconds in sorted(places.items()):
        found[device].append(seconds)
    return found


def _gathered_chunks(stage: _Stage) -> int:
    """Whole parameters and gradients of the chunk at work and of the one that comes next."""
    chunks = [sum(s.states.working_bytes * n for s, n in chunk) for chunk in stage.chunks]
    return sum(sorted(chunks)[-2:])


def saved_bytes(stages: Sequence[_Stage]) -> list[list[int]]:
    """Bytes that one micro-batch keeps of each chunk."""
    return [[sum(s.saved_bytes * n for s, n in chunk) for chunk in st.chunks] for st in stages]


def held_bytes(context: CostContext, layout: Layout, stages: Sequence[_Stage]) -> list[list[int]]:
    """The same where PyTorch hands activations on."""
    beside = [held_beside(context, layout, stage.number) for stage in stages]
    return [
        [kept + more for kept, more in zip(*both, strict=True)]
        for both in zip(saved_bytes(stages), beside, strict=True)
    ]


def _sum(costs: Iterable[tuple[PassCost, float]]) -> PassCost:
    total = PassCost()
    for cost, count in costs:
        total = total + cost * count
    return total


def _counted_steps(
    context: CostContext, layout: Layout, stage: int
) -> list[list[tuple[LayerStep, int]]]:
    """For each chunk of a stage its distinct layer costs and how often each occurs."""
    model, chunks = context.model, layout.stage_chunks(stage)
    tied_here = model.tied and any(
        isinstance(run.layer, Embedding)
        for chunk in chunks
        for run in model.runs_between(chunk.first, chunk.stop)
    )

    share_gather = SCHEDULES[layout.schedule].microbatches_per_gather(layout.num_stages)

    def step(layer: Layer, span: LayerSpan) -> LayerStep:
        shares = tied_here and isinstance(layer, Head)
        return context.layer(
            layer,
            span.strategy,
            layout.micro_batch_of(span.strategy),
            layout.mesh_of(span.strategy),
            shares_embedding=shares,
            share_gather=share_gather,
        )

    return [
        [
            (step(run.layer, span), run.count)
            for span in chunk.spans
            for run in model.runs_between(span.first, span.stop)
        ]
        for chunk in chunks
    ]


def _resharded(context: CostContext, layout: Layout, stage: int) -> list[tuple[float, float]]:
    """For each chunk of a stage the seconds of both ways in which activations and gradients
    change hands between layers of different tp; the later layer's chunk pays.
    """
    if len(layout.strategies) == 1:
        return [(0.0, 0.0)] * layout.num_chunks
    before: dict[int, Strategy] = {}
    for chunk in layout.chunks:
        for span in chunk.spans:
            before[span.stop] = span.strategy
    found = []
    for chunk in layout.stage_chunks(stage):
        ways = [
            reshard_s(context, layout, before[span.first], span.strategy)
            for span in chunk.spans
            if span.first in before
        ]
        found.append((sum(there for there, _ in ways), sum(back for _, back in ways)))
    return found


def _step(context: CostContext, layout: Layout, stages: Sequence[_Stage]) -> float:
    """The simulated step in seconds."""
    forward, inputs, weight = zip(*(stage.durations() for stage in stages), strict=True)
    p2p = context.p2p_s(layout.mesh, layout.strategies[0], layout.micro_batch)
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


def _memory(context: CostContext, layout: Layout, stages: Sequence[_Stage]) -> list[MemoryBytes]:
    fsdp2 = context.training.fsdp2
    saved = held_bytes(context, layout, stages) if fsdp2 else saved_bytes(stages)
    peaks = peak_held(SCHEDULES[layout.schedule], layout.shape, saved)
    gathered = max(context.gathered_bytes(s, layout.micro_batch_of(s)) for s in layout.strategies)
    outside = context.own.context_bytes + context.communicator_bytes(
        *(layout.mesh_of(s) for s in layout.strategies)
    )
    schedule = SCHEDULES[layout.schedule]
    found = []
    for stage, activations in zip(stages, peaks, strict=True):
        working, buffers = max(s.transient_bytes for s, _ in stage.steps), gathered
        if fsdp2:
            working = fsdp_working(stage.chunks)
            buffers = receive_buffers(context, layout, stage.number)
        parts = {
            "parameters": sum(s.states.parameter_bytes * n for s, n in stage.steps)
            * (1 if schedule.drains else layout.num_stages - stage.number),  # versions in use
            "gradients": sum(s.states.gradient_bytes * n for s, n in stage.steps),
            "optimizer": sum(s.states.optimizer_bytes * n for s, n in stage.steps),
            "activations": math.ceil(activations),
            "working": working,
            "buffers": buffers + (_gathered_chunks(stage) if schedule.gathers_by_unit else 0),
        }
        reserved = int(context.own.reserve * (activations + working + buffers))
        found.append(MemoryBytes(**parts, reserved=reserved, context=outside))
    return found
