"""StageCost: what the layers of one stage take and keep, by chunk, before any schedule."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from costmodel.collectives import collective_seconds
from costmodel.fsdpmemory import held_beside, in_split_passes
from costmodel.passes import PassCost
from costmodel.resharding import reshard_s
from costmodel.schedules import SCHEDULES
from costmodel.simulate import send_seconds
from costmodel.work import CollectiveKind
from profiles.layers import Embedding, Head

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from costmodel.context import CostContext
    from costmodel.layerstep import LayerStep
    from costmodel.layout import LayerSpan, Layout, Strategy
    from profiles.layers import Layer

__all__ = ["StageCost", "StepSplit", "gathered_bytes", "held_bytes", "saved_bytes", "stages_of"]

ROUNDING = 1e-12  # of the step: a wait below it is what additions leave behind


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


class StageCost:
    """One stage's layers with their costs, summed per chunk. Equal layers are costed once."""

    def __init__(
        self, context: CostContext, layout: Layout, number: int, sends: list[float]
    ) -> None:
        """``sends``: seconds for which handing on each chunk's result holds up the device."""
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

    @property
    def parameter_bytes(self) -> int:
        """Weights that passes read."""
        return sum(s.states.parameter_bytes * n for s, n in self.steps)

    @property
    def gradient_bytes(self) -> int:
        """What is added up from micro-batch to micro-batch."""
        return sum(s.states.gradient_bytes * n for s, n in self.steps)

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


def stages_of(context: CostContext, layout: Layout) -> list[StageCost]:
    """The costs of every stage of a layout."""
    sends = _sends(context, layout)
    return [StageCost(context, layout, stage, sends[stage]) for stage in range(layout.num_stages)]


def _sends(context: CostContext, layout: Layout) -> list[list[float]]:
    """Seconds for which each device is held up by handing each of its chunks' results on."""
    blocked = 1 - context.own.p2p_overlap
    p2p = context.hand_overs.seconds(layout.mesh, layout.strategies[0], layout.micro_batch)
    links = [blocked * seconds for seconds in p2p]
    found: list[list[float]] = [[] for _ in range(layout.num_stages)]
    places = send_seconds(SCHEDULES[layout.schedule], layout.shape, links)
    for (device, _), seconds in sorted(places.items()):
        found[device].append(seconds)
    return found


def gathered_bytes(stage: StageCost) -> int:
    """Whole parameters and gradients of the chunk at work and of the one that comes next."""
    chunks = [sum(s.states.working_bytes * n for s, n in chunk) for chunk in stage.chunks]
    return sum(sorted(chunks)[-2:])


def saved_bytes(stages: Sequence[StageCost]) -> list[list[int]]:
    """Bytes that one micro-batch keeps of each chunk."""
    return [[sum(s.saved_bytes * n for s, n in chunk) for chunk in st.chunks] for st in stages]


def held_bytes(
    context: CostContext, layout: Layout, stages: Sequence[StageCost]
) -> list[list[int]]:
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
    has_embedding = [
        any(isinstance(run.layer, Embedding) for run in model.runs_between(each.first, each.stop))
        for each in chunks
    ]

    splits = context.training.fsdp2 and SCHEDULES[layout.schedule].splits
    share_gather = SCHEDULES[layout.schedule].microbatches_per_gather(layout.num_stages)

    def step(layer: Layer, span: LayerSpan, number: int) -> LayerStep:
        here = has_embedding[number] if context.training.fsdp2 else any(has_embedding)
        shares = model.tied and here and isinstance(layer, Head)  # FSDP2's chunks have copies
        found = context.layer(
            layer,
            span.strategy,
            layout.micro_batch_of(span.strategy),
            layout.mesh_of(span.strategy),
            shares_embedding=shares,
            share_gather=share_gather,
        )
        if splits and chunks[number] != layout.chunks[0]:  # whose passes are whole
            return in_split_passes(found, context.training)
        return found

    return [
        [
            (step(run.layer, span, number), run.count)
            for span in chunk.spans
            for run in model.runs_between(span.first, span.stop)
        ]
        for number, chunk in enumerate(chunks)
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
