"""Whether a launcher can express a layout: what it cannot, choice by choice.

The search never meets these, since its space is built by the same ``LauncherRules``; they are for
plans that were made for another launcher.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from costmodel.layout import NO_RECOMPUTE, RecomputeKind
from planner.launchers import LAUNCHERS, Mixing
from planner.rules import BrokenRule
from planner.space import SearchSpace
from profiles.layers import Block, Embedding, Head

if TYPE_CHECKING:
    from collections.abc import Iterator

    from costmodel.layout import Layout, Recompute
    from planner.inputs import Inputs
    from planner.launchers import LauncherRules

__all__ = ["inexpressible"]


def inexpressible(launcher: str, inputs: Inputs, layout: Layout) -> list[BrokenRule]:
    """The decisions of a layout that ``launcher`` cannot express; empty if it can."""
    rules = LAUNCHERS[launcher]
    space = SearchSpace(inputs.model, inputs.cluster, inputs.training, launcher=launcher)
    recomputes = _recomputes(inputs, layout)
    found = [
        *_degrees(space, rules, layout),
        *_pipeline(inputs, rules, layout),
        *_alike(rules, layout),
    ]
    every = {option for chunk in recomputes for option in chunk}
    for strategy in layout.strategies:
        found += [
            BrokenRule(choice=choice, message=why, valid=_valid(choice, rules))
            for choice, why in rules.refusals(
                layout.mesh,
                strategy,
                every,
                schedule=layout.schedule,
                microbatches=layout.num_microbatches,
            )
        ]
    found += _mixing(rules, recomputes)
    return list(dict.fromkeys(found))


def _valid(choice: str, rules: LauncherRules) -> str:
    return " or ".join(rules.cp_comm) if choice == "cp_comm" else ""


def _recomputes(inputs: Inputs, layout: Layout) -> list[list[Recompute]]:
    """What each block recomputes, chunk by chunk."""
    layers = inputs.model.layers
    return [
        [
            span.strategy.recompute
            for span in chunk.spans
            for position in range(span.first, span.stop)
            if isinstance(layers[position], Block)
        ]
        for chunk in layout.chunks
    ]


def _degrees(space: SearchSpace, rules: LauncherRules, layout: Layout) -> Iterator[BrokenRule]:
    mesh = layout.mesh
    for name, problem in (
        ("tp", space.degree_rules.tp_problem(mesh.tp)),
        ("cp", space.degree_rules.cp_problem(mesh.cp)),
    ):
        if problem is not None:
            yield BrokenRule(choice=name, message=problem)
    if mesh.ep > 1 and not rules.experts:
        message = f"{rules.name} has no expert parallelism"
        yield BrokenRule(choice="ep", message=message, valid="1")
    if mesh.expert_tp > 1 and space.model.has_experts and not rules.expert_tensor:
        message = f"{rules.name} does not split experts over tensor parallel ranks"
        yield BrokenRule(choice="expert_tp", message=message, valid="1")


def _pipeline(inputs: Inputs, rules: LauncherRules, layout: Layout) -> Iterator[BrokenRule]:
    pp = layout.num_stages
    if pp > 1 and not rules.pipeline:
        yield BrokenRule(choice="pp", message=f"{rules.name} has no pipeline", valid="1")
        return
    if layout.schedule not in rules.schedules:
        message = f"{rules.name} does not run {layout.schedule}"
        valid = f"one of {', '.join(rules.schedules)}"
        yield BrokenRule(choice="schedule", message=message, valid=valid)
    layers = inputs.model.layers
    sizes = [
        sum(not isinstance(layers[i], Embedding | Head) for i in range(chunk.first, chunk.stop))
        for chunk in layout.chunks
    ]
    cut = ",".join(map(str, sizes))
    if not rules.uneven_stages and len(set(sizes)) > 1:
        blocks = inputs.model.num_blocks
        valid = f"{blocks // pp} each" if blocks % pp == 0 else "a pp that divides the layers"
        message = f"stages of {cut} layers: {rules.name} cuts evenly"
        yield BrokenRule(choice="stage_layers", message=message, valid=valid)
    elif not rules.empty_stages and min(sizes) == 0:
        message = f"stages of {cut} layers: {rules.name} needs a block on every stage"
        yield BrokenRule(choice="stage_layers", message=message, valid="at least 1 each")


def _alike(rules: LauncherRules, layout: Layout) -> Iterator[BrokenRule]:
    """Choices that layers take differently where the launcher has one for all."""
    if rules.mixes_degrees:
        return
    for name in ("tp", "dp", "zero", "shard_group", "sequence_parallel"):
        values = sorted({getattr(strategy, name) for strategy in layout.strategies})
        if len(values) > 1:
            message = f"layers with {name} {' and '.join(str(value) for value in values)}"
            yield BrokenRule(choice=name, message=message, valid="the same for all layers")


def _mixing(rules: LauncherRules, recomputes: list[list[Recompute]]) -> Iterator[BrokenRule]:
    kinds = {option for chunk in recomputes for option in chunk}
    selective = [option for option in kinds if option.kind is RecomputeKind.SELECTIVE]
    if selective and not rules.selective:
        names = ", ".join(sorted(str(option) for option in selective))
        message = f"{rules.name} recomputes whole blocks, not {names}"
        yield BrokenRule(choice="recompute", message=message, valid="none or full")
    elif rules.mixing is not Mixing.PER_LAYER and len(kinds) > 1:
        names = ", ".join(sorted(str(option) for option in kinds))
        if rules.mixing is Mixing.WHOLE_MODEL or selective:
            message, valid = f"layers with {names}", "one for all layers"
            yield BrokenRule(choice="recompute", message=message, valid=valid)
        elif not _first_of_chunk(recomputes):
            counts = [sum(option is not NO_RECOMPUTE for option in chunk) for chunk in recomputes]
            message = f"{', '.join(map(str, counts))} recomputed layers of the chunks"
            valid = "the first N of every chunk, N one number"
            yield BrokenRule(choice="recompute", message=message, valid=valid)


def _first_of_chunk(recomputes: list[list[Recompute]]) -> bool:
    """Whether every chunk recomputes its first N blocks, or all where it has fewer."""
    flags = [[option.kind is RecomputeKind.FULL for option in chunk] for chunk in recomputes]
    most = max(sum(chunk) for chunk in flags)
    return all(chunk == [position < most for position in range(len(chunk))] for chunk in flags)
