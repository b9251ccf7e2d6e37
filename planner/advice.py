"""What to do about a layout that does not fit: what is largest, and changes that were tried."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from costmodel.estimate import LayoutCost
from costmodel.layout import RecomputeKind
from planner.manual import ManualLayout, layout_from_degrees
from profiles.errors import InputError
from profiles.layers import Head
from profiles.training import AttentionKernel
from profiles.units import GIB

if TYPE_CHECKING:
    from collections.abc import Iterator

    from costmodel.estimate import MemoryBytes
    from planner.inputs import Inputs
    from planner.plan import Plan

__all__ = ["advice"]

LARGE = 0.2  # of what may be used: worth a line of its own
LOSS_PIECES = 8


def advice(plan: Plan) -> tuple[str, ...]:
    """Lines on why a plan does not fit and what would help; none where it does. Each change has
    been tried.
    """
    if plan.estimate.fits:
        return ()
    return (*_largest(plan), *_cures(plan))


def _largest(plan: Plan) -> Iterator[str]:
    """The tensors that take the room, where one sequence or the vocabulary is at fault."""
    usable = plan.inputs.context.usable_bytes
    fullest = max(plan.estimate.stages, key=lambda stage: stage.memory.device_bytes)
    memory = fullest.memory
    logits = _logits_bytes(plan)
    has_head = fullest.stage == plan.layout.num_stages - 1
    if has_head and logits > LARGE * usable:
        yield _about_logits(plan, logits, memory)
    training, micro_batch = plan.inputs.training, plan.layout.micro_batch
    passing = memory.activations + memory.working
    if passing > memory.states_bytes and plan.layout.mesh.dp > 1:
        recompute = ", and recomputation frees most of them"
        if _as_typed(plan).recompute == "full":
            recompute = ""
        per = "one sequence" if micro_batch == 1 else f"a micro-batch of {micro_batch} sequences"
        yield (
            f"{passing / GIB:.1f} GiB on stage {fullest.stage} belong to {per} of "
            f"{training.seq_len:,} tokens: data parallelism and ZeRO do not divide them, tensor, "
            f"sequence and context parallelism do{recompute}"
        )


def _about_logits(plan: Plan, logits: int, memory: MemoryBytes) -> str:
    head, training = plan.inputs.model.layers[-1], plan.inputs.training
    assert isinstance(head, Head)
    pieces = memory.device_bytes - logits * (LOSS_PIECES - 1) // LOSS_PIECES
    verdict = "fits" if pieces <= plan.inputs.context.usable_bytes else "does not fit alone"
    return (
        f"logits and loss take {logits / GIB:.1f} GiB: {plan.layout.micro_batch} x "
        f"{training.seq_len:,} tokens x {head.vocab:,} words; a loss computed in {LOSS_PIECES} "
        f"chunks of the sequence would leave {pieces / GIB:.1f} GiB in all ({verdict})"
    )


def _logits_bytes(plan: Plan) -> int:
    """What the head keeps and works with for one micro-batch."""
    head, layout = plan.inputs.model.layers[-1], plan.layout
    if not isinstance(head, Head):
        return 0
    strategy = layout.strategies[-1]
    step = plan.inputs.context.layer(head, strategy, layout.micro_batch, layout.mesh)
    return step.saved_bytes + step.transient_bytes


def _cures(plan: Plan) -> Iterator[str]:
    """Changes of one choice after which the layout fits, from cheap to dear."""
    said: set[str] = set()
    for kind, flag, inputs, manual in _changes(plan):
        if kind in said:
            continue
        try:
            layout = layout_from_degrees(inputs, manual)
        except InputError:
            continue
        cost = LayoutCost(inputs.context, layout)
        if cost.fit_probability >= plan.min_fit:
            said.add(kind)
            yield f"would fit: {flag} ({cost.fullest.device_bytes / GIB:.1f} GiB)"
    if not said:
        yield "no single change makes it fit; parplan plan looks for a layout that does"


def _changes(plan: Plan) -> Iterator[tuple[str, str, Inputs, ManualLayout]]:
    """(kind of change, its flag, inputs, layout): of each kind the smallest change first."""
    own, inputs = _as_typed(plan), plan.inputs
    size = own.micro_batch
    while size > 1:
        size //= 2
        yield "micro-batch", f"--micro-batch {size}", inputs, replace(own, micro_batch=size)
    if inputs.training.attention is AttentionKernel.UNFUSED:
        changed = inputs.with_training(attention=AttentionKernel.FLASH2)
        yield "attention", "--attention flash2", changed, own
    if own.tp > 1 and not own.sequence_parallel:
        spread = replace(own, sequence_parallel=True)
        yield "sequence", "--sequence-parallel", inputs, spread
    if own.recompute != "full":
        yield "recompute", "--recompute full", inputs, replace(own, recompute="full")
    for zero in range(own.zero + 1, 4):
        yield "zero", f"--zero {zero}", inputs, replace(own, zero=zero, shard_group=None)
    for axis in ("cp", "tp", "pp"):
        yield from _spread(plan, own, axis)


def _spread(
    plan: Plan, own: ManualLayout, axis: str
) -> Iterator[tuple[str, str, Inputs, ManualLayout]]:
    """More ranks on ``axis``, taken from the replicas."""
    replicas, factor = own.dp or 1, 2
    node = plan.inputs.cluster.gpus_per_node
    while replicas % factor == 0:
        degree = getattr(own, axis) * factor
        if axis == "tp" and degree > node:
            return
        wider = replace(
            own,
            dp=replicas // factor,
            shard_group=None,
            expert_tp=None,
            sequence_parallel=None,
            **{axis: degree},
        )
        yield axis, f"--{axis} {degree}", plan.inputs, wider
        factor *= 2


def _as_typed(plan: Plan) -> ManualLayout:
    """The layout's choices as flags; where recomputation differs by layer, the most frequent."""
    layout, mesh = plan.layout, plan.layout.mesh
    first = layout.strategies[0]
    counts = [
        (span.stop - span.first, span.strategy.recompute)
        for chunk in layout.chunks
        for span in chunk.spans
    ]
    most = max(counts, key=lambda each: each[0])[1]
    recompute = most.kind.value
    if most.kind is RecomputeKind.SELECTIVE:
        recompute += ":" + "+".join(most.modules)
    return ManualLayout(
        tp=mesh.tp,
        cp=mesh.cp,
        cp_comm=first.cp_comm if mesh.cp > 1 else None,
        ep=mesh.ep,
        expert_tp=mesh.expert_tp,
        pp=mesh.pp,
        dp=mesh.dp,
        chunks=layout.num_chunks,
        micro_batch=layout.micro_batch,
        schedule=layout.schedule,
        zero=first.zero,
        shard_group=first.shard_group,
        sequence_parallel=first.sequence_parallel,
        recompute=recompute,
        rank_order="-".join(mesh.order),
    )
