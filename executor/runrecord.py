"""run.json: what a run measured, beside what its plan estimated, and as a row of measured runs."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from statistics import median
from typing import TYPE_CHECKING, Any, Final

from costmodel.layout import RecomputeKind
from planner.measuredrun import RUN_KIND, group_of
from profiles.fingerprint import fingerprint
from profiles.layers import Block, Embedding, FeedForward
from profiles.units import GIB

if TYPE_CHECKING:
    from collections.abc import Sequence

    from planner.plan import Plan

__all__ = ["RankFacts", "StepFacts", "run_document"]

FIRST_STEPS: Final = 2  # they allocate, and count collectives


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFacts:
    """Of one step, as rank 0 saw it."""

    step: int
    loss: float
    grad_norm: float
    lr: float
    step_s: float
    tokens_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFacts:
    """Of one rank. Peak memory in bytes: of tensors, of the allocator, of the device or process
    (None: not known on this kind of device). ``forward_s`` and ``backward_s``: medians of a step.
    ``ran`` and ``planned``: collectives of one step.
    """

    rank: int
    stage: int
    parameters: int
    allocated_bytes: int | None
    reserved_bytes: int | None
    device_bytes: int
    forward_s: float
    backward_s: float
    ran: list[dict[str, Any]]
    planned: list[dict[str, Any]]

    @property
    def busy_s(self) -> float:
        """Seconds of a step in which it has a pass to run, its collectives included."""
        return self.forward_s + self.backward_s


def steady(steps: Sequence[StepFacts]) -> list[StepFacts]:
    """The steps that count: not the first ones, where there are more."""
    return [*steps[min(FIRST_STEPS, len(steps) - 1) :]]


def run_document(
    plan: Plan,
    steps: Sequence[StepFacts],
    ranks: Sequence[RankFacts],
    *,
    software: dict[str, str],
    earlier: Sequence[dict[str, Any]] = (),
    name: str = "",
) -> dict[str, Any]:
    """The whole record. Steps of the median leave out the first two.

    ``earlier``: steps that the run did when it was started before, maybe under other plans, as its
    log has them: part of its curve, and of nothing that was measured. ``name``: the plan's.
    """
    step_s = median(each.step_s for each in steady(steps))
    facts = [field.name for field in fields(StepFacts)]
    own, training = plan.estimate, plan.inputs.training
    used = plan.layout.mesh.num_ranks
    flop = plan.inputs.context.model_flop_per_sequence * training.global_batch
    device = plan.inputs.cluster.slowest_device
    peak = device.peak_flop_per_s[training.precision.gemm] * used
    return {
        "schema_version": 1,
        "kind": RUN_KIND,
        "software": software,
        "first_step": steps[0].step,
        "measured": {
            "step_s": step_s,
            "tokens_per_s": training.tokens / step_s,
            "tokens_per_s_per_gpu": training.tokens / step_s / used,
            "mfu": flop / step_s / peak,
            "peak_mem_bytes": max(each.device_bytes for each in ranks),
            "allocated_bytes": _most(ranks, "allocated_bytes"),
            "reserved_bytes": _most(ranks, "reserved_bytes"),
            "first_loss": steps[0].loss,
            "last_loss": steps[-1].loss,
        },
        "estimate": {
            "step_s": own.step_s,
            "interval_s": list(own.interval_s),
            "tokens_per_s": training.tokens / own.step_s,
            "tokens_per_s_per_gpu": own.tokens_per_s_per_gpu,
            "mfu": own.mfu,
            "peak_mem_bytes": own.peak_mem_bytes,
            "allocated_bytes": own.allocated_bytes,
            "reserved_bytes": own.reserved_bytes,
            "calibration": own.calibration,
        },
        "stages": [_stage(plan, ranks, stage, step_s) for stage in range(plan.layout.num_stages)],
        "ranks": [asdict(each) for each in ranks],
        "steps": [
            *({**{key: each[key] for key in facts}, "plan": each["plan"]} for each in earlier),
            *({**asdict(each), "plan": name} for each in steps),
        ],
        "row": _row(plan, step_s, ranks, software),
    }


def _most(ranks: Sequence[RankFacts], name: str) -> int | None:
    known = [getattr(each, name) for each in ranks if getattr(each, name) is not None]
    return max(known) if known else None


def _stage(plan: Plan, ranks: Sequence[RankFacts], stage: int, step_s: float) -> dict[str, Any]:
    """The busiest rank of a stage beside the estimate: passes, and the rest of the step."""
    busy = max(each.busy_s for each in ranks if each.stage == stage)
    split = plan.estimate.stages[stage].split
    passes = split.total_s - split.bubble_s - split.gradient_s - split.optimizer_s
    return {
        "stage": stage,
        "measured": {"passes_s": busy, "rest_s": step_s - busy},
        "estimate": {"passes_s": passes, "rest_s": split.total_s - passes},
    }


def _row(
    plan: Plan, step_s: float, ranks: Sequence[RankFacts], software: dict[str, str]
) -> dict[str, Any]:
    """The run in the columns of ``profiles.runs``."""
    training, layout, model = plan.inputs.training, plan.layout, plan.inputs.model
    mesh, cluster = layout.mesh, plan.inputs.cluster
    device = cluster.slowest_device
    allocated = _most(ranks, "allocated_bytes")
    return {
        "id": f"{model.name}-{fingerprint(layout)[:12]}-{software['started']}",
        "file": "parplan",
        "source": "parplan launch",
        "stack": "parplan",
        "framework": "parplan",
        "gpu": device.name,
        "gpus_per_node": cluster.gpus_per_node,
        "n_gpus": mesh.num_ranks,
        "model": model.name,
        **_shape(plan),
        "seq_len": training.seq_len,
        "global_batch": training.global_batch,
        "micro_batch": layout.micro_batch,
        "dp": mesh.dp,
        "tp": mesh.tp,
        "pp": mesh.pp,
        "vpp": layout.num_chunks,
        "cp": mesh.cp,
        "ep": mesh.ep,
        "sequence_parallel": layout.strategies[0].sequence_parallel,
        "zero_stage": _zero(plan),
        "recompute": _recompute(plan),
        "precision": training.precision.value,
        "attn_kernel": f"{training.attention.value} ({software['mode']})",
        "step_time_s": step_s,
        "peak_mem_gib": None if allocated is None else allocated / GIB,
        "mem_basis": "" if allocated is None else "allocated",
        "outcome": "ok",
        "notes": f"torch {'.'.join(software['torch'].split('.')[:2])}, {software['mode']}",
        "full_config": True,
        "trust": "high",
        "mode": "pretrain",
        "rank_group": group_of(plan),
    }


def _shape(plan: Plan) -> dict[str, Any]:
    """Sizes of the model: of its first dense block and of its first one with experts."""
    model = plan.inputs.model
    blocks = [(run.layer, run.count) for run in model.runs if isinstance(run.layer, Block)]
    first = model.layers[0]
    assert isinstance(first, Embedding)
    block = blocks[0][0]
    shape = {
        "layers": model.num_blocks,
        "hidden": block.hidden,
        "heads": block.attention.heads,
        "kv_heads": block.attention.kv_heads,
        "head_dim": block.attention.head_dim,
        "vocab": first.vocab,
        "tied_embeddings": model.tied,
        "gated_mlp": block.feed_forward.gated,
    }
    for each, _ in reversed(blocks):
        own = each.feed_forward
        if isinstance(own, FeedForward):
            shape["ffn_hidden"] = own.ffn_hidden
        else:
            shape |= {"num_experts": own.num_experts, "topk": own.top_k}
            shape |= {"moe_ffn_hidden": own.expert_hidden, "shared_ffn_hidden": own.shared_hidden}
    if "num_experts" in shape:
        shape["dense_layers"] = sum(
            count for each, count in blocks if isinstance(each.feed_forward, FeedForward)
        )
    return shape


def _zero(plan: Plan) -> str:
    """The ZeRO stage of most layers."""
    own = max(
        (span for chunk in plan.layout.chunks for span in chunk.spans),
        key=lambda span: span.stop - span.first,
    ).strategy
    if own.zero and own.shard_group < own.dp * own.cp:
        return f"{own.zero} (shard over {own.shard_group})"
    return str(own.zero)


def _recompute(plan: Plan) -> str:
    """What blocks recompute; where only some do so in full, their number in the fullest stage."""
    layout, model = plan.layout, plan.inputs.model
    counts: dict[tuple[int, str], int] = {}
    kinds: dict[str, RecomputeKind] = {}
    for chunk in layout.chunks:
        for span in chunk.spans:
            own = span.strategy.recompute
            text = f"selective({'+'.join(own.modules)})" if own.modules else own.kind.value
            kinds[text] = own.kind
            blocks = sum(isinstance(each, Block) for each in model.layers[span.first : span.stop])
            counts[chunk.stage, text] = counts.get((chunk.stage, text), 0) + blocks
    used = {text for (_, text), count in counts.items() if count}
    if len(used) == 1:
        return used.pop()
    full = [count for (_, text), count in counts.items() if kinds[text] is RecomputeKind.FULL]
    if full:
        return f"full({max(full)} layers)"
    others = sorted(used - {RecomputeKind.NONE.value})
    return others[0]
