"""The rules that one layout breaks, each with its numbers and the values that keep it.

The search never meets them, since its space is built by the same rules; they are for layouts that
people write, as flags or in a plan file.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

from costmodel.layout import ContextComm
from costmodel.schedules import SCHEDULES, Shape
from profiles.layers import Block, ExpertFeedForward

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from planner.choices import Degrees
    from planner.space import SearchSpace

__all__ = ["SPLIT_RULE", "BrokenRule", "broken_rules", "listed", "num_microbatches"]

LARGEST_DEGREE: Final = 4_096
SPLIT_RULE: Final = "each half of a split backward pass would compute again"


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokenRule:
    """A rule that does not hold: the choice that breaks it, why, and what would be valid."""

    choice: str
    message: str
    valid: str = ""


class _Batch(Protocol):
    @property
    def global_batch(self) -> int: ...


def num_microbatches(training: _Batch, *, dp: int, micro_batch: int) -> int:
    """Micro-batches of one replica, rounded up where the global batch does not divide."""
    return -(-training.global_batch // (dp * micro_batch))


def broken_rules(
    space: SearchSpace, degrees: Degrees, *, shard_group: int | None = None
) -> list[BrokenRule]:
    """Every rule of the model, the cluster and the schedule that ``degrees`` break."""
    return [
        *_mesh(space, degrees),
        *_tensor(space, degrees),
        *_context(space, degrees),
        *_experts(space, degrees),
        *_pipeline(space, degrees),
        *_sharding(degrees, shard_group),
    ]


def _mesh(space: SearchSpace, d: Degrees) -> Iterator[BrokenRule]:
    inner, total = d.tp * d.cp * d.pp, space.cluster.num_gpus
    if inner * d.dp > total:
        fits = f"dp at most {total // inner}" if inner <= total else "smaller degrees"
        message = (
            f"tp {d.tp} x cp {d.cp} x pp {d.pp} x dp {d.dp} = {inner * d.dp:,} GPUs, "
            f"the cluster has {total:,}"
        )
        yield BrokenRule(choice="dp", message=message, valid=fits)
    batch = space.training.global_batch
    if d.dp > batch:
        message = f"dp {d.dp} with a global batch of {batch}: some replicas have nothing to do"
        yield BrokenRule(choice="dp", message=message, valid=f"dp at most {batch}")
    elif d.micro_batch * d.dp > batch:
        message = f"micro_batch {d.micro_batch} x dp {d.dp} is more than the global batch {batch}"
        valid = f"micro_batch at most {batch // d.dp}"
        yield BrokenRule(choice="micro_batch", message=message, valid=valid)


def _tensor(space: SearchSpace, d: Degrees) -> Iterator[BrokenRule]:
    problem = space.degree_rules.tp_problem(d.tp)
    if problem is not None:
        most = min(space.cluster.num_gpus, LARGEST_DEGREE)
        degrees = (tp for tp in range(1, most + 1) if space.degree_rules.tp_problem(tp) is None)
        yield BrokenRule(choice="tp", message=problem, valid=_one_of(degrees))
    elif d.sequence_parallel:
        tokens = -(-space.training.seq_len // d.cp)
        if d.tp == 1:
            message = "sequence_parallel with tp 1"
            yield BrokenRule(choice="sequence_parallel", message=message, valid="tp at least 2")
        elif tokens % d.tp:
            message = f"sequence_parallel: {tokens} tokens of a rank do not divide by tp {d.tp}"
            yield BrokenRule(choice="sequence_parallel", message=message, valid="false")


def _context(space: SearchSpace, d: Degrees) -> Iterator[BrokenRule]:
    problem = space.degree_rules.cp_problem(d.cp)
    if problem is not None:
        most = min(space.cluster.num_gpus, LARGEST_DEGREE)
        degrees = (cp for cp in range(1, most + 1) if space.degree_rules.cp_problem(cp) is None)
        yield BrokenRule(choice="cp", message=problem, valid=_one_of(degrees))
    problem = space.degree_rules.cp_comm_problem(d.cp_comm)
    if d.cp > 1 and problem is not None:
        yield BrokenRule(choice="cp_comm", message=problem, valid=ContextComm.GATHER)


def _experts(space: SearchSpace, d: Degrees) -> Iterator[BrokenRule]:
    layers = [
        b.feed_forward for b in _blocks(space) if isinstance(b.feed_forward, ExpertFeedForward)
    ]
    if not layers:
        if d.ep > 1 or d.expert_tp > 1:
            choice = "ep" if d.ep > 1 else "expert_tp"
            yield BrokenRule(choice=choice, message="the model has no experts", valid="1")
        return
    experts = min(layer.num_experts for layer in layers)
    ranks = d.tp * d.cp * d.dp
    if experts % d.ep:
        degrees = (ep for ep in range(1, experts + 1) if experts % ep == 0)
        message = f"{experts} experts do not divide by ep {d.ep}"
        yield BrokenRule(choice="ep", message=message, valid=_one_of(degrees))
    elif ranks % (d.ep * d.expert_tp):
        message = (
            f"ep {d.ep} x expert_tp {d.expert_tp} do not divide the {ranks} ranks of a stage "
            f"(tp {d.tp} x cp {d.cp} x dp {d.dp})"
        )
        valid = (
            ep
            for ep in range(1, experts + 1)
            if experts % ep == 0 and ranks % (ep * d.expert_tp) == 0
        )
        yield BrokenRule(choice="ep", message=message, valid=_one_of(valid))
    widths = {layer.expert_hidden for layer in layers}
    if d.expert_tp not in (1, d.tp) or any(width % d.expert_tp for width in widths):
        message = f"expert_tp {d.expert_tp} with tp {d.tp} and experts of width {min(widths)}"
        yield BrokenRule(choice="expert_tp", message=message, valid="1, or tp where it divides")
    if d.tp > 1 and not d.sequence_parallel:
        message = "experts with tp need sequence parallelism"
        yield BrokenRule(choice="sequence_parallel", message=message, valid="true")


def _pipeline(space: SearchSpace, d: Degrees) -> Iterator[BrokenRule]:
    blocks = max(1, space.model.num_blocks)
    if d.pp > blocks:
        message = f"pp {d.pp} stages for {blocks} layers"
        yield BrokenRule(choice="pp", message=message, valid=f"at most {blocks}")
    elif d.pp * d.chunks > blocks:
        message = f"pp {d.pp} x chunks {d.chunks} for {blocks} layers"
        yield BrokenRule(choice="chunks", message=message, valid=f"at most {blocks // d.pp}")
    count = num_microbatches(space.training, dp=d.dp, micro_batch=d.micro_batch)
    problem = SCHEDULES[d.schedule].problem(Shape(d.pp, d.chunks, count))
    if problem is not None:
        yield BrokenRule(choice="schedule", message=problem)


def _sharding(d: Degrees, group: int | None) -> Iterator[BrokenRule]:
    replicas = d.dp * d.cp
    if group is None:
        return
    nests = group % d.cp == 0 or d.cp % group == 0
    if replicas % group or not nests:
        message = f"shard_group {group} does not divide dp {d.dp} x cp {d.cp} = {replicas} ranks"
        groups = (
            g
            for g in range(1, replicas + 1)
            if replicas % g == 0 and (g % d.cp == 0 or d.cp % g == 0)
        )
        yield BrokenRule(choice="shard_group", message=message, valid=_one_of(groups))


def _blocks(space: SearchSpace) -> list[Block]:
    return [run.layer for run in space.model.runs if isinstance(run.layer, Block)]


def _one_of(values: Iterable[int]) -> str:
    return f"one of {listed(values)}"


def listed(values: Iterable[object]) -> str:
    """``1, 2, 4, 8``; the middle left out where there are many."""
    known = [str(value) for value in values]
    if len(known) > _MANY:
        known = [*known[: _MANY - 2], "...", known[-1]]
    return ", ".join(known)


_MANY: Final = 16
