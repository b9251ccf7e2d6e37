"""Layouts by hand: degrees and a cut, as people type them -> a checked Layout."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from costmodel.layout import (
    MODULES,
    NO_RECOMPUTE,
    Axis,
    ContextComm,
    Layout,
    Mesh,
    Recompute,
    RecomputeKind,
    Strategy,
)
from costmodel.placing import even_cut, placed_chunks
from costmodel.schedules import SCHEDULES, Shape
from planner.choices import Degrees
from planner.rules import SPLIT_RULE, broken_rules, num_microbatches
from planner.space import SearchSpace
from profiles.errors import InputError, Problem
from profiles.nearest import nearest

if TYPE_CHECKING:
    from planner.inputs import Inputs
    from profiles.model import ModelSpec

__all__ = ["ManualLayout", "layout_from_degrees"]

RECOMPUTE_FORMS: Final = "none, selective, selective:module+module, full or full:N"


@dataclass(frozen=True, slots=True, kw_only=True)
class ManualLayout:
    """Choices of one layout as typed; None stands for what is usual.

    ``dp``: fills the cluster. ``cp_comm``: a ring, where attention has no windows. ``expert_tp``:
    tp, for models with experts. ``shard_group``: all replicas. ``schedule``: 1f1b, interleaved for
    several chunks. ``sequence_parallel``: with tp, where the sequence divides. ``recompute``: none,
    selective (of core_attn), selective:mlp+..., full, full:N (the first N blocks of every chunk).
    ``stage_layers``: blocks of each stage, or of each chunk in model order, as 9,10,10,11; None
    cuts evenly.
    """

    tp: int = 1
    cp: int = 1
    cp_comm: str | None = None
    ep: int = 1
    expert_tp: int | None = None
    pp: int = 1
    dp: int | None = None
    chunks: int = 1
    micro_batch: int = 1
    schedule: str | None = None
    zero: int = 0
    shard_group: int | None = None
    sequence_parallel: bool | None = None
    recompute: str = "none"
    rank_order: str = "tp-cp-ep-dp-pp"
    stage_layers: str | None = None


def layout_from_degrees(inputs: Inputs, manual: ManualLayout) -> Layout:
    """The layout that ``manual`` describes. Raises ``InputError`` with every rule it breaks."""
    problems: list[Problem] = []
    order = _rank_order(manual.rank_order, problems)
    recompute, first = _recompute(manual.recompute, problems)
    schedule = _schedule(manual, problems)
    if SCHEDULES[schedule].splits and recompute.kind is not RecomputeKind.NONE:
        message = f"recompute with {schedule}: {SPLIT_RULE}"
        problems.append(Problem(where="--recompute", message=message, expected="none"))
    space = SearchSpace(inputs.model, inputs.cluster, inputs.training)
    way = _cp_comm(manual, problems) or space.cp_comm(manual.cp) or ContextComm.RING
    degrees = _degrees(inputs, manual, schedule)._replace(cp_comm=way)
    for broken in broken_rules(space, degrees, shard_group=manual.shard_group):
        where = "--" + broken.choice.replace("_", "-")
        problems.append(Problem(where=where, message=broken.message, expected=broken.valid))
    sizes = _cut(inputs.model, manual, problems)
    if problems:
        raise InputError(problems)
    mesh = Mesh(
        tp=degrees.tp,
        cp=degrees.cp,
        dp=degrees.dp,
        pp=degrees.pp,
        ep=degrees.ep,
        expert_tp=degrees.expert_tp,
        order=order,
    )
    plain = Strategy(
        tp=degrees.tp,
        cp=degrees.cp,
        ep=degrees.ep,
        expert_tp=degrees.expert_tp,
        dp=degrees.dp,
        zero=manual.zero,
        shard_group=manual.shard_group or degrees.dp * degrees.cp,
        sequence_parallel=degrees.sequence_parallel,
        cp_comm=degrees.cp_comm,
    )
    count = num_microbatches(inputs.training, dp=degrees.dp, micro_batch=manual.micro_batch)
    path, *_ = SCHEDULES[schedule].paths(Shape(degrees.pp, manual.chunks, count))
    return Layout(
        mesh=mesh,
        schedule=schedule,
        num_chunks=manual.chunks,
        micro_batch=manual.micro_batch,
        num_microbatches=count,
        chunks=placed_chunks(inputs.model, sizes, path, plain, (recompute, first)),
    )


def _degrees(inputs: Inputs, manual: ManualLayout, schedule: str) -> Degrees:
    """The degrees with the usual in place of what was left open."""
    training = inputs.training
    inner = manual.tp * manual.cp * manual.pp
    fill = max(1, inputs.cluster.num_gpus // inner)
    dp = manual.dp or min(fill, max(1, training.global_batch // manual.micro_batch))
    sequence = manual.sequence_parallel
    if sequence is None:
        sequence = manual.tp > 1 and -(-training.seq_len // manual.cp) % manual.tp == 0
    return Degrees(
        tp=manual.tp,
        cp=manual.cp,
        ep=manual.ep,
        expert_tp=manual.expert_tp or (manual.tp if inputs.model.has_experts else 1),
        pp=manual.pp,
        dp=dp,
        micro_batch=manual.micro_batch,
        chunks=manual.chunks,
        schedule=schedule,
        sequence_parallel=sequence,
    )


def _rank_order(text: str, problems: list[Problem]) -> tuple[Axis, ...]:
    names = text.lower().replace(",", "-").split("-")
    axes = [axis.value for axis in Axis]
    if sorted(names) == sorted(axes):
        return tuple(Axis(name) for name in names)
    expected = f"each of {', '.join(axes)} once, fastest first, as tp-cp-ep-dp-pp"
    message = f"rank_order is {text!r}"
    problems.append(Problem(where="--rank-order", message=message, expected=expected))
    return tuple(Axis)


def _schedule(manual: ManualLayout, problems: list[Problem]) -> str:
    usual = "1f1b" if manual.chunks == 1 else "interleaved-1f1b"
    name = manual.schedule or usual
    if name in SCHEDULES:
        return name
    problems.append(
        Problem(
            where="--schedule",
            message=f"there is no schedule {name!r}",
            expected=f"one of {', '.join(SCHEDULES)}",
            hint=nearest(name, SCHEDULES),
        )
    )
    return usual


def _cp_comm(manual: ManualLayout, problems: list[Problem]) -> ContextComm | None:
    name, known = manual.cp_comm, tuple(ContextComm)
    if name is None or name in known:
        return None if name is None else ContextComm(name)
    message, expected = f"cp_comm is {name!r}", f"one of {', '.join(known)}"
    hint = nearest(name, known)
    problems.append(Problem(where="--cp-comm", message=message, expected=expected, hint=hint))
    return None


def _recompute(text: str, problems: list[Problem]) -> tuple[Recompute, int | None]:
    """The recomputation, and how many blocks of a chunk take it (None: all)."""
    kind, _, rest = text.lower().partition(":")
    if kind == "none" and not rest:
        return NO_RECOMPUTE, None
    if kind == "full" and (not rest or (rest.isascii() and rest.isdigit())):
        return Recompute(RecomputeKind.FULL), int(rest) if rest else None
    modules = rest.split("+") if rest else ["core_attn"]
    unknown = [module for module in modules if module not in MODULES]
    if kind == "selective" and not unknown:
        return Recompute(RecomputeKind.SELECTIVE, tuple(sorted(set(modules)))), None
    if kind == "selective":
        expected = f"modules of {', '.join(MODULES)}"
        hint = nearest(unknown[0], MODULES)
    else:
        expected, hint = RECOMPUTE_FORMS, nearest(kind, ["none", "selective", "full"])
    message = f"recompute is {text!r}"
    problems.append(Problem(where="--recompute", message=message, expected=expected, hint=hint))
    return NO_RECOMPUTE, None


def _cut(model: ModelSpec, manual: ManualLayout, problems: list[Problem]) -> list[int]:
    """Blocks of every chunk in model order."""
    blocks, count = model.num_blocks, manual.pp * manual.chunks
    if manual.stage_layers is None:
        return even_cut(blocks, count)
    parts = [part.strip() for part in manual.stage_layers.split(",")]
    sizes = [int(part) if part.isascii() and part.isdigit() else 0 for part in parts]
    if len(sizes) != count or sum(sizes) != blocks or min(sizes) < 1:
        message = f"{len(sizes)} numbers with a sum of {sum(sizes)}"
        expected = f"{count} numbers, each at least 1, with a sum of {blocks}"
        problems.append(Problem(where="--stage-layers", message=message, expected=expected))
    return sizes
